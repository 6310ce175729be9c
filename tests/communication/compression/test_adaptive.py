"""Adaptive compression: decisions as tables, then decisions that ranks take together."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.communication.compression import weighing
from tests.communication.compression.ranks import Gradients, Meeting, ThreadTransport
from tfparallel.communication.compression import adaptive_plan
from tfparallel.communication.compression.adaptive_orders import (
    MOST_ROWS,
    Measurement,
    TimesOfStep,
)
from tfparallel.communication.compression.adaptive_plan import (
    FIRST_LOOK,
    FIRST_TURNS,
    MEASURED_STEPS,
    SMALL_BYTES,
    TURNS,
    Controller,
)
from tfparallel.communication.compression.level_costs import (
    choose_levels,
    finish_time_s,
    worth,
)
from tfparallel.communication.compression.level_prices import LevelPrices
from tfparallel.communication.compression.payloads import Payloads
from tfparallel.compression import Adaptive, Cast, GradientCompression, PowerSGD
from tfparallel.replicas.compressed_gradients import CompressedGradients
from tfparallel.replicas.optimizer_hooks import GradientSource

pytestmark = pytest.mark.turns

EXACT, HALF, COARSE = 0, 1, 2
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("ready", "durations", "finish"),
    [
        ([0, 0, 0], [1, 1, 1], 3),  # one after the other
        ([0, 2, 4], [1, 1, 1], 5),  # each is done when the next is ready
        ([0, 1, 2], [3, 3, 3], 9),  # the network is never idle
        ([0, 5], [3, 1], 6),
    ],
)
def test_buckets_follow_one_another(ready, durations, finish):
    assert finish_time_s(ready, durations) == finish


@pytest.mark.parametrize(
    ("ready", "durations", "levels"),
    [
        # Communication is nothing: all exact.
        ([0, 10], [[0.1, 0.1, 0.1]] * 2, [EXACT, EXACT]),
        # float16 is slower than it saves (casts on a fast network).
        ([0, 1], [[1, 3, 2]] * 2, [EXACT, EXACT]),
        # The first bucket hides behind computation, the last cannot.
        ([0, 20], [[10, 5, 1]] * 2, [EXACT, COARSE]),
        # It hides in half precision only.
        ([0, 7], [[10, 5, 1]] * 2, [HALF, COARSE]),
        # Nothing hides, and half precision is nothing beside an exact step.
        ([0, 0], [[5, 0.1, 0.01]] * 2, [HALF, HALF]),
        # Nothing hides.
        ([0, 0], [[10, 9, 1]] * 2, [COARSE, COARSE]),
    ],
)
def test_levels_are_what_a_second_is_worth_most_with(ready, durations, levels):
    durations, errors, rest_s = np.array(durations), np.array([[0, 1e-4, 0.5]] * 2), 10
    energies = np.ones(2)

    def cost_s(levels):  # by hand: worth 1, sqrt(31/32), sqrt(15/16) with none, one, both coarse
        left_out = sum(errors[k, level] ** 4 for k, level in enumerate(levels)) / 2
        time_s = finish_time_s(ready, [durations[k, level] for k, level in enumerate(levels)])
        return (rest_s + time_s) / np.sqrt(1 - left_out)

    best = min(itertools.product(range(3), repeat=2), key=cost_s)
    assert list(best) == levels
    assert choose_levels(ready, durations, errors, energies, np.inf, rest_s, True) == levels


def test_what_little_of_the_gradient_is_in_may_be_coarse():
    durations, errors = np.array([[10, 9, 1]] * 2), np.array([[0, 1e-4, 0.95]] * 2)
    assert worth([COARSE, EXACT], errors, np.array([1.0, 99.0]), True) == pytest.approx(
        np.sqrt(1 - 0.01 * 0.95**4)
    )
    levels = choose_levels([0, 0], durations, errors, np.array([1.0, 99.0]), np.inf, 10, True)
    assert levels == [COARSE, HALF]
    nothing = np.zeros(2)  # there is no gradient
    assert worth([COARSE, COARSE], np.ones((2, 3)), nothing, True) == 1.0


@pytest.mark.parametrize(("late_counts", "level"), [(True, COARSE), (False, HALF)])
def test_what_comes_late_is_worth_less_where_an_optimizer_divides_by_what_came(late_counts, level):
    """11 seconds for 0.87 or 0.71 of a step, or 15 for a whole one."""
    errors, energies = np.array([[0, 1e-4, np.sqrt(0.5)]]), np.ones(1)
    squared = worth([COARSE], errors, energies, late_counts) ** 2
    assert squared == pytest.approx(0.75 if late_counts else 0.5)
    durations = np.array([[10, 5, 1]])
    assert choose_levels([0], durations, errors, energies, np.inf, 10, late_counts) == [level]


@pytest.mark.parametrize(("late_counts", "plan"), [(True, [0, 2]), (False, [0, 1])])
def test_a_plan_of_several_levels_knows_whether_late_counts(late_counts, plan):
    """The first bucket hides behind the second, which is 31 s for 0.94 or 0.87 of a step, or 35."""
    prices = LevelPrices(
        np.array([[100.0, 50.0, 1.0]] * 2), [0, 1, 2], np.inf, late_counts, Payloads(200)
    )
    prices.errors = np.array([[0, 1e-4, 0.7]] * 2)
    ready_s = np.array([0.0, 20.0])
    for level, seconds in enumerate((10.0, 5.0, 1.0)):
        durations_s = np.full(2, seconds)
        step_s = 10.0 + finish_time_s(ready_s, durations_s)
        prices.take(level, [TimesOfStep(ready_s, durations_s, step_s)])
    assert prices.preferred() == plan


def test_errors_above_the_bound_are_not_chosen():
    durations, errors = np.array([[10, 5, 1]] * 2), np.array([[0, 1e-4, 0.7], [0, 1e-4, 0.5]])
    arguments = [0, 0], durations, errors, np.ones(2)
    assert choose_levels(*arguments, 0.6, 1, True) == [HALF, COARSE]
    assert choose_levels(*arguments, 0.0, 1, True) == [EXACT, EXACT]


def test_a_duration_is_that_of_the_rank_that_came_last():
    measurement = Measurement(
        ready_s=np.array([[[0.0, 0.0], [2.0, 3.0]], [[0.0, 0.0], [102.5, 105.0]]]),  # clocks differ
        done_s=np.array([[[1.0, 2.0], [4.0, 7.0]], [[101.0, 102.0], [104.5, 107.0]]]),
        errors=np.zeros((2, 2, 3)),
        energies=np.zeros((2, 2)),
        began_s=np.array([0.5, 99.5]),
        payload_bytes=0,
        trip_s=np.zeros(2),
        payload_s=np.zeros((2, 2)),
    )
    assert measurement.all_s == 7.5
    assert [taken.all_s for taken in measurement.of_steps(2, 0.0)] == [2.0, 5.0]
    (last,) = measurement.of_steps(1, 0.0)  # which followed the order
    assert last.all_s == 7.0
    np.testing.assert_allclose(last.durations_s, [2.0, 2.0])
    np.testing.assert_allclose(last.offsets_s, [0.0, 2.5])


@pytest.mark.parametrize(
    ("later_s", "first_s", "second_s"), [(0.0, 5.0, 5.0), (2.0, 7.0, 3.0), (9.0, 14.0, 2.0)]
)
def test_whoever_comes_first_a_sum_takes_what_its_messages_take(later_s, first_s, second_s):
    """A message is 3 s on its way, and its bytes take 2 s."""
    measurement = Measurement(
        ready_s=np.array([[[0.0]], [[later_s]]]),
        done_s=np.array([[[first_s]], [[later_s + second_s]]]),
        errors=np.zeros((2, 1, 3)),
        energies=np.zeros((2, 1)),
        began_s=np.zeros(2),
        payload_bytes=0,
        trip_s=np.full(2, 3.0),
        payload_s=np.zeros((2, 2)),
    )
    (taken,) = measurement.of_steps(1, 3.0)
    assert taken.durations_s == [5.0]


def test_buckets_that_are_done_out_of_order_take_no_time_of_their_own():
    measurement = measured([[0.0, 1.0]], [[5.0, 4.0]], np.zeros((1, 2, 3)))
    (taken,) = measurement.of_steps(1, 0.0)
    np.testing.assert_allclose(taken.durations_s, [5.0, 0.0])
    assert taken.all_s == 5.0


def measured(ready_s, done_s, errors, began_s=0.0, payload_bytes=0, trip_s=0.0, payload_s=0.0):
    """By one rank, `[step, bucket]`, of buckets with equal gradients."""
    ready_s, done_s = np.array([ready_s], float), np.array([done_s], float)
    energies = np.ones((1, ready_s.shape[-1]))
    began_s, trip_s = np.array([began_s]), np.array([trip_s])
    payload_s = np.full((1, 2), payload_s)
    weighed = payload_bytes, trip_s, payload_s
    return Measurement(ready_s, done_s, errors, energies, began_s, *weighed)


@pytest.mark.parametrize(("half_bytes", "level"), [(0.0, HALF), (0.5, COARSE)])
def test_a_level_takes_the_time_that_its_bytes_need(half_bytes, level):
    """Half's second bucket seems to take none, as the first one is done later."""
    sent_bytes = SMALL_BYTES * np.array([[1.0, half_bytes, 0.01]] * 2)
    names = ["exact", "half", "coarse"]
    plan = Controller(sent_bytes, names, [0, 1, 2], 3, max_error=0.6, interval=10)
    done_s = {
        (EXACT, EXACT): [10.0, 20.0],
        (HALF, HALF): [2.0, 1.9],
        (HALF, COARSE): [2.0, 2.9],
        (COARSE, HALF): [0.9, 2.9],
        (COARSE, COARSE): [0.9, 1.8],
        (3, 3): [0.9, 1.8],
    }
    clock, now_s, taken = Clock(plan), 0.0, []
    for _ in range(2 + 4 * MEASURED_STEPS + 2):
        taken.append(clock.levels)
        ready_s, done = np.full(2, now_s), now_s + np.array(done_s[tuple(taken[-1])])
        clock.tick(ready_s, done, np.tile([0, 1e-4, 0.3], (1, 2, 1)))
        now_s = np.max(done)
    assert ([COARSE, HALF] in taken) == (level == HALF)  # it is tried


