"""The strategies under test: a new strategy is one new row."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tests import helpers
from tests.multi_process.pool import cluster_environments, horovod_environments
from tests.parameter_server.cluster import ServerProcesses
from tests.slices import has_its_turn, slice_of
from tests.tensor_parallel.layouts import LayoutOfAnything, LayoutOfImages, cpu_mesh

# What can go wrong with the number of replicas.
NUMBER_OF_REPLICAS = (
    "batch_norm.a_replica_without_rows_has_no_say",
    "dropout.masks_differ_and_repeat",
    "inputs.every_batch_of_one_row",
    "inputs.last_batch_of_one_row",
    "inputs.sample_weight",
    "optimizers.global_clipnorm",
    "precision.overflow_on_one_replica",
)

# And where another row asks the rest of a strategy.
FEW = (
    *NUMBER_OF_REPLICAS,
    "inputs.steps_per_execution",
    "metrics.binary",
    "models.cnn",
    "models.embedding",
    "on_batch.train_on_batch",
    "saving.checkpoint",
)

# Of a row that is another by what carries its sums, agreements and first values: what passes
# through them, of each kind. The rest is the code of the row of the ring, asked every core case.
OF_A_TRANSPORT = (
    *FEW,
    "batch_norm.statistics_are_the_average_over_replicas",
    "batch_norm.synchronized_without_a_stock_step",
    "callbacks.measure",
    "callbacks.noise_scale",
    "checking.a_step_is_drawn",
    "coexistence.keras_and_tf_distribute_are_as_imported",
    "coexistence.keras_and_tf_distribute_are_as_imported_in_a_step",
    "coexistence.two_strategies_in_one_process",
    "compilation.jit_compile_works_or_is_refused",
    "coupled_losses.sums_that_layers_add",
    "custom_training.loop",
    "custom_training.loop_of_a_compiled_replica_step",
    "double_precision.uneven_batches",
    "inputs.python_generator",
    "inputs.sparse_gradients_of_many_sizes",
    "layer_state.layers_that_update_themselves",
    "misuse.a_gather_that_does_not_fit_leaves_the_next_one_working",
    "misuse.fitted_under_another_strategy_is_refused",
    "misuse.gradients_outside_of_run_are_refused_where_other_workers_have_rows",
    "models.initial_weights_are_those_of_the_first_worker",
    "models.mlp",
    "on_batch.predict_on_batch",
    "on_batch.test_on_batch",
    "optimizers.ema_overwrite",
    "optimizers.gradient_accumulation",
    "precision.float16_overflow_on_one_replica",
    "public_tf.minimize_loss_eager",
    "public_tf.run",
    "unbuilt.gan",
)

# Of a row that is another in how its weights are in parts, or by what they are sent.
OF_A_VARIANT = ("optimizers.global_clipnorm", "saving.checkpoint")


@dataclass(frozen=True)
class Row:
    """One strategy as the suite runs it; in `make test`, what it is asked takes turns.

    Attributes:
        name: appears in the test's name.
        make: creates the strategy; called in every worker process, again for each new strategy.
        num_replicas: how many replicas it has in all.
        num_workers: how many processes it runs in.
        devices_per_worker: logical CPUs each process opens.
        environments: given `num_workers`, the environment variables of each process.
        every_case: asked every case, of which those marked `core` at each commit, or (False) only
            the latter, unless pytest is called with `--everything`.
        few: if given, the names of all it is asked unless pytest is called with `--everything`.
        ranks_of_a_replica: how many processes, one behind the other, compute a replica together.
        exempt: beginnings of the names of cases that this strategy answers otherwise by design,
            each with the reason.
    """

    name: str
    make: Callable[[], tf.distribute.Strategy]
    num_replicas: int
    num_workers: int = 1
    devices_per_worker: int = 4
    environments: Callable[[int], list[dict[str, str]]] = cluster_environments
    every_case: bool = True
    few: tuple[str, ...] = ()
    ranks_of_a_replica: int = 1
    exempt: Mapping[str, str] = field(default_factory=dict)

    def reason_for_not_asking(self, case: Any) -> str:
        """Why a case is never asked of this row; empty if it is."""
        return next((why for name, why in self.exempt.items() if case.name.startswith(name)), "")

    def is_asked(self, case: Any, everything: bool, slice_of_pairs: int | None = None) -> bool:
        """Whether this row is asked a case.

        Args:
            case: the `Case`.
            everything: pytest's option.
            slice_of_pairs: ask what has its turn in it, and of what is left out what is in it.
        """
        if case.name.startswith(tuple(self.exempt)):
            return False
        if everything:
            return True
        if case.long:
            return False
        number = self.slice_of(case)
        always = self.every_case and case.core and not self.few
        in_turn = case.name in self.few if self.few else self.every_case or case.core
        has_turn = always or (in_turn and has_its_turn(number, slice_of_pairs))
        return has_turn or number == slice_of_pairs

    def slice_of(self, case: Any) -> int:
        """The slice that its test of a case belongs to; all of a row of `few` have one turn."""
        return slice_of(f"{self.name}-{case.name}", self.name if self.few else None)


def _sharded_on_devices(**options: Any) -> tf.distribute.Strategy:
    """Parts meet between devices, as by NCCL between GPUs, each with the same of the other worker.

    Here TensorFlow's own collectives of CPUs carry them.
    """
    from tfparallel.hybrid.meets_in_copies import MeetsInCopies

    with mock.patch.object(MeetsInCopies, "_can_meet_on_gpus", True):
        return library().ShardedStrategy(min_size=1, transport="collectives", **options)


def library() -> Any:
    """`tfparallel`, or `tf.distribute` to see what stock fails: `CONFORMANCE_LIBRARY=stock`."""
    if os.environ.get("CONFORMANCE_LIBRARY") == "stock":
        return _Stock
    import tfparallel  # here, so that a worker can look at Keras before

    return tfparallel


class _Stock:
    OneDeviceStrategy = tf.distribute.OneDeviceStrategy
    MirroredStrategy = tf.distribute.MirroredStrategy
    CentralStorageStrategy = tf.distribute.experimental.CentralStorageStrategy
    MultiWorkerMirroredStrategy = tf.distribute.MultiWorkerMirroredStrategy


def _cpus(count: int) -> list[str]:
    return [f"CPU:{i}" for i in range(count)]


def _parameter_servers(**options: Any) -> tf.distribute.Strategy:
    """A chief in this process, two workers and two parameter servers in processes of their own."""
    if not _servers:
        _servers.append(ServerProcesses(num_workers=2, num_ps=2))
    os.environ.update(_servers[0].environment("chief", 0))
    return library().ParameterServerStrategy(**options)


def _of_four_layers(num_workers: int) -> list[dict[str, str]]:
    """What lets four stages have a layer each."""
    return [{helpers.MIN_LAYERS_VARIABLE: "4"}] * num_workers


def _remote_pipeline(num_stages: int, **options: Any) -> tf.distribute.Strategy:
    """The first stage in this process, the others in processes of their own."""
    _servers.append(ServerProcesses(num_stages - 1, num_ps=0))
    os.environ.update(_servers[0].environment("chief", 0))
    return library().PipelineStrategy(**options)


def _tensor_parallel(
    replicas: int, parts: int, layout: type = LayoutOfAnything, **options: Any
) -> tf.distribute.Strategy:
    """Whatever a model is made of is in parts."""
    return library().TensorParallelStrategy(layout(cpu_mesh(replicas, parts)), **options)


def _found_layout(kind: str) -> tf.distribute.Strategy:
    """On two devices, what is found in each model."""
    return library().TensorParallelStrategy(kind, device_mesh=cpu_mesh(1, 2))


def _pipeline(num_stages: int, num_microbatches: int) -> tf.distribute.Strategy:
    return library().PipelineStrategy(_cpus(num_stages), num_microbatches)


def _sharded(num_devices: int) -> tf.distribute.Strategy:
    return library().ShardedStrategy(_cpus(num_devices), min_size=1)


def _hybrid(sizes: dict[str, int], **options: Any) -> tf.distribute.Strategy:
    """On as many logical CPUs as the mesh has places."""
    shape, names = tuple(sizes.values()), tuple(sizes)
    devices = [f"cpu:{i}" for i in range(math.prod(shape))]
    mesh = keras.distribution.DeviceMesh(shape, names, devices)
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(mesh)
    return library().HybridStrategy(mesh, **options)


def _pipelines(num_pipelines: int, num_stages: int, **options: Any) -> tf.distribute.Strategy:
    sizes = {"data": num_pipelines, "pipeline": num_stages}
    return _hybrid(sizes, pipeline=library().PipelineOptions(2, **options))


def _shared(axis: str, what: str = "gradients", **options: Any) -> tf.distribute.Strategy:
    """Each process has a half of the slots, and all weights: with "parameters" in a step only."""
    sharding = library().Sharding(what, min_size=1)
    if axis == "model":
        options["layout_map"] = LayoutOfAnything(None)
    sizes = {"shard": 2, axis: 2}
    return library().HybridStrategy(sizes, shard=sharding, transport="auto", **options)


_servers: list[ServerProcesses] = []  # they end with this process

_BATCH_NORM_OF_A_MICROBATCH = dict.fromkeys(
    ("batch_norm.", "double_precision.batch_norm", "models.cnn", "models.nested"),
    "BatchNorm sees one microbatch at a time: tests/pipeline/test_pipeline_batch_norm.py",
)
_OF_STAGES = {
    **_BATCH_NORM_OF_A_MICROBATCH,
    "layer_state.codebook_that_moves_first": "refused: its rows need those of later microbatches: "
    "tests/pipeline/test_pipeline_layer_state.py",
}
_OF_TWO_LAYERS = dict.fromkeys(
    (
        "custom_training.guide_train_step",
        "custom_training.loss_by_row",
        "custom_training.own_loss_and_optimizer",
        "custom_training.own_sums_of_gradients",
        "custom_training.step_that_returns_more_than_metrics",
        "custom_training.two_optimizers",
        "keras_io_shared.nodes_of_a_graph",
        "keras_io_shared.sharpness_aware",
        "layer_state.a_model_that_counts",
        "coupled_losses.sums_that_a_model_adds",
        "keras_io.metric_learning",
        "keras_io_recipes.deep_q_learning",
        "keras_io_recipes.endpoint_layer_of_a_subclassed_model",
        "layer_state.endpoint_layer",
        "losses.extended_compute_loss",
        "losses.overridden_compute_loss",
        "models.subclassed",
        "inputs.ragged_tensors",
        "saving.",
        "unbuilt.evaluated_before_it_is_trained",
        "unbuilt.predicts_sparse_rows",
        "unbuilt.triplets",
    ),
    "a model that cannot be lengthened to four layers",
)
_ONE_PROCESS = {
    "custom_training.loop_without_run": "its peers would wait for the one that is refused: "
    "tests/conformance/cases/misuse.py: gradients_outside_of_run_are_refused_...",
}
_INSIDE_OF_WORKERS = {
    **_ONE_PROCESS,
    **dict.fromkeys(
        (
            "coupled_losses.dice_of_a_dataset_distributed_by_the_user",
            "custom_training.loop",
            "inputs.dataset_distributed_by_the_user",
            "inputs.datasets_from_function",
            "public_tf.",
        ),
        "with `inner`, several processes train by fit, evaluate and predict; a loop is refused",
    ),
}
_OF_PARTS = {
    "optimizers.sparse_gradients_stay_sparse": "an optimizer sees shards, of other shapes: "
    "tests/sharded/test_update.py",
}
_ONE_REPLICA = {
    "batch_norm.synchronized_far_from_zero": "one replica computes the variance as plain Keras "
    "does: far from zero it is noise",
}
_ASYNCHRONOUS = {
    **_ONE_REPLICA,
    "dropout.": "which worker takes a batch, and so draws its mask, is decided by the clock",
    "compilation.": "XLA is refused, as the variables are elsewhere",
    "custom_training.optimizer_in_a_branch": "refused, as servers do not know which branch runs: "
    "tests/parameter_server/test_effects.py",
    "unbuilt.compiled_again": "XLA is refused, as the variables are elsewhere",
    "inputs.run_eagerly": "workers cannot run Python",
    "layer_state.eagerly": "workers cannot run Python",
    "unbuilt.run_eagerly": "workers cannot run Python",
    **dict.fromkeys(
        (
            "keras_io.dcgan",
            "keras_io.wgan_gp",
            "keras_io_shared.momentum_teacher",
            "nested.gan",
            "unbuilt.gan",
            "unbuilt.wgan_gp",
        ),
        "what a step updates is seen by later steps, and it says so: a generator's loss is by the "
        "discriminator of before: tests/parameter_server/test_cluster_of_processes.py",
    ),
}

_OF_A_GROUP = {
    "compilation.jit_compile_works_or_is_refused": "one XLA program is for one device: "
    "tests/tensor_parallel/test_errors.py",
}
_OF_ALL_ROWS = {
    "layer_state.states_of_rows_are_refused": "one replica has all rows of every batch: "
    "tests/tensor_parallel/test_training.py",
}
_OF_ONE_GROUP = {**_OF_A_GROUP, **_OF_ALL_ROWS, **_ONE_REPLICA}

_OF_WHOLE_WEIGHTS = dict.fromkeys(
    (
        "layer_state.layers_that_update_themselves",
        "layer_state.a_layer_called_twice",
        "layer_state.codebook_that_is_trained_too",
        "layer_state.eagerly",
        "keras_io_shared.momentum_teacher",
    ),
    "refused: what assigns a weight of its own that is in shards: tests/hybrid/test_shards.py",
) | {"keras_io_shared.sharpness_aware": "refused, on stages: tests/hybrid/test_groups_as_stages.py"}
_OF_PARTS_OF_A_STAGE = dict.fromkeys(
    ("layer_state.layers_that_update_themselves", "layer_state.a_layer_called_twice"),
    "refused: a layer on a stage assigns a weight of its own that is in parts: "
    "tests/hybrid/test_groups_as_stages.py",
) | {"keras_io_shared.sharpness_aware": "refused, on stages: tests/hybrid/test_groups_as_stages.py"}
_OF_PIECES = (
    "metrics.binary",
    "models.attention",
    "optimizers.ema_overwrite",
    "optimizers.global_clipnorm",
    "saving.checkpoint",
)
_OF_SHARED_SLOTS = (
    "callbacks.noise_scale",
    "checking.an_equal_step_leaves_no_trace",
    "inputs.run_eagerly",
)
_OF_GATHERED_WEIGHTS = (
    *_OF_SHARED_SLOTS,
    "coupled_losses.sums_that_a_model_adds",  # tried on weights that no process has
    "unbuilt.gan",
)


STRATEGIES = [
    Row(
        "one_device",
        lambda: library().OneDeviceStrategy("CPU:0"),
        1,
        few=NUMBER_OF_REPLICAS,
        exempt=_ONE_REPLICA,
    ),
    Row("mirrored_2", lambda: library().MirroredStrategy(_cpus(2)), 2),
    Row(
        "mirrored_2_ahead",  # of what only GPUs have by default
        lambda: library().MirroredStrategy(_cpus(2), prefetch_batches=2),
        num_replicas=2,
        few=("inputs.last_batch_of_one_row",),
    ),
    Row("mirrored_3", lambda: library().MirroredStrategy(_cpus(3)), 3, few=NUMBER_OF_REPLICAS),
    Row(
        "central_storage",
        lambda: library().CentralStorageStrategy(_cpus(2)),
        num_replicas=2,
        few=NUMBER_OF_REPLICAS,  # the code of mirrored_2
    ),
    Row(
        "sharded_3",
        lambda: library().ShardedStrategy(_cpus(3), min_size=1),
        num_replicas=3,
        every_case=False,
        exempt=_OF_PARTS,
    ),
    Row(
        "sharded_optimizer_2",
        lambda: library().ShardedStrategy(_cpus(2), shard="optimizer", min_size=1),
        num_replicas=2,
        few=(
            *FEW,
            "coupled_losses.over_sequences",
            "optimizers.ema_overwrite",
            "optimizers.adam_on_an_embedding",
        ),
        exempt=_OF_PARTS,
    ),
    Row(
        "sharded_hybrid_2x2",
        lambda: library().ShardedStrategy(_cpus(4), min_size=1, replicas=2),
        num_replicas=4,
        few=("models.embedding", "optimizers.global_clipnorm", "saving.checkpoint"),
        exempt=_OF_PARTS,
    ),
    Row(
        "tensor_1x2",
        lambda: _tensor_parallel(1, 2),
        num_replicas=1,
        every_case=False,
        exempt=_OF_ONE_GROUP,
    ),
    Row("tensor_2x2", lambda: _tensor_parallel(2, 2), 2, few=FEW, exempt=_OF_A_GROUP),
    Row(
        "tensor_1x4",
        lambda: _tensor_parallel(1, 4),
        1,
        few=FEW,
        exempt=_OF_ONE_GROUP,
    ),
    Row(
        "tensor_auto_1x2",  # RNNs by units, too
        lambda: _found_layout("auto"),
        1,
        few=("optimizers.global_clipnorm",),
        exempt=_OF_ONE_GROUP,
    ),
    Row(
        "tensor_ranks_2",
        lambda: _tensor_parallel(1, 2, transport="ring"),
        num_replicas=1,
        num_workers=2,
        devices_per_worker=1,
        every_case=False,
        exempt=_OF_ONE_GROUP,
        ranks_of_a_replica=2,
    ),
    Row(
        "tensor_ranks_2x2",
        lambda: _tensor_parallel(2, 2, transport="ring"),
        num_replicas=2,
        num_workers=4,
        devices_per_worker=1,
        few=(
            "batch_norm.synchronized_after_an_activity_regularizer",  # in parts
            "coupled_losses.sums_that_a_model_adds",  # tried on weights in parts
            "custom_training.loop",
            "inputs.last_batch_of_one_row",
            "optimizers.global_clipnorm",
            "saving.checkpoint",
        ),
        exempt={**_OF_A_GROUP, **_ONE_PROCESS},
        ranks_of_a_replica=2,
    ),
    Row(
        "tensor_ranks_of_horovod_2",
        lambda: _tensor_parallel(1, 2, transport="horovod"),
        num_replicas=1,
        num_workers=2,
        devices_per_worker=1,
        environments=horovod_environments,
        few=OF_A_VARIANT,
        exempt=_OF_ONE_GROUP,
        ranks_of_a_replica=2,
    ),
    Row(
        "tensor_branches_2",
        lambda: _found_layout("branches"),
        1,
        few=("models.shared_layers",),
        exempt=_OF_ONE_GROUP,
    ),
    Row(
        "tensor_image_rows_1x2",
        lambda: _tensor_parallel(1, 2, LayoutOfImages),
        1,
        few=("models.cnn",),
        exempt=_OF_ONE_GROUP,
    ),
    Row(
        "tensor_sequences_1x2",
        lambda: _tensor_parallel(1, 2, sequence_parallel=True),
        1,
        few=("models.attention",),
        exempt=_OF_ONE_GROUP,
    ),
    Row(
        "pipeline_2",
        lambda: library().PipelineStrategy(_cpus(2), num_microbatches=3),
        num_replicas=3,
        every_case=False,
        few=("layer_state.codebook_whose_loss_is_a_sum",),
        exempt=_OF_STAGES,
    ),
    Row(
        "pipeline_4",
        lambda: library().PipelineStrategy(_cpus(4), num_microbatches=3),
        num_replicas=3,
        environments=_of_four_layers,
        few=(
            "models.attention",
            "models.dict_inputs_and_outputs",
            "models.shared_layers",
            "nested.trainer",
        ),
        exempt={**_OF_STAGES, **_OF_TWO_LAYERS},
    ),
    Row(
        "pipeline_gpipe",
        lambda: library().PipelineStrategy(_cpus(2), 3, "gpipe"),
        num_replicas=3,
        few=("losses.masked_sequence", "optimizers.global_clipnorm"),
        exempt=_OF_STAGES,
    ),
    Row(
        "pipeline_interleaved",  # two devices of two stages
        lambda: library().PipelineStrategy(_cpus(2), 3, "interleaved_1f1b"),
        num_replicas=3,
        environments=_of_four_layers,
        few=("models.attention", "models.shared_layers", "nested.gan"),
        exempt={**_OF_STAGES, **_OF_TWO_LAYERS},
    ),
    Row(
        "pipeline_in_turn",  # two devices for the second stage
        lambda: library().PipelineStrategy(["CPU:0", ["CPU:1", "CPU:2"]], 4),
        num_replicas=4,
        few=("custom_training.loop", "layer_state.a_model_that_counts", "nested.gan"),
        exempt=_OF_STAGES,
    ),
    Row(
        "multi_worker_2_ahead",
        lambda: library().MultiWorkerMirroredStrategy(prefetch_batches=2),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=("inputs.last_batch_of_one_row",),
        exempt=_ONE_PROCESS,
    ),
    Row(
        "multi_worker_2_of_pipeline_model_2x2",
        lambda: library().MultiWorkerMirroredStrategy(
            inner=lambda: _hybrid(
                {"pipeline": 2, "model": 2}, pipeline=library().PipelineOptions(2)
            )
        ),
        num_replicas=4,
        num_workers=2,
        few=("nested.transfer_learning",),  # a long one: none by default, of eight devices
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES, **_OF_PARTS_OF_A_STAGE},
    ),
    Row(
        "pipeline_zero_bubble",
        lambda: library().PipelineStrategy(_cpus(2), 3, "zero_bubble"),
        num_replicas=3,
        few=(
            "models.embedding",
            "models.subclassed",
            "nested.gan",
            "nested.trainer",
            "optimizers.global_clipnorm",
            "optimizers.gradient_accumulation",
        ),
        exempt=_OF_STAGES,
    ),
    Row(
        "pipeline_remote_2",
        lambda: _remote_pipeline(2, num_microbatches=3),
        num_replicas=3,
        devices_per_worker=1,
        few=(*FEW, "nested.gan", "nested.trainer"),
        exempt=_OF_STAGES,
    ),
    Row(
        "data_pipeline_2x2",
        lambda: _pipelines(2, 2),
        num_replicas=4,
        few=(
            *FEW,
            "callbacks.measure",
            "inputs.every_batch_of_one_row",
            "nested.gan",
            "nested.trainer",
        ),
        exempt=_OF_STAGES,
    ),
    Row(
        "data_pipeline_zero_bubble_2x2",
        lambda: _pipelines(2, 2, schedule="zero_bubble"),
        num_replicas=4,
        few=("optimizers.global_clipnorm", "optimizers.gradient_accumulation"),
        exempt=_OF_STAGES,
    ),
    Row(
        "data_shard_2x2",
        lambda: _hybrid({"data": 2, "shard": 2}, shard=library().Sharding(min_size=1)),
        num_replicas=4,
        few=(
            *FEW,
            "callbacks.measure",
            "optimizers.ema_overwrite",
            "optimizers.adam_on_an_embedding",
        ),
        exempt=_OF_PARTS,
    ),
    Row(
        "data_shard_optimizer_2x2",
        lambda: _hybrid({"data": 2, "shard": 2}, shard=library().Sharding("optimizer", 1)),
        num_replicas=4,
        few=OF_A_VARIANT,
        exempt=_OF_PARTS,
    ),
    Row(
        "data_model_2x2",  # the code of tensor_2x2
        lambda: _hybrid({"data": 2, "model": 2}),
        num_replicas=2,
        few=("optimizers.global_clipnorm",),
        exempt=_OF_A_GROUP,
    ),
    Row(
        "pipeline_model_2x2",
        lambda: _hybrid({"pipeline": 2, "model": 2}, pipeline=library().PipelineOptions(3)),
        num_replicas=3,
        few=(
            "dropout.masks_differ_and_repeat",
            "inputs.last_batch_of_one_row",
            "models.attention",
            "models.dict_inputs_and_outputs",
            "models.shared_layers",
            "models.subclassed",
            "nested.gan",
            "optimizers.global_clipnorm",
        ),
        exempt={**_OF_STAGES, **_OF_PARTS_OF_A_STAGE},
    ),
    Row(
        "data_pipeline_model_2x2x2",
        lambda: _hybrid(
            {"data": 2, "pipeline": 2, "model": 2}, pipeline=library().PipelineOptions(2)
        ),
        num_replicas=4,
        devices_per_worker=8,
        few=("optimizers.global_clipnorm",),
        exempt={**_OF_STAGES, **_OF_PARTS_OF_A_STAGE},
    ),
    Row(
        "shard_model_2x2",
        lambda: _hybrid({"shard": 2, "model": 2}, shard=library().Sharding(min_size=1)),
        num_replicas=2,
        few=_OF_PIECES,
        exempt={**_OF_A_GROUP, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_pipeline_2x2",
        lambda: _hybrid(
            {"shard": 2, "pipeline": 2},
            shard=library().Sharding(min_size=1),
            pipeline=library().PipelineOptions(2),
        ),
        num_replicas=4,
        few=(*_OF_PIECES, "nested.gan"),
        exempt={**_OF_STAGES, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "data_shard_model_2x2x2",
        lambda: _hybrid({"data": 2, "shard": 2, "model": 2}, shard=library().Sharding(min_size=1)),
        num_replicas=4,
        devices_per_worker=8,
        few=("optimizers.global_clipnorm",),
        exempt={**_OF_A_GROUP, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_pipeline_model_2x2x2",
        lambda: _hybrid(
            {"shard": 2, "pipeline": 2, "model": 2},
            shard=library().Sharding(min_size=1),
            pipeline=library().PipelineOptions(2),
        ),
        num_replicas=4,
        devices_per_worker=8,
        few=("optimizers.global_clipnorm",),
        exempt={**_OF_STAGES, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "horovod_2_of_data_pipeline_2x2",
        lambda: library().HorovodStrategy(inner=lambda: _pipelines(2, 2)),
        num_replicas=8,
        num_workers=2,
        environments=horovod_environments,
        few=(
            "misuse.a_gather_that_does_not_fit_leaves_the_next_one_working",
            "optimizers.global_clipnorm",
        ),
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES},
    ),
    Row(
        "shard_workers_2_of_model_2",
        lambda: _shared("model"),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=2,
        few=_OF_SHARED_SLOTS,
        exempt={**_INSIDE_OF_WORKERS, **_OF_A_GROUP, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_workers_2_of_pipeline_2",
        lambda: _shared("pipeline", pipeline=library().PipelineOptions(2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=_OF_SHARED_SLOTS,
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_workers_2_of_model_2_parameters",
        lambda: _shared("model", "parameters"),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=2,
        few=_OF_GATHERED_WEIGHTS,
        exempt={**_INSIDE_OF_WORKERS, **_OF_A_GROUP, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_workers_2_of_pipeline_2_parameters",
        lambda: _shared("pipeline", "parameters", pipeline=library().PipelineOptions(2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=_OF_GATHERED_WEIGHTS,
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_ranks_2_of_model_2_parameters",
        lambda: _shared("model", "parameters"),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=2,
        environments=horovod_environments,
        few=("inputs.run_eagerly", "unbuilt.gan"),
        exempt={**_INSIDE_OF_WORKERS, **_OF_A_GROUP, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "shard_ranks_2_of_pipeline_2_parameters",
        lambda: _shared("pipeline", "parameters", pipeline=library().PipelineOptions(2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        environments=horovod_environments,
        few=("inputs.run_eagerly", "unbuilt.gan", "metric_states.in_a_train_step"),
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES, **_OF_WHOLE_WEIGHTS},
    ),
    Row(
        "parameter_server_sync",
        lambda: _parameter_servers(mode="sync"),
        num_replicas=2,
        devices_per_worker=1,
        every_case=False,
        few=("custom_training.step_that_returns_more_than_metrics",),
    ),
    Row(
        "parameter_server_async",
        # Without staleness, asynchronous training has one device's results to compare with.
        lambda: _parameter_servers(mode="async", max_staleness=0),
        num_replicas=1,
        devices_per_worker=1,
        few=(
            *FEW,
            "checking.a_step_is_drawn",
            "unbuilt.counts_are_exact",
            "layer_state.a_layer_called_twice",
        ),
        exempt=_ASYNCHRONOUS,
    ),
    Row(
        "multi_worker_2x1",
        lambda: library().MultiWorkerMirroredStrategy(),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        every_case=False,
        exempt=_ONE_PROCESS,
    ),
    Row(
        "multi_worker_2x2",
        lambda: library().MultiWorkerMirroredStrategy(),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=NUMBER_OF_REPLICAS,
        exempt=_ONE_PROCESS,
    ),
    Row(
        "multi_worker_3x1",
        lambda: library().MultiWorkerMirroredStrategy(),
        num_replicas=3,
        num_workers=3,
        devices_per_worker=1,
        few=(*NUMBER_OF_REPLICAS, "unbuilt.vae"),
        exempt=_ONE_PROCESS,
    ),
    Row(
        "sharded_workers_2",
        lambda: library().ShardedStrategy(min_size=1),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        few=(*FEW, "callbacks.noise_scale", "layer_state.layers_that_update_themselves"),
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_workers_2x2",
        lambda: library().ShardedStrategy(min_size=1),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=OF_A_VARIANT,
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_optimizer_workers_2",
        lambda: library().ShardedStrategy(shard="optimizer", min_size=1),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        few=OF_A_VARIANT,
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_on_hosts_workers_2x2",  # of each worker the second CPU stands for a GPU
        lambda: library().ShardedStrategy(host="parameters", min_size=1),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=("models.mlp", "optimizers.global_clipnorm", "saving.weights_file"),
        exempt={**_ONE_PROCESS, **_OF_PARTS},
        every_case=False,
    ),
    Row(
        "sharded_collectives_workers_2",
        lambda: library().ShardedStrategy(min_size=1, transport="collectives"),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        few=OF_A_VARIANT,
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_on_devices_workers_2x2",
        lambda: _sharded_on_devices(),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=OF_A_VARIANT,
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    *(
        Row(
            f"sharded_{name}_on_devices_workers_2x2",
            lambda options=options: _sharded_on_devices(**options),
            num_replicas=4,
            num_workers=2,
            devices_per_worker=2,
            few=("models.mlp", "optimizers.global_clipnorm", "saving.weights_file"),
            exempt={**_ONE_PROCESS, **_OF_PARTS},
            every_case=False,
        )
        for name, options in {
            "optimizer": {"shard": "optimizer"},
            "hybrid": {"replicas": 2},
        }.items()
    ),
    Row(
        "sharded_hybrid_workers_2x2",
        lambda: library().ShardedStrategy(min_size=1, replicas=2),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=OF_A_VARIANT,
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_hybrid_workers_4",
        lambda: library().ShardedStrategy(min_size=1, replicas=2),
        num_replicas=4,
        num_workers=4,
        devices_per_worker=1,
        few=("nested.transfer_learning",),  # a long one: none by default, of four processes
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_hybrid_collectives_workers_4",  # as the one before
        lambda: library().ShardedStrategy(min_size=1, replicas=2, transport="collectives"),
        num_replicas=4,
        num_workers=4,
        devices_per_worker=1,
        few=("nested.transfer_learning",),
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_hybrid_horovod_4",  # as the one before
        lambda: library().ShardedStrategy(min_size=1, replicas=2),
        num_replicas=4,
        num_workers=4,
        devices_per_worker=1,
        environments=horovod_environments,
        few=("nested.transfer_learning",),
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "sharded_horovod_2",
        lambda: library().ShardedStrategy(min_size=1),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        environments=horovod_environments,
        few=(*OF_A_VARIANT, "inputs.every_batch_of_one_row"),
        exempt={**_ONE_PROCESS, **_OF_PARTS},
    ),
    Row(
        "horovod_2",
        lambda: library().HorovodStrategy(),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=1,
        environments=horovod_environments,
        few=OF_A_TRANSPORT,
        exempt=_ONE_PROCESS,
    ),
    Row(
        "horovod_2_of_pipelines",
        lambda: library().HorovodStrategy(inner=lambda: _pipeline(2, 2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        environments=horovod_environments,
        few=(
            "batch_norm.a_replica_without_rows_has_no_say",
            "inputs.last_batch_of_one_row",
            "inputs.sample_weight",
            "models.layers_that_take_other_times_on_each_worker",
            "models.embedding",
            "nested.gan",
            "optimizers.global_clipnorm",
            "optimizers.gradient_accumulation",
        ),
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES},
    ),
    Row(
        "horovod_2_of_tensor_2",
        lambda: library().HorovodStrategy(inner=lambda: _tensor_parallel(1, 2)),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=2,
        environments=horovod_environments,
        few=OF_A_VARIANT,
        exempt={**_INSIDE_OF_WORKERS, **_OF_A_GROUP},
    ),
    Row(
        "horovod_2_of_sharded_2",
        lambda: library().HorovodStrategy(inner=lambda: _sharded(2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        environments=horovod_environments,
        few=OF_A_VARIANT,
        exempt={**_INSIDE_OF_WORKERS, **_OF_PARTS},
    ),
    Row(
        "multi_worker_2_of_pipelines",
        lambda: library().MultiWorkerMirroredStrategy(inner=lambda: _pipeline(2, 2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=(
            "models.layers_that_take_other_times_on_each_worker",
            "optimizers.global_clipnorm",
            "saving.checkpoint",
        ),
        exempt={**_INSIDE_OF_WORKERS, **_OF_STAGES},
    ),
    Row(
        "multi_worker_2_of_sharded_2",
        lambda: library().MultiWorkerMirroredStrategy(inner=lambda: _sharded(2)),
        num_replicas=4,
        num_workers=2,
        devices_per_worker=2,
        few=("optimizers.global_clipnorm",),
        exempt={**_INSIDE_OF_WORKERS, **_OF_PARTS},
    ),
    Row(
        "multi_worker_2_of_tensor_2",
        lambda: library().MultiWorkerMirroredStrategy(inner=lambda: _tensor_parallel(1, 2)),
        num_replicas=2,
        num_workers=2,
        devices_per_worker=2,
        few=("optimizers.global_clipnorm",),
        exempt={**_INSIDE_OF_WORKERS, **_OF_A_GROUP},
    ),
    Row(
        "horovod_3",
        lambda: library().HorovodStrategy(),
        num_replicas=3,
        num_workers=3,
        devices_per_worker=1,
        environments=horovod_environments,
        few=(*NUMBER_OF_REPLICAS, "unbuilt.vae"),
        exempt=_ONE_PROCESS,
    ),
]

ROWS_OF = {
    "OneDeviceStrategy": ["one_device"],
    "MirroredStrategy": ["mirrored_2", "mirrored_3", "mirrored_2_ahead"],
    "CentralStorageStrategy": ["central_storage"],
    "TPUStrategy": [],  # tests/tpu: it needs a TPU, and has rows of padding
    "PipelineStrategy": [
        "pipeline_2",
        "pipeline_4",
        "pipeline_gpipe",
        "pipeline_interleaved",
        "pipeline_in_turn",
        "pipeline_zero_bubble",
        "pipeline_remote_2",
    ],
    "ParameterServerStrategy": ["parameter_server_sync", "parameter_server_async"],
    "MultiWorkerMirroredStrategy": [
        "multi_worker_2x1",
        "multi_worker_2_ahead",
        "multi_worker_2x2",
        "multi_worker_3x1",
        "multi_worker_2_of_pipelines",
        "multi_worker_2_of_sharded_2",
        "multi_worker_2_of_tensor_2",
        "multi_worker_2_of_pipeline_model_2x2",
    ],
    "ShardedStrategy": [
        "sharded_3",
        "sharded_optimizer_2",
        "sharded_workers_2",
        "sharded_workers_2x2",
        "sharded_optimizer_workers_2",
        "sharded_on_hosts_workers_2x2",
        "sharded_collectives_workers_2",
        "sharded_on_devices_workers_2x2",
        "sharded_optimizer_on_devices_workers_2x2",
        "sharded_hybrid_on_devices_workers_2x2",
        "sharded_hybrid_workers_2x2",
        "sharded_hybrid_workers_4",
        "sharded_hybrid_collectives_workers_4",
        "sharded_hybrid_horovod_4",
        "sharded_horovod_2",
        "sharded_hybrid_2x2",
    ],
    "TensorParallelStrategy": [
        "tensor_1x2",
        "tensor_2x2",
        "tensor_1x4",
        "tensor_auto_1x2",
        "tensor_ranks_2",
        "tensor_ranks_2x2",
        "tensor_ranks_of_horovod_2",
        "tensor_branches_2",
        "tensor_image_rows_1x2",
        "tensor_sequences_1x2",
    ],
    "HorovodStrategy": [
        "horovod_2",
        "horovod_2_of_pipelines",
        "horovod_2_of_tensor_2",
        "horovod_2_of_sharded_2",
        "horovod_2_of_data_pipeline_2x2",
        "horovod_3",
    ],
    "HybridStrategy": [
        "data_pipeline_2x2",
        "data_pipeline_zero_bubble_2x2",
        "data_shard_2x2",
        "data_shard_optimizer_2x2",
        "data_model_2x2",
        "pipeline_model_2x2",
        "data_pipeline_model_2x2x2",
        "shard_model_2x2",
        "shard_pipeline_2x2",
        "data_shard_model_2x2x2",
        "shard_pipeline_model_2x2x2",
        "shard_workers_2_of_model_2",
        "shard_workers_2_of_pipeline_2",
        "shard_workers_2_of_model_2_parameters",
        "shard_workers_2_of_pipeline_2_parameters",
        "shard_ranks_2_of_model_2_parameters",
        "shard_ranks_2_of_pipeline_2_parameters",
    ],
}

# Public strategies that the suite cannot ask, and where they are asked: a folder, and the reason.
WITHOUT_ROWS = {
    "TPUStrategy": "tests/tpu: its steps need equal batches, of a size that is known when tracing",
}


def _engine_of(row: Row) -> str:
    """What computes a step and carries its sums."""
    by_server = {"parameter_server_sync": "synchronous", "parameter_server_async": "asynchronous"}
    if row.name in by_server:
        return f"{by_server[row.name]} parameter servers"
    if row.environments is horovod_environments:
        return "ranks of Horovod"
    if row.num_workers > 1:
        return "workers over the ring"
    if "pipeline" in row.name:
        return "a pipeline"
    return "parts of layers" if "tensor" in row.name or "model" in row.name else "local replicas"


ENGINES: dict[str, list[str]] = {}
for _row in STRATEGIES:
    ENGINES.setdefault(_engine_of(_row), []).append(_row.name)

# Workers that reduce dense tensors through TensorFlow's own collectives; asked a few cases.
TENSORFLOW_COLLECTIVES = Row(
    "tensorflow_collectives_2x1",
    lambda: library().MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
    ),
    num_replicas=2,
    num_workers=2,
    devices_per_worker=1,
)


def _workers_as_on_gpus() -> tf.distribute.Strategy:
    """Sums metrics with gradients and gathers rows by hosts' counts, over TensorFlow's ring."""
    strategy = TENSORFLOW_COLLECTIVES.make()
    strategy.extended._local_device_type, strategy.extended._has_nccl = "GPU", True
    return strategy


def _ranks_as_on_gpus() -> tf.distribute.Strategy:
    """Sums metrics where gradients are, over Gloo."""
    strategy = library().HorovodStrategy()
    strategy.extended._has_nccl = True
    return strategy


def _sharded_workers_as_on_gpus() -> tf.distribute.Strategy:
    """Parts meet where gradients do, over TensorFlow's ring; it exchanges rows and adds them up."""
    from tfparallel.internals import CollectiveAllReduce  # not before TensorFlow's are looked at

    strategy = library().ShardedStrategy(min_size=1)
    workers = strategy.extended
    workers._local_device_type, workers._has_nccl = "GPU", True
    workers._cross_device_ops = CollectiveAllReduce(
        workers._devices,
        workers._num_workers,
        tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        ),
        workers._collective_keys,
    )
    workers._watch_collectives(workers._cross_device_ops, workers._devices[0])
    workers._meet_among_all("auto")
    return strategy


