"""Which operations of a step's graph carry out which pass of its schedule."""

import collections

import tensorflow as tf

from tfparallel.pipeline.plans.action import Action

Pass = tuple[int, Action]  # in which round


class Passes:
    """The operations of one step that is being traced.

    Attributes:
        calls: of each pass, calls of functions of its stage.
        action_of: what each of those is a part of.
        fetches: for each pass, what the host waits with to give it what it takes from there.
        copies: of each pass, what takes what it keeps to the host.
        sums: on each stage, additions of its gradients.
    """

    def __init__(self) -> None:
        self.calls: dict[Pass, list[tf.Operation]] = collections.defaultdict(list)
        self.action_of: dict[tf.Operation, Action] = {}
        self.fetches: dict[Pass, list[tf.Operation]] = collections.defaultdict(list)
        self.copies: dict[Pass, list[tf.Operation]] = collections.defaultdict(list)
        self.sums: dict[int, list[tf.Operation]] = collections.defaultdict(list)

    def add(self, in_round: int, action: Action, operation: tf.Operation) -> None:
        """Tells of a call."""
        self.calls[in_round, action].append(operation)
        self.action_of[operation] = action

    def of_stages(self) -> dict[int, list[tf.Operation]]:
        """The calls on each stage, and the sums of its gradients."""
        found: dict[int, list[tf.Operation]] = collections.defaultdict(list)
        for operation, action in self.action_of.items():
            found[action.stage].append(operation)
        for stage, operations in found.items():
            operations += self.sums[stage]
        return found