class Clock:
    """Follows the orders of a controller: which levels are next, and what it is told in the end."""

    def __init__(self, controller):
        self._controller, self._number, self._began_s, self._times_s = controller, 0, 0.0, []

    @property
    def levels(self):
        rows = self._controller.order.rows
        return rows[self._number % len(rows)]

    def tick(self, ready_s, done_s, errors, trip_s=0.0, byte_s=0.0):
        """A step that ended with `done_s`; returns what looking at it took."""
        self._times_s = [*self._times_s, (ready_s, done_s)][-MOST_ROWS:]
        self._number += 1
        if self._number < self._controller.order.steps:
            return 0.0
        payload_bytes = self._controller.order.payload_bytes
        payload_s = trip_s + byte_s * payload_bytes
        weighed = payload_bytes, trip_s, payload_s
        times = zip(*self._times_s, strict=True)
        self._controller.advance(measured(*times, errors, self._began_s, *weighed))
        looking_s = 2 * trip_s + (payload_bytes > 0) * (trip_s + 2 * payload_s)
        self._number, self._began_s = 0, np.max(done_s) + looking_s
        return looking_s


def drive(controller, durations_of, error, steps, mixing_s=0.0, byte_s=0.0):
    """Runs `controller` on two buckets that take `durations_of(level)`; returns levels by step.

    A step with two levels takes `mixing_s` longer than forecast; a byte of a payload `byte_s`.
    """
    clock, now, taken = Clock(controller), 0.0, []
    for number in range(steps):
        levels = clock.levels
        now, taken = now + mixing_s * (levels[0] != levels[1]), [*taken, levels]
        ready = np.array([now, now + 1])
        done = [ready[0] + durations_of(levels[0], number)]
        done.append(max(done[0], ready[1]) + durations_of(levels[1], number))
        errors = np.tile([0, 1e-4, error, min(error + 0.3, 1)], (1, 2, 1))
        now = done[1] + 3.0 + clock.tick(ready, done, errors, byte_s=byte_s)
    return taken


