"""The executors of several pipelines that run one step, as one to whom microbatches are numbered.

Pipelines have their devices and copies of variables, but what a stage computes is traced once.

    microbatches 0 .. M-1     pipeline 0     executor 0  \\
                                                          stage functions
    microbatches M .. 2M-1    pipeline 1     executor 1  /
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfparallel.pipeline.executor import Executor
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule


class Executors:
    """Those of one step.

    Args:
        each: of a pipeline, all by one schedule.
        num_microbatches: of a pipeline.
    """

    def __init__(self, each: Sequence[Executor], num_microbatches: int):
        self._each, self._num_microbatches = list(each), num_microbatches

    def _own(self, microbatch: int) -> tuple[Executor, int]:
        """The executor of a microbatch of all, and its number there."""
        pipeline, own = divmod(microbatch, self._num_microbatches)
        return self._each[pipeline], own

    @property
    def num_stages(self) -> int:
        """How many stages each pipeline has."""
        return self._each[0].num_stages

    def stage_of_call(self, stage: int, microbatch: int, inputs: Iterable) -> int:
        """As the microbatch's executor says."""
        executor, own = self._own(microbatch)
        return executor.stage_of_call(stage, own, inputs)

    def end_round(self, microbatch: int) -> None:
        """Tells the microbatch's executor."""
        executor, own = self._own(microbatch)
        executor.end_round(own)

    def call(
        self,
        stage: int,
        microbatch: int,
        key: Hashable,
        function: Callable,
        inputs: list,
        **options: bool,
    ) -> Sequence:
        """As `Executor.call`, in the microbatch's pipeline."""
        executor, own = self._own(microbatch)
        return executor.call(stage, own, key, function, inputs, **options)

    def by_pipeline(self, parts: Sequence[tuple]) -> Iterator[tuple[Executor, list, list]]:
        """What `sum_gradients` takes, for each pipeline.

        Args:
            parts: for each microbatch its gradients and its number of rows.
        """
        count = self._num_microbatches
        for i, executor in enumerate(self._each):
            gradients, rows = zip(*parts[i * count : (i + 1) * count], strict=True)
            yield executor, list(gradients), list(rows)

    def order(self, graph: tf.Graph) -> Schedule:
        """As `Executor.order`, for all pipelines together."""
        first, *others = self._each
        return first.order(graph, others)

    def add_clock(self, graph: tf.Graph, hosts: Sequence[Sequence[str]]) -> dict[Action, tf.Tensor]:
        """As `Executor.add_clock`, of the microbatches of all pipelines.

        Args:
            graph: of the step.
            hosts: for each pipeline, what `Executor.add_clock` takes.
        """
        count = self._num_microbatches
        return {
            action._replace(microbatch=i * count + action.microbatch): times
            for i, executor in enumerate(self._each)
            for action, times in executor.add_clock(graph, hosts[i]).items()
        }
