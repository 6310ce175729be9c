"""A model built and compiled a second time: of plain variables, or of float64 ones."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.keras_trainer import build_from_shapes, compile_arguments
from tfparallel.replicas.loss_kinds import declare_alike

Build = Callable[[], keras.Model]


def rebuild(
    model: keras.Model, build: Build | None, batch: object, dtype: str | None
) -> keras.Model:
    """A model like `model`, compiled like it, built for `batch`; in its initial state.

    Args:
        build: makes it; None takes the configuration of `model`.
        dtype: of its policy, if not that of `model`.

    Raises:
        ValueError: if the configuration does not say how to make it, or `build` makes another.
    """
    with _default_dtype(dtype):
        try:
            new = _from_config(model, dtype) if build is None else build()
            build_from_shapes(new, batch)
        except Exception as error:
            way_out = (
                "Pass `build=`, a function that returns the model, compiled, or give its classes "
                "`get_config`."
                if build is None
                else "Let `build` return the model as it was built and compiled."
            )
            raise ValueError(
                f"check trains a second model like '{model.name}' beside it, "
                f"{'made of its configuration' if build is None else 'made by `build`'}. "
                f"Received: {type(error).__name__}: {str(error).splitlines()[0]} {way_out}"
            ) from error
    return new


@contextlib.contextmanager
def _default_dtype(dtype: str | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy(dtype)
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_floatx(floatx)


def _from_config(model: keras.Model, dtype: str | None) -> keras.Model:
    config = keras.saving.serialize_keras_object(model)
    config.pop("compile_config", None)
    if dtype is not None:
        config = _with_dtype(config, dtype)
    custom_objects = _custom_objects(model)
    new = keras.saving.deserialize_keras_object(config, custom_objects, safe_mode=False)
    pairs = zip(layers_of(model), layers_of(new), strict=False)
    for own, layer in pairs:  # a model comes before its layers
        layer.trainable = own.trainable
        declare_alike(own, layer)
    if type(model).compile is not keras.Model.compile:
        with keras.saving.custom_object_scope(custom_objects):
            new.compile_from_config(model.get_compile_config())
    else:
        new.compile(**_compile_arguments(model, dtype))
    if not new.compiled:
        raise ValueError("its compile() takes arguments of its own.")
    return new


def _with_dtype(config: object, dtype: str) -> object:
    """`config` with every policy, and every dtype of floats, replaced."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return dtype
        return {key: _with_dtype(value, dtype) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return type(config)(_with_dtype(value, dtype) for value in config)
    return dtype if config in ("float16", "bfloat16", "float32", "mixed_float16") else config


def _compile_arguments(model: keras.Model, dtype: str | None) -> dict[str, object]:
    """Those that `model` was compiled with; optimizer and metrics of their own.

    Losses have no state, but may have a dtype.
    """
    arguments = compile_arguments(model)
    for name in ("optimizer", "metrics", "weighted_metrics"):
        arguments[name] = keras.tree.map_structure(_again, arguments[name])
    if dtype is not None:
        arguments["loss"] = keras.tree.map_structure(_again, arguments["loss"])
    return {
        **arguments,
        "steps_per_execution": 1,
        "run_eagerly": model.run_eagerly,
        "jit_compile": model.jit_compile,
    }


def _again(made: object) -> object:
    if not isinstance(made, (BaseOptimizer, keras.Metric, keras.losses.Loss)):
        return made
    config = made.get_config()
    config.pop("dtype", None)
    return type(made).from_config(config)


def _custom_objects(model: keras.Model) -> dict[str, object]:
    """Classes and functions that the layers of `model` are made of, also those in functions."""
    layers = layers_of(model)
    attributes = [value for layer in layers for value in vars(layer).values()]
    functions = [x for x in attributes if isinstance(x, types.FunctionType)]
    classes = [type(x) for x in (*layers, *attributes)]
    theirs = ("keras.", "tensorflow.", "builtins")
    own: list[Any] = [x for x in (*classes, *functions) if not x.__module__.startswith(theirs)]
    return {x.__name__: x for x in own}