def controller(max_error=np.inf, interval=10, late_counts=True):
    names, timed = ["exact", "half", "four", "one"], [0, 1, 2, 3]
    sent_bytes = 1e5 * np.array([[100, 50, 4, 1]] * 2)
    limits = {"max_error": max_error, "interval": interval, "late_counts": late_counts}
    return Controller(sent_bytes, names, timed, probe=4, **limits)


SLOW = {0: 10.0, 1: 5.0, 2: 0.5, 3: 0.4, 4: 0.6}
FAST = {0: 0.01, 1: 0.02, 2: 0.05, 3: 0.04, 4: 0.06}
NEW_STEPS = 1 + MEASURED_STEPS  # of a level that no step had before
COARSE_STEPS, PROBE = [[2, 2]] * NEW_STEPS, [4, 4]


def test_it_measures_then_decides_then_looks_again():
    plan = controller()
    taken = drive(plan, lambda level, _: SLOW[level], 0.3, 40, byte_s=1e-6)
    # Payloads tell that all would be hopeless, exactly or not.
    first = [[2, 2], *COARSE_STEPS, PROBE, *[[3, 3]] * NEW_STEPS]
    second = [*[[2, 2]] * 10, PROBE]  # only one probing step: times are as expected
    assert taken[: len(first) + 22] == [*first, *second, *second]
    assert "bucket 1 is sent as four" in plan.log[1]
    assert "exact at least 5000.0 ms" in plan.log[0]  # half of what payloads took


def test_the_time_between_decisions_doubles():
    plan = controller(interval=4 * FIRST_LOOK)
    taken = drive(plan, lambda level, _: SLOW[level], 0.3, 8 * FIRST_LOOK, byte_s=1e-6)
    probed = [number for number, levels in enumerate(taken) if levels == PROBE]
    assert np.diff(probed[1:]).tolist() == [2 * FIRST_LOOK + 1, 4 * FIRST_LOOK + 1]


def test_on_a_fast_link_all_is_sent_exactly():
    plan = controller()
    taken = drive(plan, lambda level, _: FAST[level], 0.3, 40)
    assert taken == [[2, 2], *[[0, 0]] * 39]  # nothing else is tried
    (why, *_) = plan.log
    assert "of 4010.0 ms a step waits 10.0 ms for sums" in why
    assert sum("all is sent as exact" in line for line in plan.log) == 1


def test_exact_steps_that_other_work_makes_slow_are_timed_once_more():
    busy = 1 + MEASURED_STEPS
    taken = drive(controller(), lambda level, n: 5.0 if n < busy else FAST[level], 0.3, 40)
    assert taken == [[2, 2], *[[0, 0]] * 39]


def test_a_small_model_begins_with_an_exact_step():
    """What is approximated in the first steps misleads Adam for long."""
    sent_bytes, names = np.array([[4e5, 2e5, 3e4]]), ["exact", "half", "coarse"]
    plan = Controller(sent_bytes, names, [0, 1, 2], 3, max_error=np.inf, interval=10)
    assert plan.order.rows == [[0]]


@pytest.mark.parametrize(("trip_s", "is_tried"), [(0.0, True), (0.05, False)])
def test_exact_steps_are_tried_at_once_unless_an_idle_connection_needs_many_ways(trip_s, is_tried):
    """10 MB begin with 14.6 KB: ten ways of 50 ms until all are under way."""
    plan = controller()
    ready_s = np.array([0.0, 1.0])
    Clock(plan).tick(ready_s, ready_s + 1, np.zeros((1, 2, 4)), trip_s, byte_s=1e-9)
    assert (plan.order.rows == [[0, 0]]) == is_tried


def test_what_no_payload_has_told_is_not_tried_at_once():
    """A training that goes on from a backup first does what the controller before had ordered."""
    plan = controller()
    plan.advance(measured([[0.0, 1.0]], [[1.0, 2.0]], np.zeros((1, 2, 4))))
    assert plan.order.rows == [*COARSE_STEPS, PROBE]


@pytest.mark.parametrize(("coarsest_s", "decided"), [(1.95, 2), (1.8, 2), (1.5, 3)])
def test_a_coarser_level_has_to_be_better_by_a_tenth(coarsest_s, decided):
    """By forecast it is better by less than a hundredth, by 5 and by 14; its error will grow."""
    times = {0: 100.0, 1: 50.0, 2: 2.0, 3: coarsest_s, 4: 2.0}
    taken = drive(controller(), lambda level, _: times[level], 0.05, 60, byte_s=1e-6)
    assert [3, 3] in taken and taken[-9:].count([decided] * 2) >= 8


