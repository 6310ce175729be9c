"""`python -m` in no time: a fork of a process that has imported TensorFlow and tfparallel."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.parameter_server.spawner import REPOSITORY, Child, Spawner


def forked(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    pipes: Sequence[int] = (),
) -> Child:
    """`Spawner.spawn_module`, with `environment` added to that of this process."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return _spawner().spawn_module(module, arguments, environment, log, pipes)


@functools.cache
def _spawner() -> Spawner:
    """One for all tests: it ends with this process."""
    return Spawner("tests.multi_process.preloaded")
