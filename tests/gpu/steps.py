"""The steps under audit: every strategy of one process, on stand-ins for two GPUs."""

import keras
import tensorflow as tf

import tfparallel
from tests import helpers
from tests.conformance.models import MODELS
from tests.gpu.audit import Audit, audit
from tests.tensor_parallel.layouts import LayoutOfAnything

GPUS = ["CPU:1", "CPU:2"]
ROWS = 12


def _tensor_parallel() -> tf.distribute.Strategy:
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:1", "cpu:2"])
    return tfparallel.TensorParallelStrategy(LayoutOfAnything(mesh))


def _pipeline(schedule: str, **options) -> tf.distribute.Strategy:
    return tfparallel.PipelineStrategy(
        GPUS, num_microbatches=4, schedule=schedule, batch_norm="per_microbatch", **options
    )


STRATEGIES = {
    "one_device": lambda: tfparallel.OneDeviceStrategy(GPUS[0]),
    "mirrored": lambda: tfparallel.MirroredStrategy(GPUS),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(GPUS, "CPU:0"),
    "sharded": lambda: tfparallel.ShardedStrategy(GPUS, min_size=1),
    "tensor_parallel": _tensor_parallel,
    "pipeline": lambda: _pipeline("1f1b"),
    "pipeline_gpipe": lambda: _pipeline("gpipe"),
    "pipeline_zero_bubble": lambda: _pipeline("zero_bubble"),
    "pipeline_offload": lambda: _pipeline("1f1b", offload=True),
}
SIZES = {"static": ROWS, "unknown": None}
EVERY = [(strategy, model, size) for strategy in STRATEGIES for model in MODELS for size in SIZES]
# What shares its code with another, and other sizes, are for `--everything`.
BY_DEFAULT = {
    ("one_device", "embedding", "unknown"),
    ("mirrored", "mlp", "static"),
    ("mirrored", "cnn", "unknown"),
    ("mirrored", "embedding", "unknown"),
    ("central_storage", "cnn", "static"),
    ("sharded", "mlp", "unknown"),
    ("tensor_parallel", "mlp", "static"),
    ("pipeline", "mlp", "unknown"),
    ("pipeline", "embedding", "static"),
    ("pipeline", "embedding", "unknown"),
    ("pipeline", "attention", "unknown"),
    ("pipeline_zero_bubble", "embedding", "unknown"),
}


def audited(strategy_name: str, model_name: str, size: str) -> Audit:
    """The audit of one training step.

    Args:
        strategy_name: of `STRATEGIES`.
        model_name: of the conformance suite's models.
        size: "static" or "unknown": whether the step is traced for a number of rows.
    """
    return audit(step_graph(STRATEGIES[strategy_name](), model_name, SIZES[size]))


def step_graph(strategy: tf.distribute.Strategy, model_name: str, rows: int | None) -> tf.Graph:
    """The graph of a training step for batches of so many rows."""
    keras.utils.set_random_seed(helpers.SEED)
    keras.backend.clear_session()
    model_case = MODELS[model_name]
    with strategy.scope():
        model = model_case.build()
        model.compile(helpers.momentum_sgd(), **model_case.compile_options())
    batch = model_case.data(ROWS)
    model.train_on_batch(*batch)  # makes all variables

    @tf.function(autograph=False)
    def step(*data):
        return strategy.run(model.train_step, args=(data,))

    specs = tf.nest.map_structure(lambda x: tf.TensorSpec((rows, *x.shape[1:]), _dtype(x)), batch)
    return step.get_concrete_function(*specs).graph


def _dtype(array) -> tf.DType:
    """Class numbers and tokens as users have them: int32."""
    return tf.int32 if array.dtype == "int64" else tf.as_dtype(array.dtype)