def test_the_first_step_of_a_new_level_is_not_timed():
    plan = controller()
    drive(plan, lambda level, n: 50.0 if n in (1, 2, 3) else SLOW[level], 0.3, 12, byte_s=1e-6)
    assert "four 500.0 ms" in plan.log[0]  # the median of four, of which two are slow


@pytest.mark.parametrize("seed", range(20))
def test_what_was_never_timed_would_not_have_been_chosen(seed):
    """However fast levels are beside one another, the decision is that of all times."""
    rng = np.random.default_rng(seed)
    per_byte_s, latency_s, casts_s = rng.choice([0.01, 0.1, 1, 10, 100]), *rng.uniform(0, 0.2, 2)
    sent, error = [1, 0.5, 0.04, 0.01, 0.04], rng.uniform(0.1, 0.6)
    times = [latency_s + (level > 0) * casts_s + per_byte_s * sent[level] for level in range(5)]
    taken = drive(controller(), lambda level, _: times[level], error, 3 * FIRST_LOOK)
    errors = np.tile([0, 1e-4, error, min(error + 0.3, 1)], (2, 1))
    durations = np.array([times[:4]] * 2)
    expected = choose_levels([0, 1], durations, errors, np.ones(2), np.inf, 3.0, True)

    def cost_s(levels):
        finish_s = finish_time_s([0, 1], durations[[0, 1], levels])
        return (3.0 + finish_s) / worth(levels, errors, np.ones(2), True)

    decided = max(taken, key=taken.count)
    assert cost_s(decided) <= 1.03 * cost_s(expected)


@pytest.mark.parametrize(("mixing_s", "decided"), [(0.0, [0, 3]), (1.0, [3, 3])])
def test_a_plan_of_several_levels_stays_if_its_steps_are_worth_as_much(mixing_s, decided):
    """The first bucket hides behind the second's computation, so says the plan."""
    plan, times = controller(max_error=0.6), {0: 1.0, 1: 1.0, 2: 0.8, 3: 0.1, 4: 0.1}
    taken = drive(plan, lambda level, _: times[level], 0.1, 60, mixing_s)
    first = 1 + 2 * MEASURED_STEPS + NEW_STEPS + 1 + NEW_STEPS  # exact ones twice, and coarsest
    turns = [[0, 0], [0, 3], [3, 3]] * TURNS  # with exact ones, which take little longer
    assert taken[first : first + len(turns) + 10] == turns + [decided] * 10
    assert ("exact, one took" in plan.log[0]) == (mixing_s > 0)


def test_a_plan_that_turns_out_hopeless_takes_no_more_turns():
    plan, times = controller(max_error=0.6), {0: 1.0, 1: 1.0, 2: 0.8, 3: 0.1, 4: 0.1}
    taken = drive(plan, lambda level, _: times[level], 0.1, 60, mixing_s=20.0)
    first = taken.index([0, 3]) - 1
    turns = [[0, 0], [0, 3], [3, 3]] * FIRST_TURNS + [[0, 0], [3, 3]] * (TURNS - FIRST_TURNS)
    assert taken[first : first + len(turns) + 10] == turns + [[3, 3]] * 10


def test_a_lucky_measurement_is_no_reason_to_leave_exact_steps():
    plan, times = controller(), {0: 1.0, 1: 1.0, 2: 1.5, 3: 1.4, 4: 1.5}

    def duration(level, number):
        return 0.7 if level == 1 and number < 24 else times[level]

    taken = drive(plan, duration, 0.3, 60)
    first = taken.index([0, 1]) - 1  # which is the plan
    turns = [[0, 0], [0, 1], [1, 1]] * TURNS
    assert taken[first : first + len(turns) + 10] == turns + [[0, 0]] * 10
    assert "exact for all" in plan.log[0]


def test_a_step_lasts_until_the_bucket_that_is_done_last():
    """Of the planned step the second bucket is done first, and the step is slower than forecast."""
    names, sent_bytes = ["exact", "coarse"], np.array([[SMALL_BYTES, 0.0]] * 2)
    plan = Controller(sent_bytes, names, [0, 1], probe=2, max_error=0.6, interval=10)
    done_s = {(0, 0): [3.0, 4.0], (1, 1): [5.0, 5.1], (0, 1): [6.0, 1.0], (2, 2): [5.0, 5.1]}
    clock, now_s, taken = Clock(plan), 0.0, []
    for _ in range(1 + 1 + 3 * MEASURED_STEPS + 2 * TURNS + 1):
        taken.append(clock.levels)
        done, errors = now_s + np.array(done_s[tuple(taken[-1])]), np.tile([0, 0.1], (1, 2, 1))
        clock.tick(np.full(2, now_s), done, errors)
        now_s = np.max(done)
    assert [0, 1] in taken and taken[-1] == [0, 0]


def test_it_measures_again_when_times_change_for_good():
    """One slow step does not: two more are looked at."""
    start = 1 + NEW_STEPS + 1 + NEW_STEPS
    hiccup = drive(
        controller(),
        lambda level, n: SLOW[level] * (9 if n == start + 9 else 1),
        0.3,
        40,
        byte_s=1e-6,
    )
    assert hiccup[start : start + 13] == [*[[2, 2]] * 12, PROBE]
    start += 2 * MEASURED_STEPS  # exact steps, as payloads tell nothing
    plan = controller()
    times = lambda level, n: (SLOW if n < start + 5 else FAST)[level]  # noqa: E731
    taken = drive(plan, times, 0.3, 60)
    again = [[2, 2], *[[0, 0]] * 20]  # as in the beginning: a payload goes with the first
    assert taken[start + 12 : start + 12 + len(again)] == again
    assert any("s instead of 1.0000 s: measures" in line for line in plan.log)


