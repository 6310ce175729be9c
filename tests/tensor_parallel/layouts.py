"""Layouts for models of any kind, by what Keras calls their variables."""

import re

import keras

# What the last name of a path is laid out as; {} is the layer's name.
_RULES = (
    (r".*(conv1d|conv2d|conv3d)[_\d]*/kernel", "convolution"),
    (r".*attention[^/]*/(query|key|value)/kernel", (None, "model", None)),
    (r".*attention[^/]*/(query|key|value)/bias", ("model", None)),
    (r".*attention_output/kernel", ("model", None, None)),
    (r".*embeddings", ("model", None)),
    (r".*(lstm|gru|simple_rnn|rnn)[^/]*/.*(kernel|recurrent_kernel)", (None, "model")),
    (r".*(dense|hidden|scores|class|value)[_\d]*/kernel", "dense"),
)
_RANKS = {"conv1d": 3, "conv2d": 4, "conv3d": 5}


class LayoutOfAnything(keras.distribution.LayoutMap):
    """Kernels by columns or rows in turn, embeddings by rows, attention by heads."""

    def __getitem__(self, key: str):
        for pattern, rule in _RULES:
            if re.fullmatch(pattern, key):
                return keras.distribution.TensorLayout(_axes(key, rule), self.device_mesh)
        return None


class LayoutOfImages(LayoutOfAnything):
    """What convolutions give is in parts along rows of the image; other layers as above."""

    def __getitem__(self, key: str):
        found = re.fullmatch(r".*(conv[12]d)[_\d]*/(output|kernel)", key)
        if found is None:
            return super().__getitem__(key)
        if found[2] == "kernel":
            return None
        axes = (None, "model", *[None] * (_RANKS[found[1]] - 2))
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def _axes(path: str, rule) -> tuple:
    layer = path.split("/")[-2]
    digits = re.findall(r"\d+", layer)
    is_row = bool(digits) and int(digits[-1]) % 2 == 1
    if rule == "dense":
        return ("model", None) if is_row else (None, "model")
    if rule == "convolution":
        rank = _RANKS[layer.split("_")[0]]
        dim = rank - 2 if is_row else rank - 1
        return tuple("model" if i == dim else None for i in range(rank))
    return rule


def cpu_mesh(replicas: int, parts: int) -> keras.distribution.DeviceMesh:
    """Logical CPUs as a mesh of two axes."""
    devices = [f"cpu:{i}" for i in range(replicas * parts)]
    return keras.distribution.DeviceMesh((replicas, parts), ("batch", "model"), devices)


def layout_map(replicas: int, parts: int, layouts: dict) -> keras.distribution.LayoutMap:
    """A `LayoutMap` over logical CPUs."""
    result = keras.distribution.LayoutMap(cpu_mesh(replicas, parts))
    for pattern, axes in layouts.items():
        result[pattern] = axes
    return result
