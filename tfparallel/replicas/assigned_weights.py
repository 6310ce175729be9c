"""Weights that a step of a user's own assigns itself: from a replica's own rows that is refused.

`weight.assign_sub(rate * gradient)` in a `train_step` would change each replica's copy by the
gradient of its own rows, and the copies would drift apart without an error. Whether a value depends
on rows is read off the graph in which the step is traced before it runs (`step_build.py`). What is
computed of the rows of all, by `all_rows` or a reduction, does not count as that: it is the same
everywhere.
"""

from collections.abc import Iterator

import keras

from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.keras_layers import behind, layers_of, own_weights
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.local_copies import copies_here
from tfparallel.replicas.whole_batch_layers import may_keep_state

# Beginnings of types of operations. Functions, branches and loops that assign are not looked into.
_ASSIGNMENTS = ("Assign", "ResourceScatter")


class RefusedStepError(ValueError):
    """A step would train to other weights than on one device."""


def check_assigned_weights(model: keras.Model, context: BuildContext, rows: list) -> None:
    """Refuses a step that assigns what depends on a replica's own rows to a weight.

    Args:
        model: whose step has been traced.
        context: in which it was.
        rows: the tensors of the batch there.

    Raises:
        RefusedStepError: naming the weight.
    """
    strategy = context.strategy
    if num_replicas(strategy) == 1:
        return
    paths = dict(_weights(model))
    of_batch = set(map(id, rows))
    outer = {id(inner): id(outer) for outer, inner in context.graph.captures}
    for operation in context.graph.get_operations():
        if not operation.type.startswith(_ASSIGNMENTS):
            continue
        resource, *values = operation.inputs
        handle = outer.get(id(resource))
        if handle in paths and any(reaches(value, of_batch, context.met) for value in values):
            raise RefusedStepError(
                "A train_step must not assign to a weight what depends on the rows of the batch: "
                "each replica has some of them, and its copy would become another one. Received: "
                f"{type(strategy).__name__}, and a step of model '{model.name}' that assigns such "
                f"a value to '{paths[handle]}'. Give gradients to an optimizer; or compute what is "
                "assigned from the rows of all replicas (strategy.all_rows), or from sums over "
                "them (tf.distribute.get_replica_context().all_reduce)."
            )


def _weights(model: keras.Model) -> Iterator[tuple[int, str]]:
    """The ids of the handles, and the paths, of what optimizers train in `model`.

    Layers that may assign their own weights when they are called have rules of their own:
    `whole_batch_layers.py`.
    """
    for layer in layers_of(model):
        if layer is model or not may_keep_state(layer):
            for weight in own_weights(layer):
                for copy in copies_here(behind(weight)):
                    yield id(copy.handle), weight.path
