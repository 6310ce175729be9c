"""The trainer of Keras: which of its calls run, what they run, and what they are made of."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# The trainer's module and its data iterator, to recognise calls that come from `Model.fit` & co.
from keras.src.backend.tensorflow import trainer as keras_trainer

# The functions that divide losses by the number of replicas.
from keras.src.losses import loss as keras_loss

# Tells a `tf.data.Dataset` of the user from one that Keras made of arrays, with options of its own.
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# What a method that is a `tf.function` is bound to, in the place of its object.
from tensorflow.python.eager.polymorphic_function import tf_method_target

from tfparallel.internals.keras_epochs import EpochIterator
from tfparallel.internals.running_call import RunningCall

_METHODS_THAT_BUILD = ("fit", "evaluate", "train_on_batch", "test_on_batch", "build_if_needed")
_AROUND_UPDATE = ("train_step", "compute_metrics")  # what calls the optimizer, and what comes then


class TrainerCall(NamedTuple):
    """The call of `Model.fit`, `evaluate` or `predict` that is preparing its data."""

    method: str
    model: keras_trainer.TensorFlowTrainer
    callbacks: object
    is_dataset_of_user: bool  # a `tf.data.Dataset`, with the options its author chose
    num_batches: int | None  # of one epoch: `steps_per_epoch`, or what the data holds
    is_length_known: bool  # of the data itself
    data_adapter: object  # Keras's view of the data
    epoch_iterator: EpochIterator  # what the call iterates over, made right now


def calling_trainer() -> TrainerCall | None:
    """The call of a Keras trainer that hands its dataset to the strategy, if that is the caller.

    Keras hands over the dataset but not the model. The model's checks and the callbacks' files need
    it before the first step, so it is read from the stack, which is always
    `fit -> TFEpochIterator.__init__ -> strategy.experimental_distribute_dataset -> here`.
    """
    frame = _caller_of_caller()
    if frame is None or frame.f_code is not keras_trainer.TFEpochIterator.__init__.__code__:
        return None
    iterator = frame.f_locals["self"]
    while (frame := frame.f_back) is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, keras_trainer.TensorFlowTrainer):
            return TrainerCall(
                frame.f_code.co_name,
                model,
                frame.f_locals.get("callbacks"),
                isinstance(iterator.data_adapter, TFDatasetAdapter),
                iterator.num_batches,
                iterator.data_adapter.num_batches is not None,
                iterator.data_adapter,
                iterator,
            )
    return None


def is_predict_step(fn: Callable) -> bool:
    """Whether `fn` is the function that `Model.predict` passes to `Strategy.run`."""
    wrapped = inspect.unwrap(fn)
    name = getattr(wrapped, "__qualname__", "")
    return name.startswith("TensorFlowTrainer.make_predict_function")


def model_of_predict_step(fn: Callable) -> keras_trainer.TensorFlowTrainer:
    """The model whose `predict` made `fn`, which `is_predict_step`."""
    return inspect.getclosurevars(inspect.unwrap(fn)).nonlocals["self"]


def is_keras_step(fn: Callable) -> bool:
    """Whether `fn` is the bound `train_step` or `test_step` of a Keras model."""
    return _is_step(fn, "train_step") or _is_step(fn, "test_step")


def is_train_step(fn: MethodType) -> bool:
    """Whether `fn` is the bound `train_step` of a Keras model."""
    return _is_step(fn, "train_step")


def _is_step(fn: Callable, name: str) -> bool:
    """By its name, or as what the model has under that name: a decorator may call it another."""
    model = getattr(fn, "__self__", None)
    if not isinstance(model, keras_trainer.TensorFlowTrainer):
        return False
    return getattr(fn, "__name__", "") == name or fn == getattr(model, name)


def is_compiled_step(fn: object) -> bool:
    """Whether `fn` is the `train_step` or `test_step` of a Keras model, as a `tf.function`.

    Decorated in the class, or wrapped on the instance; whoever asks, and from however deep.
    """
    if not isinstance(fn, tf.types.experimental.PolymorphicFunction):
        return False
    owner = getattr(inspect.unwrap(fn.python_function), "__self__", None)
    model = owner.target if isinstance(owner, tf_method_target.TfMethodTarget) else owner
    is_step = getattr(fn, "__name__", "") in ("train_step", "test_step")
    return is_step and isinstance(model, keras_trainer.TensorFlowTrainer)


def is_stock_step(fn: Callable) -> bool:
    """Whether `fn`, a step of a Keras model, is Keras's own.

    Such a step takes a batch `(x, y, sample_weight)`; to train, it calls `optimizer.scale_loss`.
    """
    trainer = keras_trainer.TensorFlowTrainer
    stock = trainer.train_step, trainer.test_step, trainer.predict_step
    return getattr(fn, "__func__", None) in stock


def ends_with_update(model: keras.Model) -> bool:
    """Whether nothing of the user's own comes behind the update of a training step of `model`."""
    own = [getattr(getattr(model, name), "__func__", None) for name in _AROUND_UPDATE]
    return own == [getattr(keras_trainer.TensorFlowTrainer, name) for name in _AROUND_UPDATE]


def has_stock_loss(model: keras.Model) -> bool:
    """Whether `model` computes its loss as Keras does: from `compile`'s, of `y` and `model(x)`."""
    return type(model).compute_loss is keras_trainer.TensorFlowTrainer.compute_loss


def is_symbolic_build() -> bool:
    """Whether the calling method was called by Keras, building a model from its first batch."""
    return _is_symbolic_build(_caller_of_caller())


