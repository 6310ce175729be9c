"""The weights of a unit are on their way while the unit before it computes."""

import collections
import threading

import numpy as np
import pytest

from tests.sharded.watched_link import WIDTH, chain

UNITS = 4
LONG_S = 60.0  # for what comes
SHORT_S = 1.0  # for what must not come
ROWS = np.zeros((4, WIDTH), "float32")


class Meeting:
    """Each unit's computation waits until the gather of the next unit has begun."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._began: dict = collections.defaultdict(threading.Event)
        self.alone: list[tuple[int, int]] = []

    def gathering(self, replica: int, unit: int) -> None:
        self._began[replica, unit].set()

    def computing(self, replica: int, unit: int) -> None:
        is_last = unit == UNITS - 1
        if not is_last and not self._began[replica, unit + 1].wait(self._patience_s):
            self.alone.append((replica, unit))


def test_all_gathers_but_the_first_begin_before_the_unit_in_front_has_computed(monkeypatch):
    meeting = Meeting(LONG_S)
    chain(UNITS, meeting.gathering, meeting.computing, monkeypatch).predict_on_batch(ROWS)
    assert not meeting.alone


def test_without_prefetch_a_unit_computes_alone(monkeypatch):
    """The test above can fail."""
    meeting = Meeting(SHORT_S)
    model = chain(UNITS, meeting.gathering, meeting.computing, monkeypatch, prefetch=0)
    model.predict_on_batch(ROWS)
    assert sorted(meeting.alone) == [(i, k) for i in range(2) for k in range(UNITS - 1)]


class MeetingOnTheWayBack(Meeting):
    """In the backward pass a unit waits for the second gather of the one in front of it.

    The first one's weights are not gathered again: nobody asks for the gradient of its inputs.
    """

    def __init__(self, patience_s: float):
        super().__init__(patience_s)
        self._gathers: collections.Counter = collections.Counter()
        self._computed: collections.Counter = collections.Counter()

    def gathering(self, replica: int, unit: int) -> None:
        self._gathers[replica, unit] += 1
        if self._gathers[replica, unit] == 2:
            self._began[replica, unit].set()

    def computing(self, replica: int, unit: int) -> None:
        self._computed[replica, unit] += 1
        is_backward = self._computed[replica, unit] == 2
        if is_backward and unit > 1 and not self._began[replica, unit - 1].wait(self._patience_s):
            self.alone.append((replica, unit))


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 1])
def test_so_do_those_of_the_backward_pass(prefetch, monkeypatch):
    meeting = MeetingOnTheWayBack(LONG_S if prefetch else SHORT_S)
    model = chain(UNITS, meeting.gathering, meeting.computing, monkeypatch, prefetch=prefetch)
    model.train_on_batch(ROWS, ROWS)
    counts = {unit: count for (_, unit), count in meeting._gathers.items()}
    assert counts == {0: 1, 1: 2, 2: 2, 3: 2}
    alone = [] if prefetch else [(i, k) for i in range(2) for k in range(2, UNITS)]
    assert sorted(meeting.alone) == alone
