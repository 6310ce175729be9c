"""A strategy's scope in which errors are told in other words: by whom of the cluster they are."""

import contextlib
from types import TracebackType

import tensorflow as tf

from tfparallel.replicas.checks import ONE_SCOPE_AT_A_TIME, described

_MIXED = ("Mixing different tf.distribute.Strategy", "Mismatching tf.distribute.Strategy")


class ReportingScope(contextlib.ExitStack):
    """A scope within another context; like a plain scope, it may be entered and never left."""

    def __init__(
        self, scope: contextlib.AbstractContextManager, around: contextlib.AbstractContextManager
    ):
        super().__init__()
        self._scope, self._around = scope, around

    def __enter__(self) -> tf.distribute.Strategy:
        super().__enter__()
        self.enter_context(self._around)
        return self.enter_context(self._scope)


class LonelyScope:
    """A scope that says which strategy was in it when another one, TensorFlow's own, met it.

    Args:
        strategy: whose scope it is.
        scope: what TensorFlow made for it.
    """

    def __init__(self, strategy: tf.distribute.Strategy, scope: contextlib.AbstractContextManager):
        self._strategy, self._scope = strategy, scope

    def __enter__(self) -> tf.distribute.Strategy:
        return self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and str(error).startswith(_MIXED):
            raise RuntimeError(
                "Expected one strategy's scope at a time. Received: the scope of another strategy, "
                f"or a model that was built under one, inside of that of "
                f"{described(self._strategy)}. {ONE_SCOPE_AT_A_TIME}"
            ) from error
