"""What a process that waits says and when it gives up, on a clock of the test's own."""

import logging

import pytest

from tfparallel.coordination.patience import LONGEST_LOOK_S, Silence, Wait, WaitedTooLong
from tfparallel.coordination.waiting import Clock, wait_until_nobody_is_missing


class Simulated:
    """A clock that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.time_s, self.said = 0.0, []

    def clock(self) -> Clock:
        return Clock(lambda: self.time_s, self._sleep, self._say)

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def _say(self, level: int, text: str) -> None:
        self.said.append((round(self.time_s), level, text))


def wait(limit_s: float | None, until_s: float = 1e9) -> Simulated:
    """What is said by one who waits for "ps 0 (host:1)", which comes at `until_s`."""
    world = Simulated()
    wait_until_nobody_is_missing(
        lambda: "" if world.time_s >= until_s else "ps 0 (host:1)",
        "chief 0",
        "start",
        limit_s,
        "Timeouts.start_s",
        world.clock(),
    )
    return world


def test_who_comes_within_15_seconds_is_not_spoken_of():
    assert wait(600.0, until_s=14.9).said == []


def test_it_says_for_whom_and_why_from_15_seconds_on_and_warns_after_half_its_limit():
    said = wait(180.0, until_s=149.0).said
    expected = [15, 30, 45, 60, 75, 90, 105, 120, 135]
    assert [seconds for seconds, _, _ in said] == pytest.approx(expected, abs=3)
    levels = [level for _, level, _ in said]
    assert levels == 5 * [logging.INFO] + 4 * [logging.WARNING]
    expected = "chief 0 has been waiting 15 s for ps 0 (host:1) to start. Limit: 180 s."
    assert said[0][2] == expected


def test_a_normal_start_is_no_warning_in_its_first_minute():
    assert {level for _, level, _ in wait(40.0, until_s=39.0).said} == {logging.INFO}


@pytest.mark.parametrize("limit_s", [2.0, 20.0, 600.0])
def test_it_ends_at_its_limit_with_the_name_and_the_way_out(limit_s):
    world = Simulated()
    with pytest.raises(
        WaitedTooLong, match=r"Expected ps 0 .host:1. to start within .* s\. .*start_s"
    ):
        wait_until_nobody_is_missing(
            lambda: "ps 0 (host:1)", "chief 0", "start", limit_s, "Timeouts.start_s", world.clock()
        )
    assert world.time_s == pytest.approx(limit_s, abs=0.5)
    assert world.said  # never an end without a word before it


def test_without_a_limit_it_goes_on_saying_so():
    assert len(wait(None, until_s=3600.0).said) == pytest.approx(3600 / 15, rel=0.1)


def test_a_process_that_was_stopped_itself_has_not_waited_meanwhile():
    waits = Wait("rank 0", "start", 60.0, 0.0, "start_s")
    assert waits.look(1.0, "rank 1") is None
    assert waits.look(10_000.0, "rank 1") is None
    assert waits.waited_s == 1.0 + LONGEST_LOOK_S


def test_silence_is_counted_by_process_and_ends_with_an_answer():
    silence = Silence(["a", "b"], 0.0)
    for now_s in range(1, 9):
        silence.heard(float(now_s), ["b"] if now_s % 4 == 0 else [])
    assert silence.longer_than(7.0) == ["a"]
    assert (silence.of("a"), silence.of("b")) == (8.0, 0.0)
    silence.heard(1e6, [])  # the asking process was stopped for long
    assert silence.of("b") == LONGEST_LOOK_S
