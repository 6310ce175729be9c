"""The running call of `Model.fit`: where it starts, which steps it leaves out, who is told last.

`fit` keeps its data iterator and its list of callbacks in local variables, so they are found on the
stack. What is changed on them and on the model is undone once it has
served.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FrameType

import keras
import tensorflow as tf

from tfparallel.callbacks.backup.model_state import count_mirrored
from tfparallel.callbacks.backup.plain_variables import unsaved_variables
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.internals.hooks import hook_next_call, shadowed, wrapped
from tfparallel.internals.keras_epochs import (
    EpochIterator,
    dataset_of_iterator,
    set_steps_seen,
    steps_of_epoch,
)
from tfparallel.internals.keras_trainer import (
    fit_that_tells,
    is_fit_under,
    running_fit,
    set_first_epoch,
    strategy_of,
)
from tfparallel.internals.running_call import RunningCall
from tfparallel.replicas.model_hooks import batch_of_specs
from tfparallel.replicas.model_optimizers import hidden_optimizers_of, optimizers_of
from tfparallel.replicas.step_build import build


class FitCall:
    """The call of `Model.fit` that is telling a callback that training begins.

    Attributes:
        model: the model that trains.
        callbacks: the `CallbackList` of the call, the default callbacks included.
        epoch_iterator: Keras's iterator over the batches of one epoch after the other.
        epochs: where it ends.
        running: tells whether it has ended; None where nothing runs.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: keras.callbacks.CallbackList,
        epoch_iterator: EpochIterator,
        epochs: int,
        running: RunningCall | None,
    ):
        self.model = model
        self._running = running
        self.callbacks = callbacks
        self.epoch_iterator = epoch_iterator
        self.epochs = epochs
        self._kept = contextlib.ExitStack()
        self._has_told = False

    @classmethod
    def of_caller(cls, callback: keras.callbacks.Callback) -> "FitCall":
        """The call of `fit` that called `callback`'s `on_train_begin`, two frames below this one.

        Raises:
            BackupError: if it was not `fit` that did.
        """
        fit = fit_that_tells(callback.model)
        if fit is not None:
            return cls(callback.model, *fit, running_fit(callback.model))
        raise BackupError(
            "BackupAndRestore is a callback of Model.fit, whose input it continues. Received: a "
            "training that is not Keras's fit. Use tf.train.CheckpointManager in a loop of your "
            "own."
        )

    @property
    def strategy_name(self) -> str:
        """The class of the model's strategy, or "none"."""
        strategy = strategy_of(self.model)
        return "none" if strategy is None else type(strategy).__name__

    def runs_in(self, frame: FrameType | None) -> bool:
        """Whether `frame` was called by this call of `fit`, which thus has not ended."""
        return is_fit_under(frame, self.epoch_iterator)

    def runs(self) -> bool:
        """Whether this call of `fit` has not ended."""
        return self._running is not None and self._running.is_running()

    def told_last(self, callback: keras.callbacks.Callback) -> bool:
        """Whether `callback` is the last of the list; if not, it is now, and is told once more.

        Raises:
            BackupError: if there are two that want to be last.
        """
        callbacks = self.callbacks.callbacks
        if any(other is not callback and type(other) is type(callback) for other in callbacks):
            raise BackupError(
                f"A training has one {type(callback).__name__}. Received: two in `callbacks`. Pass "
                "one of them."
            )
        if callbacks[-1] is not callback:
            callbacks.append(callback)  # the list is being walked: its new end will be reached
            return False
        while callbacks.index(callback) < len(callbacks) - 1:
            callbacks.remove(callback)
        return True

    def tell_what_is_not_saved(self) -> None:
        """Names optimizers and variables of the model that a backup does not hold; once."""
        if self._has_told:
            return
        self._has_told = True
        for path in unsaved_variables(self.model):
            tf.get_logger().warning(
                "A backup holds tf.Variables in attributes where all replicas have the same. Not "
                "saved: %s, with a term on each replica (ON_READ). Make it a keras.Variable.",
                path,
            )
        hidden = hidden_optimizers_of(self.model)
        for optimizer in hidden:
            tf.get_logger().warning(
                "A backup holds the optimizers that are attributes of the model or its layers, or "
                "that train_step uses by name. Not saved: %s %r, which trains weights of the "
                "model; a resumed training starts its slots anew. Make it an attribute.",
                *(type(optimizer).__name__, optimizer.name),
            )

    def build_model(self, num_variables: int) -> None:
        """Creates the variables that the first step would create, from the shapes of the data.

        Under a strategy Keras has done so already, where it can: not of a step that only Python
        can run. That is run, on zeros: whatever it changes is put back afterwards.

        Args:
            num_variables: that the backup has.
        """
        strategy = strategy_of(self.model)
        if strategy is None:
            with _optimizers_in_own_scope(self.model):
                build(self.model, "fit", batch_of_specs(self._spec()))
        if self.model.run_eagerly and count_mirrored(self.model) < num_variables:
            spec = self._spec()
            run = _run_plainly if strategy is None else strategy.run
            run(self.model.train_step, (tf.nest.map_structure(_zeros, spec),))

    def _spec(self) -> object:
        return dataset_of_iterator(self.epoch_iterator).element_spec

    def start_at(self, epoch: int) -> None:
        """Makes `epoch` the first one, counted from 0."""
        set_first_epoch(self.model, epoch)

    def forget_start(self) -> None:
        """Lets later calls of `fit` start where they are told to."""
        set_first_epoch(self.model, None)

    def leave_out_steps(self, num_steps: int, steps_seen: int, is_stopped: bool) -> None:
        """Makes the first epoch begin after its first `num_steps` steps.

        Args:
            num_steps: a multiple of `steps_per_execution`.
            steps_seen: what Keras has counted at that point.
            is_stopped: a callback has ended the epoch: no step is left.
        """
        iterator = self.epoch_iterator

        def remaining_steps() -> Iterator[tuple]:
            set_steps_seen(iterator, steps_seen - num_steps)
            steps = steps_of_epoch(iterator)
            for _ in range(0, num_steps, iterator.steps_per_execution):
                next(steps)
            if not is_stopped:
                yield from steps

        hook_next_call(
            iterator,
            "_enumerate_iterator",
            remaining_steps,
            why="The epoch that goes on after a restart begins behind the steps it has had.",
        )

    def keep_logs(self, logs: dict[str, float]) -> None:
        """Makes `logs`, of the last step, those of an epoch of which no step is left."""
        model, name = self.model, "_get_metrics_result_or_logs"
        self._kept.enter_context(
            shadowed(
                model,
                "_get_metrics_result_or_logs",
                wrapped(model, name, lambda result_or_logs, own: result_or_logs(own or logs)),
                during="the rest of an epoch of which no step is left",
                why="Such an epoch has the logs of its last step.",
            )
        )

    def forget_logs(self) -> None:
        """Undoes `keep_logs`."""
        self._kept.close()


@contextlib.contextmanager
def _optimizers_in_own_scope(model: keras.Model) -> Iterator[None]:
    """Lets optimizers name their variables as they do where a step builds them.

    A step calls `apply`, which opens a scope around `build`: that of an optimizer that holds
    another one is in the names of the other's variables.
    """

    def build_in_scope(
        optimizer: keras.Optimizer, build_plainly: Callable, variables: object
    ) -> None:
        with keras.name_scope(optimizer.name, caller=optimizer):
            build_plainly(variables)

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(
                shadowed(
                    optimizer,
                    "build",
                    wrapped(optimizer, "build", functools.partial(build_in_scope, optimizer)),
                    during="the build of a model that is resumed",
                    why="An optimizer names its slots as where a step builds it.",
                )
            )
        yield


def _run_plainly(step: Callable, arguments: tuple) -> object:
    return step(*arguments)


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    """One row, in an unknown dimension."""
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)