def simulated(plan, mbit_per_s, steps, noise, seed=0, mbit_after=None, trip_s=0.0):
    """Runs `plan` on a link, with a clock of its own: levels and seconds of every step.

    An MLP of 10 M weights: 0.1 s of computation, four buckets, the first of which is small.
    """
    rng = np.random.default_rng(seed)
    ready_s = np.array([0.02, 0.04, 0.07, 0.09])
    clock, now_s, taken = Clock(plan), 0.0, []
    for number in range(steps):
        levels, began_s = clock.levels, now_s
        rate = mbit_after if mbit_after and number >= steps // 2 else mbit_per_s
        sent = np.column_stack([plan.sent_bytes, plan.sent_bytes[:, 2]])  # a probing step's
        slower = rng.lognormal(0, noise)  # other work beside this one
        ready, done = now_s + slower * ready_s, []
        for k, level in enumerate(levels):
            duration_s = 0.004 * slower + trip_s + 8e-6 * sent[k, level] / rate
            done.append(max(done[-1] if done else 0.0, ready[k]) + duration_s)
        errors = np.tile([0, 2e-4, 0.78, 0.87, 0.94], (1, 4, 1))
        looking_s = clock.tick(ready, done, errors, trip_s, 8e-6 / rate)
        now_s = done[-1] + 0.01 * slower + looking_s
        taken.append((tuple(levels), now_s - began_s))
    return taken


def mlp_of_10_m(interval=500):
    names = ["exact", "half", "four", "two", "one"]
    exact = np.array([[8e4], [1.7e7], [1.7e7], [6.4e6]])
    sent_bytes = exact * np.array([1, 0.5, 0.004, 0.002, 0.001])
    return Controller(sent_bytes, names, [0, 1, 2, 4], 5, max_error=np.inf, interval=interval)


@pytest.mark.parametrize(("half_s", "decided"), [(0.09, 1), (0.3, 2)])
def test_a_finer_level_is_not_judged_by_how_its_bytes_begin(half_s, decided):
    """Over 50 ms TCP needs four ways more for the first float16 sum behind smaller ones."""
    sent_bytes = np.array([[4.4e5, 2.2e5, 2e4, 1e4]])
    plan = Controller(sent_bytes, ["exact", "half", "four", "one"], [0, 1, 2, 3], 4, np.inf, 500)
    durations_s = {0: 0.6, 1: half_s, 2: 0.1, 3: 0.1, 4: 0.12}
    clock, now_s, largest, taken = Clock(plan), 0.0, 0.0, []
    for _ in range(80):
        (level,) = clock.levels
        sent = sent_bytes[0, min(level, 3)]
        ways = np.log2(max(1.0, sent / max(largest, 14_600)))
        largest = max(largest / 2, sent)
        done_s = now_s + 0.03 + durations_s[level] + 0.05 * ways
        times = np.array([now_s + 0.03]), np.array([done_s])
        looking_s = clock.tick(*times, np.array([[[0, 2e-4, 0.8, 0.9]]]), 0.05, 8e-8)
        now_s, taken = done_s + looking_s, [*taken, level]
    assert set(taken[-10:]) <= {decided, 4}


@pytest.mark.parametrize(
    ("trip_s", "error", "is_tried", "decided"),
    [
        (0.05, 0.0, False, 1),  # 178 ms: at best 18 % faster, as it waits for two sums
        (0.0, 0.5, True, 2),  # 98 ms for 0.87 of a step
        (0.0, 0.8, True, 1),  # 98 ms for 0.60 of a step: 9 % faster than float16
    ],
)
def test_where_late_does_not_count_few_approximations_are_tried(trip_s, error, is_tried, decided):
    """With 20 Mbit/s, and 90 ms of a step besides; where it does count, one is tried first."""
    sent_bytes = np.array([[4.4e5, 2.2e5, 2e4, 1e4]])
    arguments = ["exact", "half", "four", "one"], [0, 1, 2, 3], 4, np.inf, 500
    for late_counts in (False, True):
        plan = Controller(sent_bytes, *arguments, late_counts=late_counts)
        clock, now_s, taken = Clock(plan), 0.0, []
        for _ in range(80):
            (level,) = clock.levels
            sums_s = (1 + (level > 1)) * trip_s + 4e-7 * sent_bytes[0, min(level, 3)]
            times = np.array([now_s + 0.09]), np.array([now_s + 0.09 + sums_s])
            errors = np.array([[[0, 2e-4, error, min(1.0, error + 0.2)]]])
            now_s = times[1][0] + clock.tick(*times, errors, trip_s, 4e-7)
            taken.append(level)
        if late_counts:
            assert taken.index(2) == 1
        else:
            assert (2 in taken) == is_tried and taken.index(1) < 20
            assert 0 not in taken[1:]  # float16 took what its bytes take
            assert taken[-8:].count(decided) >= 7
            told = any("no approximation is tried" in line for line in plan.log)
            assert told == (not is_tried)


def test_exact_steps_are_tried_where_their_bytes_hardly_take_longer():
    """Over 50 ms and 1 Gbit/s float16 is timed first, as TCP begins slowly."""
    arguments = ["exact", "half", "four"], [0, 1, 2], 3, np.inf, 500
    plan = Controller(np.array([[4.4e5, 2.2e5, 2e4]]), *arguments, late_counts=False)
    clock, now_s, taken = Clock(plan), 0.0, []
    for _ in range(80):
        (level,) = clock.levels
        sums_s = 0.05 + (level == 1) * 0.004 + 8e-9 * plan.sent_bytes[0, level]  # it casts
        times = np.array([now_s + 0.09]), np.array([now_s + 0.09 + sums_s])
        now_s = times[1][0] + clock.tick(*times, np.zeros((1, 1, 3)), 0.05, 8e-9)
        taken.append(level)
    assert taken[1] == 1 and taken[-8:] == [0] * 8