def trainer_that_builds() -> tuple[keras.Model, str] | None:
    """The model that enters its strategy's scope to be built, and the method that was called.

    The calling method is that scope: `fit -> ... -> _maybe_symbolic_build -> scope -> here`.
    """
    frame = _caller_of_caller()
    if not _is_symbolic_build(frame):
        return None
    model = frame.f_locals["self"]  # type: ignore[union-attr]
    while frame is not None and frame.f_code.co_name not in _METHODS_THAT_BUILD:
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_name
    return model, "fit" if name == build_if_needed.__name__ else name


def is_loss_scaling() -> bool:
    """Whether Keras called the method to divide a loss by the number of replicas, or undo that."""
    frame = _caller_of_caller()
    scaling = (keras_loss.scale_loss_for_distribution, keras_loss.unscale_loss_for_distribution)
    return frame is not None and frame.f_code in {each.__code__ for each in scaling}


def is_called_by_trainer() -> bool:
    """Whether the calling method was called by code of Keras's trainer."""
    frame = _caller_of_caller()
    return frame is not None and frame.f_globals is vars(keras_trainer)


def is_exporting() -> bool:
    """Whether Keras traces a function for `Model.export`: files hold tables in one piece."""
    frame: FrameType | None = None if tf.executing_eagerly() else sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("keras.src.export."):
            return True
        frame = frame.f_back
    return False


def _caller_of_caller() -> FrameType | None:
    """Who called the method that called the function that calls this.

    Where the method was called by one of the same name, of a class that extends it, who called
    that: so a strategy may override a method that asks for its caller.
    """
    frame: FrameType | None = sys._getframe(2)
    name = frame.f_code.co_name  # type: ignore[union-attr]
    while frame is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    return frame


def _is_symbolic_build(frame: FrameType | None) -> bool:
    build = keras_trainer.TensorFlowTrainer._maybe_symbolic_build
    return frame is not None and frame.f_code is build.__code__


# ---- building ------------------------------------------------------------------------------------


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """That `model` was created under; the public property takes the current one for none."""
    return model._distribute_strategy


def build_if_needed(model: keras.Model, data_batch: object) -> None:
    """Builds and compiles what of `model` is not yet, from the shapes of a batch, as `fit` does."""
    model._maybe_symbolic_build(data_batch=data_batch)


def build_from_shapes(model: keras.Model, data_batch: object) -> None:
    """Builds model, metrics, loss and optimizer from the shapes of a batch."""
    model._symbolic_build(data_batch=data_batch)


def build_as_keras_does(model: keras.Model, data_batch: object) -> None:
    """The same, without what was put before that method of this model."""
    type(model)._symbolic_build(model, data_batch=data_batch)


def compile_arguments(model: keras.Model) -> dict[str, object]:
    """What `model` was compiled with, as it was given."""
    return dict(model._compile_config.config)


# ---- the call of `fit` that is running -----------------------------------------------------------


class Fit(NamedTuple):
    """Local variables of a call of `Model.fit`."""

    callbacks: Any  # its `CallbackList`
    epoch_iterator: Any
    epochs: int


def fit_that_tells(model: keras.Model) -> Fit | None:
    """The call of `model.fit` that tells its callbacks something, one of which asks; or None.

    Keras tells callbacks neither where their data come from nor of one another.
    """
    callbacks, frame = _frame_of_fit(model)
    if frame is None:
        return None
    return Fit(callbacks, frame.f_locals["epoch_iterator"], frame.f_locals["epochs"])


def running_fit(model: keras.Model) -> RunningCall | None:
    """The call of `model.fit` that this thread is in; None if there is none."""
    _, frame = _frame_of_fit(model)
    return None if frame is None else RunningCall(frame)


def _frame_of_fit(
    model: keras.Model,
) -> tuple[keras.callbacks.CallbackList | None, FrameType | None]:
    """Of the innermost call of `model.fit`, with the `CallbackList` that it is telling."""
    callback_list = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            callback_list = caller
        elif caller is model and "epoch_iterator" in frame.f_locals:
            break
        frame = frame.f_back
    return callback_list, frame


def is_fit_under(frame: FrameType | None, epoch_iterator: object) -> bool:
    """Whether the call of `fit` with this iterator is `frame`, or called it, and has not ended."""
    while frame is not None:
        if frame.f_locals.get("epoch_iterator") is epoch_iterator:
            return True
        frame = frame.f_back
    return False


def set_first_epoch(model: keras.Model, epoch: int | None) -> None:
    """Where the call of `fit` that begins shall start, counted from 0; None: where it was told."""
    model._initial_epoch = epoch


def graphs_of_step(
    train_function: object,
) -> tuple[
    list[tf.types.experimental.GenericFunction], list[tf.types.experimental.GenericFunction]
]:
    """The `tf.function`s in the function that `fit` calls for a step; none where it is no graph.

    Returns:
        Those that are called with an iterator, and those of one step within a wrapper, which
        batches that come from Python are given to. What counts its traces as they do is one.
    """
    if not inspect.isfunction(train_function):
        counts = hasattr(train_function, "experimental_get_tracing_count")
        return [train_function] if counts else [], []
    known = inspect.getclosurevars(train_function).nonlocals.values()
    graphs = [f for f in known if _is_graph(f)]
    steps = [inspect.unwrap(f, stop=_is_graph) for f in known if inspect.isfunction(f)]
    return graphs, [step for step in steps if _is_graph(step)]


def _is_graph(function: object) -> bool:
    return isinstance(function, tf.types.experimental.PolymorphicFunction)
