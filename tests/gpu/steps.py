"""The steps under audit: every strategy of one process on stand-ins for two GPUs, and `jobs.py`."""

import contextlib
import json
from unittest import mock

import keras
import tensorflow as tf

import tfparallel
from tests import helpers
from tests.conformance.models import MODELS, ModelCase
from tests.gpu.audit import Audit, audit
from tests.gpu.jobs import NUM_CPUS, audited_in_job
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel.communication.exposed_wait import ExposedWait
from tfparallel.internals import CollectiveAllReduce, keras_integers
from tfparallel.internals.keras_layers import layers_of
from tfparallel.pipeline.timed_calls import TimedCall, TimedCalls
from tfparallel.replicas import layers_without_rows
from tfparallel.replicas.placed_batch import BatchPlacement, PlacedSpec

GPUS = ["CPU:1", "CPU:2"]
ROWS = 12
_Nccl = tf.distribute.experimental.CommunicationImplementation.NCCL


def _tensor_parallel() -> tf.distribute.Strategy:
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:1", "cpu:2"])
    return tfparallel.TensorParallelStrategy(LayoutOfAnything(mesh))


def _pipeline(schedule: str, **options) -> tf.distribute.Strategy:
    return tfparallel.PipelineStrategy(
        GPUS, num_microbatches=4, schedule=schedule, batch_norm="per_microbatch", **options
    )


class _MirroredOverNccl(tfparallel.MirroredStrategy):
    """Reduces as on GPUs of their own. `step_graph` makes it do so when variables are there.

    What reduces with NCCL can be traced here, not run.
    """

    def reduce_as_on_gpus(self) -> None:
        options = tf.distribute.experimental.CommunicationOptions(implementation=_Nccl)
        devices = self.extended._devices
        self.extended._user_cross_device_ops = CollectiveAllReduce(devices, len(devices), options)


KERAS = "keras"  # without a strategy, on one device: what the others are held against
STRATEGIES = {
    KERAS: lambda: None,
    "one_device": lambda: tfparallel.OneDeviceStrategy(GPUS[0]),
    "one_device_ahead": lambda: tfparallel.OneDeviceStrategy(GPUS[0], prefetch_batches=2),
    "mirrored": lambda: tfparallel.MirroredStrategy(GPUS),
    "mirrored_ahead": lambda: tfparallel.MirroredStrategy(GPUS, prefetch_batches=2),
    "mirrored_nccl": lambda: _MirroredOverNccl(GPUS),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(GPUS, "CPU:0"),
    "sharded": lambda: tfparallel.ShardedStrategy(GPUS, min_size=1),
    "tensor_parallel": _tensor_parallel,
    "pipeline": lambda: _pipeline("1f1b"),
    "pipeline_gpipe": lambda: _pipeline("gpipe"),
    "pipeline_zero_bubble": lambda: _pipeline("zero_bubble"),
    "pipeline_offload": lambda: _pipeline("1f1b", offload=True),
}
INNER = {  # of the processes of a job
    "pipeline": lambda: _pipeline("1f1b"),
    "shards": STRATEGIES["sharded"],
    "groups": _tensor_parallel,
}
SIZES = {"static": ROWS, "unknown": None}
# Not in the conformance suite: replicas draw masks of their own.
DROPOUT = ModelCase(
    lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]),
    helpers.tiny_compile_options,
    helpers.tiny_data,
)
AUDITED_MODELS = {**MODELS, "dropout": DROPOUT}
# Several processes around what has rows of its own: what is between them is dense, of statistics or
# sparse.
COMPOSITES = {
    *(f"{job}_{name}" for job in ("multi_worker", "horovod") for name in INNER),
    *("sharded_workers", "sharded_workers_of_one", "sharded_workers_of_copies", "sharded_ranks"),
    "pipeline_hosts",
}
OF_COMPOSITES = ("mlp", "cnn", "embedding", "masking", "dropout")
# Whether a size is known is a matter of the stages, which all schedules call; a step for any size
# has all copies that one for a known size has.
FOR_ANY_SIZE = {
    *("pipeline_gpipe", "pipeline_zero_bubble", "pipeline_offload"),
    *("hybrid", "hybrid_shards", "hybrid_groups"),
    *("parameter_server_sync", "parameter_server_async"),
    *COMPOSITES,
}
EVERY = [
    (strategy, model, size)
    for strategy in (*STRATEGIES, *NUM_CPUS)
    for model in (OF_COMPOSITES if strategy in COMPOSITES else AUDITED_MODELS)
    for size in SIZES
    if size == "unknown" or strategy not in FOR_ANY_SIZE
]
# What shares its code with another, and other sizes, are for `--everything`.
BY_DEFAULT = {
    (KERAS, "embedding", "unknown"),
    ("one_device", "dropout", "static"),
    ("one_device", "embedding", "unknown"),
    ("mirrored", "mlp", "static"),
    ("mirrored_ahead", "mlp", "static"),
    ("mirrored_ahead", "embedding", "unknown"),
    ("mirrored", "cnn", "unknown"),
    ("mirrored", "embedding", "unknown"),
    ("mirrored_nccl", "embedding", "static"),
    ("multi_worker", "embedding", "static"),
    ("multi_worker_shards", "embedding", "unknown"),
    ("sharded_workers", "mlp", "unknown"),
    ("sharded_workers_of_one", "dropout", "static"),
    ("sharded_workers_of_one", "mlp", "unknown"),
    ("sharded_ranks", "embedding", "unknown"),
    ("horovod", "dropout", "static"),
    ("horovod", "embedding", "unknown"),
    ("horovod_pipeline", "mlp", "unknown"),
    ("pipeline_hosts", "mlp", "unknown"),
    ("hybrid", "mlp", "unknown"),
    ("parameter_server_sync", "mlp", "unknown"),
    ("parameter_server_async", "mlp", "unknown"),
    ("central_storage", "cnn", "static"),
    ("sharded", "mlp", "unknown"),
    ("tensor_parallel", "embedding", "unknown"),
    ("pipeline", "dropout", "unknown"),
    ("pipeline", "mlp", "unknown"),
    ("pipeline", "embedding", "static"),
    ("pipeline", "lstm", "static"),
    ("pipeline", "embedding", "unknown"),
    ("pipeline", "attention", "unknown"),
    ("pipeline_zero_bubble", "embedding", "unknown"),
}