@pytest.mark.parametrize(("max_error", "decided"), [(np.inf, 1), (0.0, 0)])
def test_what_is_not_tried_is_in_no_plan(max_error, decided):
    """Not for one bucket of eight either; nor is float16, of which no error was seen, exact."""
    sent_bytes = np.tile(np.array([4.4e5, 2.2e5, 2e4, 1e4]) / 8, (8, 1))
    arguments = ["exact", "half", "four", "one"], [0, 1, 2, 3], 4, max_error, 500
    plan = Controller(sent_bytes, *arguments, late_counts=False)
    clock, now_s, taken = Clock(plan), 0.0, []
    for _ in range(80):
        levels = clock.levels
        ready_s = now_s + 0.09 + 0.001 * np.arange(8)
        sums_s = np.cumsum(4e-7 * sent_bytes[range(8), np.minimum(levels, 3)])
        done_s = ready_s[0] + 0.05 * (1 + (max(levels) > 1)) + sums_s
        now_s = done_s[-1] + clock.tick(ready_s, done_s, np.zeros((1, 8, 4)), 0.05, 4e-7)
        taken.append(levels)
    assert max(map(max, taken)) == 1
    assert taken[-8:] == [[decided] * 8] * 8


def test_payloads_tell_the_same_whoever_comes_first():
    """A message is 50 ms on its way; rank 1 comes 20 ms later, and after an odd number of sums."""
    for later_s in (0.0, 0.02):
        payloads = Payloads(1 << 20)
        skews_s = later_s * np.array([1.0, -1.0])
        payload_s = np.stack([0.1 - skews_s, 0.1 + skews_s], 1)
        payloads.weigh(1 << 17, payload_s, 0.05 + skews_s)
        assert payloads.trip_s == pytest.approx(0.05)
        assert payloads.bytes_s(1 << 17) == pytest.approx(0.05)
        # 14.6 KB are sent at once, and twice as many with each answer, which takes two ways.
        assert payloads.starting_s(14_600 * 2**10) == pytest.approx(10 * 2 * 0.05)


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam()]
)
def test_what_is_late_counts_as_the_optimizer_has_it(optimizer):
    variables = [keras.Variable(np.zeros((40, 30), "float32"))]
    workers = SimpleNamespace(_compressor=Adaptive(), _compressions=set())
    source = GradientSource(optimizer, variables)
    compression = CompressedGradients._compression_of(workers, source)
    is_sgd = isinstance(optimizer, keras.optimizers.SGD)
    assert compression._reducer._controller.late_counts == is_sgd


def test_an_exact_step_that_waits_for_as_long_as_payloads_told_is_one():
    sent_bytes = np.full((4, 1), 5e4) * np.array([1, 0.5, 0.04, 0.02, 0.01])
    names = ["exact", "half", "four", "two", "one"]
    plan = Controller(sent_bytes, names, [0, 1, 2, 4], 5, max_error=np.inf, interval=500)
    levels = [each[0] for each, _ in simulated(plan, 22, 4, 0.0)]
    assert levels == [0, 0, 2, 2]  # the first is traced


@pytest.mark.parametrize("mbit_per_s", [20, 100, 1000, 10_000, 10**6])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_settling_takes_a_twentieth_of_a_training(mbit_per_s, noise):
    """Of 1,000 steps those are counted that are not of the decision before or after them."""
    unsettled = []
    for seed in range(3 if noise else 1):
        taken = simulated(mlp_of_10_m(), mbit_per_s, 1000, noise, seed)
        levels = [each for each, _ in taken]
        settled = {each for each in set(levels) if levels.count(each) > 30}
        unsettled.append(sum(each not in settled for each in levels))
        # Nor is it the seconds that it loses: to what each step costs once settled.
        usual_s = np.median([time for each, time in taken if each in settled])
        assert sum(time for _, time in taken) <= 1.15 * 1000 * usual_s
    assert np.median(unsettled) <= 50


def test_a_small_bucket_is_no_reason_to_send_everything_exactly():
    """Its plan has the small bucket exact; whole steps of that would take 3.3 s each."""
    taken = simulated(mlp_of_10_m(), 100, 300, 0.0)
    assert any(0 in levels and len(set(levels)) > 1 for levels, _ in taken)
    assert max(time for _, time in taken) < 1.0


def test_decisions_say_why_and_what_came_of_them():
    plan = mlp_of_10_m()
    taken = simulated(plan, 100, 200, 0.0)
    (why, *_), (came, *_) = (
        [re.search(pattern, line) for line in plan.log if re.search(pattern, line)]
        for pattern in (
            r"a step takes ([\d.]+) ms and is worth ([\d.]+) of an exact one: ([\d.]+) ms",
            rf"{FIRST_LOOK} steps took ([\d.]+) ms each, pauses included \(forecast: ([\d.]+) ms\)",
        )
    )
    step_ms, worth_of_step, price_ms = map(float, why.groups())
    assert price_ms == pytest.approx(step_ms / worth_of_step, rel=1e-2)
    received_ms, forecast_ms = map(float, came.groups())
    first = next(i for i, line in enumerate(plan.log) if f"{FIRST_LOOK} steps took" in line)
    decided = int(re.match(r"step (\d+)", plan.log[first - 1])[1])
    left_out = [[0, 2e-4, 0.78, 0.87, 0.94][level] ** 4 for level in taken[decided + 1][0]]
    assert worth_of_step == pytest.approx(np.sqrt(1 - np.mean(left_out)), abs=1e-3)
    of_clock = 1e3 * np.mean([time for _, time in taken[decided + 1 : decided + 1 + FIRST_LOOK]])
    assert received_ms == pytest.approx(of_clock, rel=0.02)
    assert forecast_ms == step_ms == pytest.approx(of_clock, rel=0.1)


