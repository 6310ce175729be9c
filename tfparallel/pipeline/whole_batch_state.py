"""Layers of a pipeline whose state depends on the rows of the batch: assigned from all, once.

What a codebook of moving sums becomes cannot be put together from what microbatches would make of
it. So each microbatch computes with the state of the step's beginning, as it does on one device for
what a layer returns before it assigns, and leaves what the layer was called with. When all have
passed, the layer is traced once more, of all rows, for what it assigns:

    microbatch 0   x_0  --layer-->  y_0        \\
    microbatch 1   x_1  --layer-->  y_1         >  [x_0; x_1; x_2]  --layer-->  state
    microbatch 2   x_2  --layer-->  y_2        /

A layer that returns something which depends on what it has just assigned from its rows is refused:
a microbatch would need the rows of those that follow it. A model with a state of its own is not
looked at: it may be on several stages.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfparallel.internals import FuncGraph, in_stateless_scope, in_symbolic_scope
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import kept_losses, layers_of
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.state_changes import Change, StateChanges
from tfparallel.replicas.whole_batch_layers import LayerArguments, may_keep_state


@contextlib.contextmanager
def left_for_all_rows(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    changes: StateChanges,
    found: weakref.WeakKeyDictionary,
) -> Iterator[None]:
    """Within it, layers of `model` whose state depends on rows leave their calls to `changes`.

    Args:
        found: a `WeakKeyDictionary`, kept from step to step.
    """
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if may_keep_state(layer) and not isinstance(layer, keras.Model):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        functools.partial(
                            _call, strategy, changes, found.setdefault(layer, {}), layer, layer.call
                        ),
                        during="a pipeline's step",
                        why="A layer whose state depends on rows leaves what it is called with.",
                    )
                )
        yield


@dataclass(frozen=True)
class StatefulCall:
    """A call of a layer that is to be made once for all rows.

    Attributes:
        strategy: the pipeline's.
        layer: which is called.
        call: its method.
        arguments: of one microbatch.
    """

    strategy: tf.distribute.Strategy
    layer: keras.Layer
    call: Callable
    arguments: LayerArguments

    def changes_of(self, changes: StateChanges, tensors: Sequence) -> tuple[list[Change], list]:
        """What it would assign, and what it returns.

        Args:
            tensors: in the place of those of `arguments`.
        """
        args, kwargs = self.arguments.filled(tensors)
        context = BuildContext(self.strategy, tf.compat.v1.get_default_graph())
        noting = changes.in_function(tensors, [], [])
        with context, kept_losses(self.layer), changes.recomputing(), noting as noted:
            outputs = keras.tree.flatten(self.call(*args, **kwargs))
        return noted.changed, outputs

    def changes_of_all(self, changes: StateChanges, parts: Sequence[Sequence]) -> list[tuple]:
        """Variables, and what they become by the tensors of all microbatches."""
        changed: list[Change] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            changed[:], _ = self.changes_of(changes, tensors)
            return [tf.identity(change.value) for change in changed]

        gather = self.strategy.extended._gather_rows
        rows = [gather(tf.concat(each, 0)) for each in zip(*parts, strict=True)]
        values = tf.function(traced, autograph=False)(*rows)
        return [(c.variable, value) for c, value in zip(changed, values, strict=True)]


def _call(
    strategy: tf.distribute.Strategy,
    changes: StateChanges,
    known: dict,
    layer: keras.Layer,
    call: Callable,
    *args: object,
    **kwargs: object,
) -> object:
    is_other = current_replica_step() is None or changes.is_recomputing
    if is_other or in_stateless_scope() or in_symbolic_scope():
        return call(*args, **kwargs)
    arguments = LayerArguments(args, kwargs)
    if not arguments.rows:
        return call(*args, **kwargs)
    layer_call = StatefulCall(strategy, layer, call, arguments)
    if arguments.key not in known:
        known[arguments.key] = _assigns_rows(changes, layer_call)
    if known[arguments.key]:
        changes.leave(layer_call, arguments.tensors())
    return call(*args, **kwargs)


def _assigns_rows(changes: StateChanges, layer_call: StatefulCall) -> bool:
    """Whether what the layer assigns depends on its rows.

    Raises:
        ValueError: if what it returns depends on that.
    """
    with FuncGraph("call_of_layer").as_default():
        given = layer_call.arguments.placeholders()
        try:
            changed, outputs = layer_call.changes_of(changes, given)
        except Exception:  # what only Python can run, or what the step will say
            return False
    of_rows = {id(tensor) for c in changed if c.depends for tensor in (c.value, c.assigned)}
    tensors = [output for output in outputs if isinstance(output, tf.Tensor)]
    if any(reaches(output, of_rows) for output in tensors):
        raise ValueError(
            "In a pipeline, what a layer returns must not depend on a state that it has just "
            "assigned from the rows of the batch: a microbatch would need the rows of those that "
            f"follow it. Received: layer '{layer_call.layer.name}'. Compute with the state first "
            "and assign it behind, or use a strategy without stages."
        )
    return bool(of_rows)


def new_found() -> weakref.WeakKeyDictionary:
    """What `left_for_all_rows` keeps."""
    return weakref.WeakKeyDictionary()
