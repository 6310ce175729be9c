"""What every strategy says of itself, and what it refuses before anything is built in it."""

import contextlib
import inspect

import tensorflow as tf

from tfparallel.coordination.printed_lines import print_once
from tfparallel.replicas import checks, first_words
from tfparallel.replicas.reporting_scope import LonelyScope


class DescribedStrategy(tf.distribute.Strategy):
    """A `tf.distribute.Strategy` that has a `repr`, a rank, and a scope of its own.

    Its `extended` has `_description()`, `_id_in_cluster` and `_num_workers`.
    """

    def __init_subclass__(cls) -> None:
        _, *others = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(others)  # help() does not see it behind `__new__`

    def __new__(cls, *args: object, **kwargs: object) -> "DescribedStrategy":
        """As any object; of an unknown keyword is said what it may have meant."""
        checks.check_keywords(cls, kwargs)
        print_once()
        return super().__new__(cls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extended._description()})"

    @property
    def rank(self) -> int:
        """The number of this process among those that train, from 0."""
        return self.extended._id_in_cluster

    @property
    def num_workers(self) -> int:
        """How many processes of the job train; 1 where one process does."""
        return self.extended._num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this is the process that logs and writes files for the job."""
        return self.rank == 0

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; refused where another strategy places things already.

        Raises:
            RuntimeError: inside of another strategy's scope, and beside a `keras.distribution`.
        """
        checks.check_scopes(self)
        checks.check_keras_distribution(self)
        first_words.is_used(self)
        return LonelyScope(self, super().scope())
