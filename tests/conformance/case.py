"""A case: one question that every strategy is asked."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests import helpers
from tests.conformance.models import MODELS
from tests.conformance.strategies import Row

BARRIER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Case:
    """A function from a `Run` to named results.

    Attributes:
        name: `file.function`, as in `optimizers.adam`.
        function: does the work; what it returns is compared with one device.
        core: asked of every row, also of those that are not asked every case.
        claims: True if the function judges by itself and returns nothing.
        atol: largest allowed difference from one device.
        long: asked in `make test-all` only.
    """

    name: str
    function: Callable[["Run"], Mapping[str, np.ndarray] | None]
    core: bool
    claims: bool
    atol: float
    long: bool = False


CASES: dict[str, Case] = {}


def case(core: bool = False, atol: float = 1e-5, long: bool = False) -> Callable:
    """Register a function whose results must equal those of one device."""
    return _registers(core=core, claims=False, atol=atol, long=long)


def claim(core: bool = False, long: bool = False) -> Callable:
    """Register a function that asserts by itself, under the strategy alone."""
    return _registers(core=core, claims=True, atol=0.0, long=long)


def add_case(name: str, function: Callable, core: bool = False, atol: float = 1e-5) -> None:
    """Register a case that is made from a table rather than written out."""
    CASES[name] = Case(name, function, core, claims=False, atol=atol)


def _registers(**options) -> Callable:
    def register(function: Callable) -> Callable:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        CASES[name] = Case(name, function, **options)
        return function

    return register


@dataclass
class Run:
    """Where a case runs.

    Attributes:
        row: the strategy's row.
        strategy: `None` for the reference.
        folder: empty, the same for all workers of the row.
        rank: of this worker, from 0.
    """

    row: Row
    strategy: tf.distribute.Strategy | None
    folder: Path
    rank: int
    _barriers: int = field(default=0, init=False)

    def scope(self) -> contextlib.AbstractContextManager:
        """The strategy's scope, or nothing."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    @property
    def own_folder(self) -> Path:
        """A folder no other worker writes to."""
        folder = self.folder / f"rank{self.rank}"
        folder.mkdir(exist_ok=True)
        return folder

    def train(self, model: str = "mlp", **options) -> helpers.Training:
        """`helpers.train` of a model of `models.py` under this run's strategy."""
        chosen = MODELS[model]
        return helpers.train(
            self.strategy,
            **{
                "build": chosen.build,
                "compile_options": chosen.compile_options,
                "data": chosen.data,
                **options,
            },
        )

    def barrier(self) -> None:
        """Wait until every worker has come here, without any collective."""
        self._barriers += 1
        (self.folder / f"barrier{self._barriers}-{self.rank}").touch()
        deadline = time.monotonic() + BARRIER_TIMEOUT_S
        pattern = f"barrier{self._barriers}-*"
        while len(list(self.folder.glob(pattern))) < self.row.num_workers:
            assert time.monotonic() < deadline, f"Worker {self.rank} waited in vain for its peers."
            time.sleep(0.02)
