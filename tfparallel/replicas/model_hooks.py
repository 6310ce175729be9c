"""What a model does otherwise under our strategies; shadowed on its instance, not on its class.

Losses and metrics count a batch as one device does, though each replica sees a part of it. They are
shadowed only while the step runs on the replicas.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import TrainerCall, distribute_lib, get_keras_mask
from tfparallel.internals.hooks import hook_next_call, hook_once, shadowed, wrapped
from tfparallel.internals.keras_layers import compiled_metrics_of
from tfparallel.replicas import coupled_metrics, metric_states
from tfparallel.replicas.added_losses import added_losses_by_replica
from tfparallel.replicas.interface import StepDecisions
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.step_build import build, check_own_step
from tfparallel.replicas.step_outputs import counts_a_batch_once
from tfparallel.replicas.weighted_losses import weighted_losses
from tfparallel.replicas.whole_batch_layers import computed_on_all_rows

_BATCH = "_batch_to_build_with"  # of Keras's iterator over the data of a call


def build_without_reading(call: TrainerCall, element_spec: object) -> None:
    """Lets a model be built from what is known of the batches of `call`, as without a strategy.

    Keras would make an iterator, read a batch and throw both away. Then a generator has lost the
    batches that were prefetched, and a dataset or `PyDataset` that differs from epoch to epoch is
    in its second one when training begins.

    Args:
        call: of `fit` or `evaluate`.
        element_spec: of its batches.
    """
    iterator, model = call.epoch_iterator, call.model
    vars(iterator)[_BATCH] = batch_of_specs(element_spec)
    hook_once(
        model,
        "_maybe_symbolic_build",
        wrapped(model, "_maybe_symbolic_build", _build_of_specs),
        why="A model is built from the shapes of its batches: no batch is read and thrown away.",
    )


def _build_of_specs(build: Callable, iterator: object = None, data_batch: object = None) -> None:
    batch = getattr(iterator, _BATCH, None)
    if batch is not None:
        iterator, data_batch = None, batch
    build(iterator=iterator, data_batch=data_batch)


def build_from_step(building: tuple[object, str] | None) -> None:
    """Lets the model that Keras begins to build, if it does, be built from the step it will run.

    That is `step_build.build` for a step of the user's, and Keras's own way for Keras's step.
    """
    if building is not None:
        model, method = building
        hook_next_call(
            model,
            "_symbolic_build",
            functools.partial(_symbolic_build, model, method),
            why="A model with a step of its own gets its variables from that step, traced once.",
        )


def _symbolic_build(
    model: keras.Model, method: str, iterator: object = None, data_batch: object = None
) -> None:
    del iterator
    build(model, method, data_batch)


def build_as_keras_does_and_check(building: tuple[keras.Model, str] | None) -> None:
    """Lets the model that Keras begins to build, if it does, be built without Keras's remat.

    And has a step of a user's own checked, before it trains.
    """
    if building is not None:
        model, method = building
        hook_next_call(
            model,
            "_symbolic_build",
            wrapped(model, "_symbolic_build", functools.partial(_build_then_check, model, method)),
            why="Keras cannot build a model with layers of a `RematScope`, whose calls it wraps.",
        )


def _build_then_check(
    model: keras.Model, method: str, build: Callable, data_batch: object = None
) -> None:
    with without_remat_of_keras(model):
        build(data_batch=data_batch)
    check_own_step(model, method, data_batch)


def batch_of_specs(element_spec: object) -> object:
    """What Keras can build a model with: specs instead of tensors, None where nothing comes."""
    return keras.tree.map_structure(
        lambda leaf: leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None,
        element_spec,
    )


@contextlib.contextmanager
def hooked(model: keras.Model, extended: StepDecisions, global_results: list) -> Iterator[None]:
    """Within it, `model`'s losses are weighted by rows and its metrics' results are global.

    Args:
        model: the model whose step runs.
        extended: `strategy.extended`, which reads metrics.
        global_results: gets every result that a metric gave, the same on all replicas.
    """

    def in_cross_replica(result: Callable, metrics: Sequence) -> Callable:
        return _in_cross_replica(result, metrics, extended, global_results)

    metrics = model.metrics
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(
            shadowed(
                model,
                "get_metrics_result",
                in_cross_replica(model.get_metrics_result, metrics),
                during="a step on replicas",
                why="Metrics are read once for all replicas, and all at once.",
            )
        )
        for metric in metrics:
            hooks.enter_context(
                shadowed(
                    metric,
                    "result",
                    in_cross_replica(metric.result, [metric]),
                    during="a step on replicas",
                    why="A metric's result is that of all rows.",
                )
            )
            if counts_a_batch_once(metric):
                hooks.enter_context(
                    shadowed(
                        metric,
                        "update_state",
                        _counting_a_batch_once(metric),
                        during="a step on replicas",
                        why="A mean of scalars counts a batch once, each replica by its rows.",
                    )
                )
        for metric in [*metrics, *getattr(compiled_metrics_of(model), "metrics", ())]:
            if metric_states.has_own_update(metric):
                hooks.enter_context(
                    shadowed(
                        metric,
                        "update_state",
                        metric_states.update_with_all_rows(metric),
                        during="a step on replicas",
                        why="A metric whose state is no sum over rows gets the rows of all.",
                    )
                )
            if coupled_metrics.is_of_function(metric):
                hooks.enter_context(
                    shadowed(
                        metric,
                        "update_state",
                        coupled_metrics.metric_of_whole_batch(metric),
                        during="a step on replicas",
                        why="A metric of a function that couples rows gets the rows of all.",
                    )
                )
        hooks.enter_context(weighted_losses(model))
        hooks.enter_context(added_losses_by_replica(model))
        hooks.enter_context(gathering_layers(model, extended))
        yield


def gathering_layers(
    model: keras.Model, extended: StepDecisions
) -> contextlib.AbstractContextManager:
    """Within it, layers whose state depends on all rows get them, where replicas can gather."""
    gathers = extended._gathers_for_layers
    return computed_on_all_rows(model) if gathers else contextlib.nullcontext()


def _in_cross_replica(
    result: Callable, metrics: Sequence, extended: StepDecisions, global_results: list
) -> Callable:
    """`result` computed once from the state of all replicas, the same tensors for each."""

    def compute(_: tf.distribute.Strategy, *args: object, **kwargs: object) -> object:
        with extended._metrics_read_together(metrics):
            return result(*args, **kwargs)

    def merged(*args: object, **kwargs: object) -> object:
        context = distribute_lib.get_replica_context()
        if context is None or current_replica_step() is None:
            return result(*args, **kwargs)
        value = context.merge_call(compute, args, kwargs)
        global_results.extend(keras.tree.flatten(value))
        return value

    return merged


def _counting_a_batch_once(metric: keras.Metric) -> Callable:
    """A scalar (a batch's loss) counts with the replica's share of rows: the shares add up to 1."""
    update_state, is_mean = metric.update_state, isinstance(metric, keras.metrics.Mean)

    def weighted(values: object, sample_weight: tf.Tensor = None) -> object:
        step = current_replica_step()
        if step is None or step.has_all_rows:
            return update_state(values, sample_weight=sample_weight)
        if is_mean and _is_number(sample_weight) and get_keras_mask(values) is None:
            values = tf.reduce_mean(values)  # as Keras does; of no rows it is NaN
        if tf.convert_to_tensor(values).shape.rank == 0:
            if sample_weight is None:
                sample_weight = step.weight
            # Without rows a mean is 0/0, and 0 * NaN would stay in the metric.
            values = tf.where(tf.greater(step.rows, 0), values, tf.zeros_like(values))
        return update_state(values, sample_weight=sample_weight)

    return weighted


def _is_number(weight: object) -> bool:
    return weight is not None and tf.convert_to_tensor(weight).shape.rank == 0