def audited(strategy_name: str, model_name: str, size: str) -> Audit:
    """The audit of one training step.

    Args:
        strategy_name: of `STRATEGIES`, or of `jobs.py`.
        model_name: of `AUDITED_MODELS`.
        size: "static" or "unknown": whether the step is traced for a number of rows.
    """
    if strategy_name in NUM_CPUS:
        return audited_in_job(strategy_name, model_name, size)
    return audit(*step_graph(STRATEGIES[strategy_name](), model_name, SIZES[size]))


def step_graph(
    strategy: tf.distribute.Strategy | None, model_name: str, rows: int | None
) -> tuple[tf.Graph, dict]:
    """The graph of a training step for batches of so many rows, and which arguments are placed.

    Those are, with their devices, the rows of a strategy that places batches before their steps.
    Without a strategy it is Keras's own, on the first device.
    """
    keras.utils.set_random_seed(helpers.SEED)
    keras.backend.clear_session()
    model_case = AUDITED_MODELS[model_name]
    with scope_of(strategy):
        model = model_case.build()
        inner = getattr(strategy, "inner", None) or strategy
        if isinstance(inner, (tfparallel.PipelineStrategy, tfparallel.HybridStrategy)):
            model = _with_statistics_apart(model)
        model.compile(helpers.momentum_sgd(), **model_case.compile_options(), jit_compile=False)
    batch = model_case.data(ROWS)
    alike = TimedCall(tf.identity, [])
    alike.seconds = 1.0
    with mock.patch.object(TimedCalls, "add", return_value=alike):  # or cuts change with the load
        make_variables(strategy, model, batch)
    if hasattr(strategy, "reduce_as_on_gpus"):
        strategy.reduce_as_on_gpus()

    specs = tf.nest.map_structure(lambda x: tf.TensorSpec((rows, *x.shape[1:]), _dtype(x)), batch)
    is_ahead = strategy is not None and bool(strategy.extended._num_batches_ahead)
    spec = BatchPlacement(strategy.extended, specs)._spec if is_ahead else specs
    # What CPUs get so that oneDNN never computes no rows is not on GPUs, nor are their clocks.
    no_layers = mock.patch.object(layers_without_rows, "_ON_CPUS", ())
    no_clock = mock.patch.object(ExposedWait, "begin", return_value=None)
    with no_layers, no_clock, mock.patch.object(keras_integers, "has_gpu", return_value=True):
        graph = step_of(strategy, model).get_concrete_function(spec).graph
    return graph, _placed(spec, graph) if is_ahead else {}


def scope_of(strategy: tf.distribute.Strategy | None) -> contextlib.AbstractContextManager:
    """Where a model is made: without a strategy on the first device."""
    return tf.device(GPUS[0]) if strategy is None else strategy.scope()


def make_variables(strategy: tf.distribute.Strategy | None, model: keras.Model, batch) -> None:
    """Those of the optimizer, too, which a first step makes."""
    with tf.device(GPUS[0]) if strategy is None else contextlib.nullcontext():
        model.train_on_batch(*batch)


def step_of(strategy: tf.distribute.Strategy | None, model: keras.Model):
    """The training step of `data`, not traced yet."""

    @tf.function(autograph=False)
    def step(data):
        if strategy is None:
            return model.train_step(data)
        return strategy.run(model.train_step, args=(data,))

    return step


def _placed(spec: PlacedSpec, graph: tf.Graph) -> dict:
    """The arguments of a step that are on devices; how many rows there are stays on the host."""
    inputs = iter(graph.inputs)
    return {next(inputs).op: device for device in spec.devices for _ in range(spec.num_tensors)}


def _with_statistics_apart(model: keras.Model) -> keras.Model:
    """The same with `synchronized=False`, as a pipeline refuses the other."""
    norms = [x for x in layers_of(model) if isinstance(x, keras.layers.BatchNormalization)]
    if not norms:
        return model
    config = json.dumps(model.get_config()).replace('"synchronized": true', '"synchronized": false')
    return type(model).from_config(json.loads(config))


def _dtype(array) -> tf.DType:
    """Class numbers and tokens as users have them: int32."""
    return tf.int32 if array.dtype == "int64" else tf.as_dtype(array.dtype)
