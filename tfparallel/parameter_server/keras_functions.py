"""What `fit`, `evaluate` and `predict` call for each batch: the step goes to a worker.

Keras keeps the function that it calls for each batch at the model (`train_function` and its like)
and makes one where there is none. We put ours there, when Keras hands its dataset to the strategy:

    fit -> train_function(batches) -> WorkerPool.submit -> the logs of the newest step that is done
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.parameter_server.batch_arguments import BatchArguments, ReadByChief
from tfparallel.parameter_server.remote_step import RemoteStep
from tfparallel.parameter_server.worker_pool import QueuedStep, WorkerPool
from tfparallel.replicas.peeked_iterator import PeekedIterator

MakeStep = Callable[[Callable, BatchArguments], RemoteStep]


class FedByChief:
    """The batches of a dataset, read here."""

    def __init__(self, dataset: Iterable):
        self.read_dataset = dataset

    def __iter__(self) -> Iterator[BatchArguments]:
        return map(ReadByChief.of_any_rows, self.read_dataset)


class Batches:
    """What Keras iterates over: arguments of steps, in the order of the dataset.

    Args:
        source: iterable of arguments.
        num_batches: after how many an epoch ends; None is at the end of `source`.
        submit: called ahead with each of the arguments, where results are wanted in order.
        num_ahead: how many are submitted before the first is asked for.

    Attributes:
        read_dataset: what the chief reads; None where workers do.
    """

    def __init__(
        self,
        source: Iterable,
        num_batches: int | None = None,
        submit: Callable[[object], QueuedStep] | None = None,
        num_ahead: int = 0,
    ):
        self._source, self.num_batches = source, num_batches
        self._submit, self._num_ahead = submit, num_ahead
        self.read_dataset = getattr(source, "read_dataset", None)

    def __iter__(self) -> Iterator:
        source = iter(self._source)
        if self._submit is None:
            return BatchIterator(source, self.num_batches)
        return iter(_submitted_ahead(source, self._submit, self._num_ahead))


class BatchIterator:
    """The batches of an epoch (or of all, if the epochs share one iterator).

    Attributes:
        is_at_end: the batch that came last is the last one of an epoch.
    """

    def __init__(self, source: Iterator, num_batches: int | None):
        self._source, self._num_batches = PeekedIterator(source), num_batches
        self._num_read = 0
        self.is_at_end = False

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        batch = next(self._source)
        self._num_read += 1
        self.is_at_end = not self._source.peek(1) or (
            self._num_batches is not None and self._num_read % self._num_batches == 0
        )
        return batch

    def peek(self, most: int) -> list:
        """What tells the next batches from others, as far as there are so many."""
        return [batch.here() for batch in self._source.peek(most)]


def _submitted_ahead(
    source: Iterator, submit: Callable[[object], QueuedStep], num_ahead: int
) -> Iterator:
    under_way: collections.deque[QueuedStep] = collections.deque()
    for arguments in source:
        under_way.append(submit(arguments))
        if len(under_way) > num_ahead:
            yield under_way.popleft()
    yield from under_way


class StepFunction:
    """What Keras calls with an iterator, to train or test on `steps_per_execution` batches.

    Args:
        pool: runs the steps.
        make_step: traces a step function for arguments of given specs.
        model: whose steps they are.
        step_function: the model's bound `train_step`, `test_step` or `predict_step`.
    """

    def __init__(
        self, pool: WorkerPool, make_step: MakeStep, model: keras.Model, step_function: Callable
    ):
        self.pool, self._make_step = pool, make_step
        self._model, self._step_function = model, step_function
        self._steps: dict[tuple, RemoteStep] = {}
        self._under_way: collections.deque[QueuedStep] = collections.deque()
        self._newest: Any = None

    def submit(self, arguments: BatchArguments) -> QueuedStep:
        """Hands one step to the pool."""
        key = arguments.recipe, str(arguments.specs)
        if key not in self._steps:
            self._steps[key] = self._make_step(self._step_function, arguments)
        return self.pool.submit(self._steps[key], arguments)

    def __call__(self, iterator: Any) -> object:
        for number in range(self._model.steps_per_execution):
            arguments = next(iterator, None)
            if arguments is None and number == 0:
                raise StopIteration
            if arguments is None:
                break
            if not isinstance(iterator, BatchIterator):  # `train_on_batch` waits for its result
                return self.pool.wait(self.submit(ReadByChief.of_any_rows(arguments)))
            self._under_way.append(self.submit(arguments))
        if iterator.is_at_end:
            return self._last_logs()
        return self._newest_logs()

    def _newest_logs(self) -> object:
        """Those of the newest step whose predecessors are all done; waits for the first of all."""
        while self._under_way and self._under_way[0].is_done:
            self._newest = self._under_way.popleft().outputs
        if self._newest is None:
            self._newest = self.pool.wait(self._under_way.popleft())
        return self._newest

    def _last_logs(self) -> object:
        """Those of the last step, which Keras keeps as the epoch's where they are no metrics."""
        last = self._under_way[-1]
        self._under_way.clear()
        self.pool.join()
        self._newest = None
        return last.outputs


class PredictFunction(StepFunction):
    """What Keras calls with a list of batches, to get all their predictions in order."""

    def __call__(self, data: Iterable) -> object:
        outputs = [self.pool.wait(self._submitted(part)) for part in data]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    def _submitted(self, part: object) -> QueuedStep:
        if isinstance(part, QueuedStep):
            return part
        return self.submit(ReadByChief.of_any_rows(part))
