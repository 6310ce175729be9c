"""Compares one step of a model under a strategy with the same step on one device."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.internals.keras_trainer import build_if_needed
from tfparallel.replicas.checking import causes
from tfparallel.replicas.checking.pair import Pair
from tfparallel.replicas.checking.rebuild import Build, rebuild
from tfparallel.replicas.checking.report import Difference, StepCheck
from tfparallel.replicas.checking.step import values_of, variables_of
from tfparallel.replicas.checking.traces import no_trace
from tfparallel.replicas.checking.whole_float32 import whole_float32
from tfparallel.replicas.checks import check_compiled, check_model


@whole_float32()
def check_step(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    batch: object,
    float64: bool,
    build: Build | None,
) -> StepCheck:
    """`KerasStrategy.check`, which explains the arguments."""
    batch = prepared(strategy, model, batch, "check")
    with no_trace(model, strategy):
        one_device = rebuild(model, build, batch, None)
        pair = Pair(strategy, one_device, model, batch)
        differences = pair.differences()
        found: list[str] = []
        is_equal = pair.all_ranks(all(each.is_equal for each in differences))
        if not is_equal:
            found, is_explained = causes.explain(pair)
        if float64:
            exact = _in_float64(strategy, model, batch, build)
            differences = _with_float64(differences, exact)
            if not is_equal and not found and all(each.is_equal for each in exact):
                found, is_explained = ["Rounding: in float64 the step is equal."], True
    verdict = "equal" if is_equal else "explained" if is_explained else "unexplained"
    return StepCheck(
        model.name, type(strategy).__name__, differences, verdict, tuple(found), pair.rank
    )


def prepared(
    strategy: tf.distribute.Strategy, model: keras.Model, batch: object, what: str
) -> object:
    """A batch in tensors, for a model that is built and can take a step outside of `fit`.

    Raises:
        ValueError: inside of a scope, for a model that is not compiled or not this strategy's.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            f"{what} trains outside of the strategy's scope. Received: a call inside "
            "`with strategy.scope():`. Call it after that block."
        )
    check_model(strategy, model)
    check_compiled(model, what)
    batch = _as_tensors(batch, keras.config.floatx())
    build_if_needed(model, batch)
    return batch


def _in_float64(
    strategy: tf.distribute.Strategy, model: keras.Model, batch: object, build: Build | None
) -> tuple:
    """The differences of a pair like `model` with numbers of 64 bits, in the same state."""
    batch, state = _as_tensors(batch, "float64"), values_of(model)
    with strategy.scope():
        distributed = rebuild(model, build, batch, "float64")
    one_device = rebuild(model, build, batch, "float64")
    for variable, value in zip(variables_of(distributed), state, strict=True):
        variable.assign(value)
    return Pair(strategy, one_device, distributed, batch).differences()


def _with_float64(
    differences: Sequence[Difference], exact: Sequence[Difference]
) -> tuple[Difference, ...]:
    pairs = zip(differences, exact, strict=True)
    return tuple(Difference(**{**vars(a), "in_float64": b.difference}) for a, b in pairs)


def _as_tensors(batch: object, floatx: str) -> object:
    def as_tensor(leaf: object) -> object:
        if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.cast(tensor, floatx) if tensor.dtype.is_floating else tensor

    return keras.tree.map_structure(as_tensor, batch)