def _sharded_ranks_as_on_gpus() -> tf.distribute.Strategy:
    """The same, over Gloo."""
    strategy = library().ShardedStrategy(min_size=1)
    strategy.extended._has_nccl = True
    strategy.extended._meet_among_all()
    return strategy


# What is done with NCCL, without it; asked a few cases.
WORKERS_AS_ON_GPUS = Row(
    "workers_as_on_gpus_2x2",
    _workers_as_on_gpus,
    num_replicas=4,
    num_workers=2,
    devices_per_worker=2,
)
RANKS_AS_ON_GPUS = Row(
    "ranks_as_on_gpus_2x1",
    _ranks_as_on_gpus,
    num_replicas=2,
    num_workers=2,
    devices_per_worker=1,
    environments=horovod_environments,
)
SHARDED_WORKERS_AS_ON_GPUS = Row(
    "sharded_workers_as_on_gpus_2x1",
    _sharded_workers_as_on_gpus,
    num_replicas=2,
    num_workers=2,
    devices_per_worker=1,
)
SHARDED_RANKS_AS_ON_GPUS = Row(
    "sharded_ranks_as_on_gpus_2x1",
    _sharded_ranks_as_on_gpus,
    num_replicas=2,
    num_workers=2,
    devices_per_worker=1,
    environments=horovod_environments,
)
ONE_DEVICE = Row("reference", lambda: None, 1)  # plain Keras: no strategy at all
AS_ON_GPUS = [
    *(WORKERS_AS_ON_GPUS, RANKS_AS_ON_GPUS),
    *(SHARDED_WORKERS_AS_ON_GPUS, SHARDED_RANKS_AS_ON_GPUS),
]
OTHERS = [ONE_DEVICE, TENSORFLOW_COLLECTIVES, *AS_ON_GPUS]
ROWS = {row.name: row for row in [*OTHERS, *STRATEGIES]}
