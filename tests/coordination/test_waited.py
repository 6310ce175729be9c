"""What a thread has waited for others, on a clock that the test turns."""

import threading

import pytest

from tfparallel.coordination.waited import take_waited_s, waiting_for_others


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_waits_add_up_until_they_are_taken():
    clock = Clock()
    take_waited_s()
    for seconds in (2.0, 3.0):
        with waiting_for_others(clock):
            clock.now += seconds
        clock.now += 50.0  # does something else
    assert take_waited_s() == 5.0
    assert take_waited_s() == 0.0


def test_a_wait_within_a_wait_counts_once_and_one_that_fails_counts():
    clock = Clock()
    take_waited_s()
    with pytest.raises(TimeoutError), waiting_for_others(clock):
        clock.now += 1.0
        with waiting_for_others(clock):
            clock.now += 2.0
        raise TimeoutError
    assert take_waited_s() == 3.0


def test_other_threads_wait_for_themselves():
    clock = Clock()
    take_waited_s()
    taken = []

    def wait():
        with waiting_for_others(clock):
            clock.now += 4.0
        taken.append(take_waited_s())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert taken == [4.0] and take_waited_s() == 0.0
