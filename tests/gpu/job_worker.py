"""A process whose steps are audited: of a job, or with more devices than tests have.

`python -m tests.gpu.job_worker STRATEGY`, asked by a `WorkerPool` for a model's step and a size;
without a model, for what `predict` gathers from all workers.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from unittest import mock

import keras
import tensorflow as tf

import tfparallel
from tests.gpu.audit import audit
from tests.gpu.jobs import NUM_CPUS
from tests.gpu.steps import GPUS, INNER, SIZES, step_graph
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests
from tests.parameter_server.cluster import ServerProcesses
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel.coordination.connection import device_name
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.pipeline.remote_stages import StageCluster


class _WorkersOverNccl(tfparallel.MultiWorkerMirroredStrategy):
    """Has stand-ins for GPUs as devices, and reduces as on GPUs once variables are there.

    What reduces with NCCL can be traced here, not run.
    """

    def __init__(self, **options):
        with _stand_ins_of_workers():
            super().__init__(**options)

    def reduce_as_on_gpus(self) -> None:
        _reduce_as_on_gpus(self._workers)


class _ShardsOfWorkers(tfparallel.ShardedStrategy):
    """The same, of one strategy over all devices, between which parts go."""

    _num_devices = len(GPUS)

    def __init__(self, replicas: int = 1):
        with _stand_ins_of_workers(self._num_devices):
            super().__init__(min_size=1, transport="collectives", replicas=replicas)

    def reduce_as_on_gpus(self) -> None:
        _reduce_as_on_gpus(self.extended)
        self.extended._meet_among_all("collectives")

    def reduce_as_here(self) -> None:
        """Before variables of the next model are made: on CPUs TensorFlow has no reduce-scatter."""
        self.extended._has_nccl = False
        self.extended._meet_among_all("collectives")


class _ShardsOfWorkersOfOne(_ShardsOfWorkers):
    """With a GPU each."""

    _num_devices = 1


def _stand_ins_of_workers(count: int = len(GPUS)) -> contextlib.AbstractContextManager:
    choose = MultiWorkerExtended._initialize_local_devices

    def stand_ins(extended, *args):
        (cpu, *_), kind = choose(extended, *args)
        worker = cpu.rpartition("/device:")[0]
        gpus = tuple(f"{worker}/device:{gpu}" for gpu in GPUS[:count])
        return gpus[:1] if extended._has_inner else gpus, kind

    return mock.patch.object(MultiWorkerExtended, "_initialize_local_devices", stand_ins)


def _reduce_as_on_gpus(extended: MultiWorkerExtended) -> None:
    extended._local_device_type = "GPU"
    addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    extended._agree_on_collectives(addresses)
    extended._watch_collectives(extended._cross_device_ops, extended._devices[0])
    extended._watch_collectives(extended._host_cross_device_ops, extended._host_device)


def _of_ranks(make: Callable, **options) -> tf.distribute.Strategy:
    """As with a Horovod that has NCCL."""
    chosen = "tfparallel.data_parallel.horovod.device_of_rank"
    with mock.patch(chosen, return_value="/device:CPU:1"):
        strategy = make(**options)
    extended = getattr(strategy, "_workers", strategy.extended)
    extended._has_nccl = True
    if isinstance(strategy, tfparallel.ShardedStrategy):
        extended._meet_among_all()
    return strategy


def _stages_on_hosts() -> tf.distribute.Strategy:
    """The second stage is on the second stand-in of another process, which serves it."""
    _made_for_chief.append(ServerProcesses(num_workers=1, num_ps=0, **{LOGICAL_CPUS_VARIABLE: "3"}))
    os.environ.update(_made_for_chief[0].environment("chief", 0))

    def stand_ins(cluster: StageCluster) -> list[str]:
        return [device_name(*task, number=1 + i) for i, task in enumerate(cluster._ranked)]

    with mock.patch.object(StageCluster, "devices", stand_ins):
        return tfparallel.PipelineStrategy(num_microbatches=4)


def _parameter_server(**options) -> tf.distribute.Strategy:
    """A worker with two stand-ins for GPUs, a server, and this process, which is their chief."""
    _made_for_chief.append(ServerProcesses(num_workers=1, num_ps=1, **{LOGICAL_CPUS_VARIABLE: "3"}))
    os.environ.update(_made_for_chief[0].environment("chief", 0))
    choose = ParameterServerCluster.worker_devices
    stand_ins = mock.patch.object(
        ParameterServerCluster, "worker_devices", lambda self: tuple(x[1:] for x in choose(self))
    )
    stand_ins.start()  # the strategy asks again
    return tfparallel.ParameterServerStrategy(**options)


def _four_gpus(*axes: str) -> keras.distribution.DeviceMesh:
    return keras.distribution.DeviceMesh((2, 2), axes, [f"cpu:{i}" for i in range(1, 5)])


def _stages_on_two() -> tf.distribute.Strategy:
    mesh = _four_gpus("pipeline", "model")
    options = tfparallel.PipelineOptions(num_microbatches=4, batch_norm="per_microbatch")
    return tfparallel.HybridStrategy(mesh, layout_map=LayoutOfAnything(mesh), pipeline=options)


MAKE = {
    "multi_worker": _WorkersOverNccl,
    "horovod": lambda: _of_ranks(tfparallel.HorovodStrategy),
    **{
        f"multi_worker_{name}": lambda make=make: _WorkersOverNccl(inner=make)
        for name, make in INNER.items()
    },
    **{
        f"horovod_{name}": lambda make=make: _of_ranks(tfparallel.HorovodStrategy, inner=make)
        for name, make in INNER.items()
    },
    "sharded_workers": _ShardsOfWorkers,
    "sharded_workers_of_one": _ShardsOfWorkersOfOne,
    "sharded_workers_of_copies": lambda: _ShardsOfWorkers(replicas=2),
    "sharded_ranks": lambda: _of_ranks(tfparallel.ShardedStrategy, min_size=1),
    "pipeline_hosts": _stages_on_hosts,
    "parameter_server_sync": lambda: _parameter_server(mode="sync"),
    "parameter_server_async": lambda: _parameter_server(mode="async", max_staleness=0),
    "hybrid": lambda: tfparallel.HybridStrategy(
        _four_gpus("data", "pipeline"),
        pipeline=tfparallel.PipelineOptions(num_microbatches=4, batch_norm="per_microbatch"),
    ),
    "hybrid_shards": lambda: tfparallel.HybridStrategy(_four_gpus("data", "shard")),
    "hybrid_groups": _stages_on_two,
}
_made_for_chief: list[ServerProcesses] = []
_made: list[tf.distribute.Strategy] = []


def answer(model: str | None, size: str) -> dict:
    if model is None:
        return vars(audit(_gathering(_made[0])))
    if isinstance(_made[0], tfparallel.ParameterServerStrategy):  # its chief has no GPU
        return vars(audit(*step_graph(_made[0], model, SIZES[size]), default="/device:CPU:0"))
    if isinstance(_made[0], _ShardsOfWorkers):
        _made[0].reduce_as_here()
    with tf.device(GPUS[0]):  # where TensorFlow puts what nobody places, if there are GPUs
        return vars(audit(*step_graph(_made[0], model, SIZES[size])))


def _gathering(strategy: tf.distribute.Strategy) -> tf.Graph:
    strategy.reduce_as_on_gpus()
    gather = tf.function(strategy.extended._gather_rows, autograph=False)
    return gather.get_concrete_function(tf.TensorSpec([None, 3])).graph


def begin() -> None:
    open_logical_cpus(NUM_CPUS[sys.argv[1]])
    keras.utils.set_random_seed(0)
    _made.append(MAKE[sys.argv[1]]())


if __name__ == "__main__":
    answer_requests(answer, begin)
