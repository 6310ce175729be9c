"""The strategies under test, as a user of this machine would make them."""

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import tfparallel
from tfparallel.selftest.trials import OPTIONS, Trial, reference_of

_BATCHES = ("static", "uneven", "tiny")
_HALF = ("mixed_float16", "mixed_bfloat16")
_MICROBATCHES = 2
_CUT = ("pipeline", "hybrid")  # into stages
_REPEATED = ("mirrored", "pipeline_1f1b", "multi_worker_mirrored")  # without GPUs
XLA = Trial("mlp", "many", option="jit_compile")  # of a check of its own
_WITH_OPTIONS = [Trial("mlp", "many", option=x) for x in OPTIONS if x not in ("", XLA.option)]


class _LayoutOfTrials(keras.distribution.LayoutMap):
    """Kernels by columns, embeddings by rows, attention by heads, whichever a model has."""

    _RULES = (
        (r".*(query|key|value)/kernel", (None, "model", None)),
        (r".*embeddings", ("model", None)),
        (r".*dense[^/]*/kernel", (None, "model")),
    )

    def __getitem__(self, key: str) -> keras.distribution.TensorLayout | None:
        for pattern, axes in self._RULES:
            if re.fullmatch(pattern, key):
                return keras.distribution.TensorLayout(axes, self.device_mesh)
        return None


def _tensor_parallel(devices: Sequence[str]) -> tf.distribute.Strategy:
    names = [device.lower() for device in devices]
    mesh = keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), names)
    return tfparallel.TensorParallelStrategy(_LayoutOfTrials(mesh))


def _pipeline(schedule: str) -> Callable[[Sequence[str]], tf.distribute.Strategy]:
    return lambda devices: tfparallel.PipelineStrategy(devices[:2], _MICROBATCHES, schedule)


def _hybrid(devices: Sequence[str]) -> tf.distribute.Strategy:
    """Pipelines of two stages beside one another, as many as there are devices for."""
    axes = {"data": len(devices) // 2, "pipeline": 2}
    used = [device.lower() for device in devices[: 2 * axes["data"]]]
    mesh = keras.distribution.DeviceMesh(tuple(axes.values()), tuple(axes), used)
    return tfparallel.HybridStrategy(mesh, pipeline=tfparallel.PipelineOptions(_MICROBATCHES))


IN_ONE_PROCESS: dict[str, Callable[[Sequence[str]], tf.distribute.Strategy]] = {
    "one_device": lambda devices: tfparallel.OneDeviceStrategy(devices[0]),
    "mirrored": tfparallel.MirroredStrategy,
    "central_storage": tfparallel.CentralStorageStrategy,
    "sharded": lambda devices: tfparallel.ShardedStrategy(devices, min_size=1),
    "tensor_parallel": _tensor_parallel,
    "pipeline_gpipe": _pipeline("gpipe"),
    "pipeline_1f1b": _pipeline("1f1b"),
    "pipeline_interleaved": _pipeline("interleaved_1f1b"),
    "pipeline_zero_bubble": _pipeline("zero_bubble"),
    "hybrid": _hybrid,
}
# Made in each process of a job; the chief's, for parameter servers.
IN_SEVERAL_PROCESSES: dict[str, Callable[[], tf.distribute.Strategy]] = {
    "multi_worker_mirrored": lambda: tfparallel.MultiWorkerMirroredStrategy(),
    "parameter_server_sync": lambda: tfparallel.ParameterServerStrategy(mode="sync"),
    # Without staleness it has one device's results.
    "parameter_server_async": lambda: tfparallel.ParameterServerStrategy(max_staleness=0),
    "horovod": lambda: tfparallel.HorovodStrategy(),
}


def references(on_gpus: bool) -> list[Trial]:
    """What one device trains so that any strategy can be compared with it."""
    names = [*IN_ONE_PROCESS, *IN_SEVERAL_PROCESSES]
    asked = [trial for name in names for trial in trials_of(name, on_gpus)]
    return list(dict.fromkeys(map(reference_of, asked)))


def trials_of(strategy: str, on_gpus: bool) -> list[Trial]:
    """What a strategy is asked: on GPUs everything; without, what fits into three minutes."""
    convolutions = "convolutions" if strategy.startswith(_CUT) else "cnn"
    if on_gpus:
        models = ("mlp", convolutions, "gpt")
        whole = [Trial(model, size) for model in models for size in _BATCHES]
        whole += [Trial(model, "uneven", dtype) for model in models for dtype in _HALF]
        return whole + _WITH_OPTIONS
    few = [Trial("mlp", "uneven")]
    if strategy in ("mirrored", "pipeline_1f1b"):
        few += [Trial("mlp", "static"), Trial("mlp", "tiny")]
        few += [Trial(convolutions, "uneven"), Trial("gpt_block", "uneven")]
        few += [Trial("mlp", "uneven", dtype) for dtype in _HALF]
        few += _WITH_OPTIONS if strategy == "mirrored" else []
    elif strategy in ("sharded", "tensor_parallel", "multi_worker_mirrored"):
        few.append(Trial("gpt_block", "uneven"))
    return few


def repeated_of(strategy: str, on_gpus: bool) -> list[Trial]:
    """What it is asked twice, for equal bits: each model on GPUs; without, one of a few."""
    asked = trials_of(strategy, on_gpus)
    whole = [t for t in asked if t.size == "uneven" and t.dtype == "float32"]
    return whole if on_gpus else whole[: strategy in _REPEATED]


def may_refuse(strategy: str, option: str) -> bool:
    """Whether a strategy's page says that it refuses an option of `compile`."""
    if option == XLA.option:  # XLA compiles a step for one device
        return strategy != "one_device"
    return (strategy, option) == ("parameter_server_async", "run_eagerly")