@pytest.mark.parametrize("rates", [(10**6, 20), (20, 10**6)])
def test_it_decides_again_when_the_link_changes(rates):
    plan = mlp_of_10_m(interval=100)
    levels = [each for each, _ in simulated(plan, rates[0], 1200, 0.0, mbit_after=rates[1])]
    decided = [max(set(part), key=part.count) for part in (levels[300:600], levels[900:])]
    fast, slow = decided if rates[0] > rates[1] else decided[::-1]
    assert sum(slow) > sum(fast)
    assert any("measures" in line for line in plan.log)


class SlowTransport(ThreadTransport):
    """A network of a few bytes a second."""

    def _collective(self, kind, tensors, combine, shapes=None):
        size = tf.add_n([tf.size(tensor) * tensor.dtype.size for tensor in tensors])
        wait = tf.numpy_function(lambda n: np.int32(time.sleep(n / 1e6) or 0), [size], tf.int32)
        with tf.control_dependencies([wait]):
            tensors = [tf.identity(tensor) for tensor in tensors]
        return super()._collective(kind, tensors, combine, shapes)


def train(compression, gradient, transport, steps):
    one = tf.Variable(1.0)  # or gradients were ready before the step, or after it
    step = tf.function(lambda: compression.reduce([gradient(transport.rank) * one], transport))
    for _ in range(steps):
        sums = step()
    return sums[0].numpy()


def low_rank_gradient(rank):
    """Of rank 3, the same space on all ranks, and a little noise."""
    rng = np.random.default_rng(0)
    u, v = rng.normal(size=(200, 3)), rng.normal(size=(3, 150))
    rng = np.random.default_rng(rank)
    noise = 0.01 * rng.normal(size=(200, 150))
    return tf.constant(u @ np.diag(rng.uniform(1, 2, 3)) @ v + noise, tf.float32)


def test_ranks_decide_alike_from_what_a_slow_network_takes(monkeypatch):
    """Errors of ranks 2 and 1 are not allowed; that of rank 4 is the noise only."""
    # A busy machine must not begin a second round of measurements, whose coarse steps would leave
    # residuals for the last decision.
    monkeypatch.setattr(adaptive_plan, "_CHANGE", np.inf)
    gradients = Gradients([(200, 150)], 2)
    adaptive = Adaptive(max_error=0.1, ranks=(4, 2, 1), interval=4)
    meeting = Meeting(2)

    def run(transport):
        transport = SlowTransport(transport.rank, meeting)
        compression = GradientCompression(adaptive, gradients.variables)
        measuring, deciding = 1 + 4 * MEASURED_STEPS + 2, 2 * TURNS + 4 + 1  # at most
        steps = measuring + deciding
        total = train(compression, low_rank_gradient, transport, steps)
        return total, compression.report(2), compression._reducer._rows.numpy().tolist()

    (first, report, levels), (second, _, other_levels) = meeting.run(run)
    np.testing.assert_array_equal(first, second)
    assert levels == other_levels
    decided = [line for line in report.decisions if "bucket 0 is sent as" in line]
    assert decided and str(decided[-1]) in str(report)
    assert "sent as PowerSGD(rank=4)" in decided[-1]
    errors = [float(text) for text in re.findall(r"error ([0-9.e-]+)", decided[-1])]
    exact = sum(low_rank_gradient(rank).numpy() for rank in range(2))
    singular = np.linalg.svd(exact, compute_uv=False)
    best = [np.sqrt(np.sum(singular[r:] ** 2) / np.sum(singular**2)) for r in (2, 1)]
    assert errors[0] == 0 and errors[1] < 1e-3
    assert best[0] / 100 < errors[2] < 0.1  # the same noise was left out in every step so far
    # What rank 2 leaves out has one direction: two deviations of the mean of 8 squares.
    np.testing.assert_allclose(np.square(errors[3:]), np.square(best), rtol=2 * np.sqrt(2 / 8))


def test_an_overflow_is_seen_at_every_level():
    gradients, adaptive = Gradients([(40, 30)], 2), Adaptive(ranks=(2, 1), interval=5)

    def run(transport):
        compression = GradientCompression(adaptive, gradients.variables)
        step = tf.function(lambda g: compression.reduce([g], transport)[0])
        bad = tf.fill([40, 30], np.inf if transport.rank else 1.0)
        finite = []
        for level in range(5):
            compression._reducer._countdown.assign(100)
            compression._reducer._rows.assign([[level]] * MOST_ROWS)
            before = [v.numpy() for v in compression._states[0].values()]
            finite.append(bool(np.all(np.isfinite(step(bad)))))
            after = [v.numpy() for v in compression._states[0].values()]
            tf.nest.map_structure(np.testing.assert_array_equal, before, after)
            step(gradients.of(transport.rank, level)[0])
        return finite

    assert Meeting(2).run(run) == [[False] * 5] * 2


