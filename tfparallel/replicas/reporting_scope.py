"""A strategy's scope in which errors are told in other words: by whom of the cluster they are."""

import contextlib
from typing import Any


class ReportingScope(contextlib.ExitStack):
    """A scope within another context; like a plain scope, it may be entered and never left."""

    def __init__(self, scope: Any, around: contextlib.AbstractContextManager):
        super().__init__()
        self._scope, self._around = scope, around

    def __enter__(self) -> Any:
        super().__enter__()
        self.enter_context(self._around)
        return self.enter_context(self._scope)