def test_what_was_left_out_is_sent_once_when_steps_are_exact_again():
    """Also if that step overflows: it is sent with the next one."""
    gradients = Gradients([(40, 30)], 2)

    def run(transport):
        compression = GradientCompression(Adaptive(ranks=(2, 1)), gradients.variables)
        step = tf.function(lambda g: compression.reduce([g], transport)[0])
        own = gradients.of(transport.rank, 0)[0]
        compression._reducer._countdown.assign(100)
        sums = []
        for level, gradient in [(2, own), (0, own + np.inf), (0, own), (0, own), (0, own)]:
            compression._reducer._rows.assign([[level]] * MOST_ROWS)
            sums.append(step(gradient).numpy())
        return own, sums, compression._states[0]["residual"].numpy()

    ranks = Meeting(2).run(run)
    exact = np.sum([own for own, *_ in ranks], 0)
    for _, (coarse, overflowed, first, *others), residual in ranks:
        assert np.max(np.abs(exact - coarse)) > 0.1 and not np.any(np.isfinite(overflowed))
        np.testing.assert_allclose(coarse + first, 2 * exact, atol=1e-5)
        for other in others:
            np.testing.assert_allclose(other, exact, atol=1e-6)
        assert not residual.any()


@pytest.mark.parametrize("levels", [*itertools.permutations(range(3))])
def test_buckets_of_any_levels_share_collectives_and_equal_fixed_compressors(levels):
    gradients = Gradients([(40, 30)] * 3, 2)
    fixed = [None, Cast("float16"), PowerSGD(2)]

    def run(transport):
        adaptive = GradientCompression(Adaptive(ranks=(2, 1)), gradients.variables, bucket_bytes=1)
        others = [each and GradientCompression(each, gradients.variables) for each in fixed]
        adaptive._reducer._countdown.assign(100)
        adaptive._reducer._rows.assign([levels] * MOST_ROWS)
        step = tf.function(lambda own: adaptive.reduce(own, transport))
        for number in range(3):
            own = gradients.of(transport.rank, number)
            if transport.rank == 0:
                meeting.sent.clear()
            sums = step(own)
            if transport.rank == 0:
                num_sums.append(len(meeting.sent))
            expected = [each.reduce(own, transport) if each else None for each in others]
            expected[0] = transport.all_reduce_sum(own)
            for bucket, level in enumerate(levels):
                position = adaptive._buckets[bucket][0]
                # Adaptive sends later what float16 leaves out.
                tolerance = {"rtol": 1e-2, "atol": 5e-3} if level == 1 else {"atol": 1e-5}
                np.testing.assert_allclose(
                    sums[position], expected[level][position], **tolerance, err_msg=str(level)
                )
        return [total.numpy() for total in sums]

    meeting, num_sums = Meeting(2), []
    first, second = meeting.run(run)
    assert num_sums == [3 + 1] * 3  # one for each bucket, and the last one's second round
    tf.nest.map_structure(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("threads", ["1", "8"])
def test_a_payload_is_weighed_by_itself_however_few_threads_there_are(threads):
    """One thread goes on to the next sum before it looks at the clock, if nothing is in its way."""
    done = subprocess.run(
        [sys.executable, "-m", weighing.__name__],
        env={**os.environ, "TF_NUM_INTEROP_THREADS": threads},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    trip_s, *payload_s = json.loads(done.stdout.splitlines()[-1])
    assert min(payload_s) >= weighing.PAYLOAD_S
    assert trip_s < sum(payload_s)


@pytest.mark.parametrize(("countdown", "is_timed"), [(100, False), (MEASURED_STEPS, True)])
def test_exact_steps_that_are_kept_are_those_without_compression(countdown, is_timed):
    """But for the last ones, which the controller asks about."""
    gradients = Gradients([(40, 30)] * 3, 2)

    def run(transport):
        adaptive = GradientCompression(Adaptive(ranks=(2, 1)), gradients.variables, bucket_bytes=1)
        reducer, own = adaptive._reducer, gradients.of(transport.rank, 0)
        reducer._countdown.assign(countdown)
        reducer._left.assign([False] * 3)
        step = tf.function(lambda: adaptive.reduce(own, transport)).get_concrete_function()
        # When gradients are ready is not asked in a branch, which begins with the first of them.
        assert [each.type for each in step.graph.get_operations()].count("Timestamp") == 3
        sums = step()
        assert reducer._countdown.numpy() == countdown - 1
        assert reducer._times_s.numpy().any() == is_timed
        return [sums, transport.all_reduce_sum(own)]

    for sums, expected in Meeting(2).run(run):
        tf.nest.map_structure(np.testing.assert_array_equal, sums, expected)


@pytest.mark.parametrize(("num_buckets", "is_apart"), [(1, True), (2, False)])
def test_what_a_kept_step_does_not_do_is_one_operation_unless_buckets_overlap(
    num_buckets, is_apart
):
    gradients = Gradients([(40, 30)] * num_buckets, 2)

    def run(transport):
        adaptive = GradientCompression(Adaptive(ranks=(2, 1)), gradients.variables, bucket_bytes=1)
        own = gradients.of(transport.rank, 0)
        step = tf.function(lambda: adaptive.reduce(own, transport)).get_concrete_function()
        (cond,) = [each for each in step.graph.get_operations() if each.type == "If"]
        library = step.graph.as_graph_def().library.function
        functions = {each.signature.name: each for each in library}
        branch = functions[cond.get_attr("else_branch").name]
        called = [
            functions[node.attr["f"].func.name] for node in branch.node_def if "f" in node.attr
        ]
        assert any(each.attr["_noinline"].b for each in called) is is_apart
        assert (len(branch.node_def) < 10) is is_apart
        return step()

    one, other = Meeting(2).run(run)
    tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    "options", [{"max_error": 1.0}, {"ranks": ()}, {"ranks": (2, 2)}, {"interval": 0}]
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(ValueError, match="Adaptive must be"):
        Adaptive(**options)
