"""Adaptive compression: decisions as tables, then decisions that ranks take together."""

import itertools
import re
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.communication.compression.ranks import Gradients, Meeting, ThreadTransport
from tfparallel.communication.compression import adaptive_plan
from tfparallel.communication.compression.adaptive_plan import (
    MEASURED_STEPS,
    TURNS,
    Controller,
    Measurement,
    choose_levels,
    finish_time_s,
)
from tfparallel.compression import Adaptive, Cast, GradientCompression, PowerSGD

EXACT, HALF, COARSE = 0, 1, 2


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
        # Nothing hides.
        ([0, 0], [[10, 5, 1]] * 2, [COARSE, COARSE]),
        # Nor is float16 good enough where it is nothing beside an exact step.
        ([0, 0], [[5, 0.2, 0.01]] * 2, [COARSE, COARSE]),
    ],
)
def test_levels_are_as_exact_as_hides(ready, durations, levels):
    errors = np.array([[0, 1e-4, 0.5]] * 2)
    assert choose_levels(ready, np.array(durations), errors, 0.6, step_s=10) == levels


def test_errors_above_the_bound_are_not_chosen():
    durations, errors = np.array([[10, 5, 1]] * 2), np.array([[0, 1e-4, 0.7], [0, 1e-4, 0.5]])
    assert choose_levels([0, 0], durations, errors, 0.6, step_s=1) == [HALF, COARSE]
    assert choose_levels([0, 0], durations, errors, 0.0, step_s=1) == [EXACT, EXACT]


def test_a_duration_is_that_of_the_rank_that_came_last():
    measurement = Measurement(
        ready_s=np.array([[0.0, 1.0], [100.5, 103.0]]),  # clocks differ
        done_s=np.array([[2.0, 5.0], [102.5, 105.0]]),
        errors=np.zeros((2, 2, 3)),
    )
    np.testing.assert_allclose(measurement.durations_s(), [2.0, 2.0])
    np.testing.assert_allclose(measurement.offsets_s(), [0.0, 2.5])


def test_buckets_that_are_done_out_of_order_take_no_time_of_their_own():
    measurement = Measurement(np.array([[0.0, 1.0]]), np.array([[5.0, 4.0]]), np.zeros((1, 2, 3)))
    np.testing.assert_allclose(measurement.durations_s(), [5.0, 0.0])


@pytest.mark.parametrize(("half_bytes", "level"), [(0.0, HALF), (0.5, COARSE)])
def test_a_level_takes_the_time_that_its_bytes_need(half_bytes, level):
    """Half's second bucket seems to take none, as the first one is done later."""
    plan = Controller(2, ["exact", "half", "coarse"], [0, 1, 2], 3, max_error=0.6, interval=10)
    plan.bytes_shares = np.array([[1.0, half_bytes, 0.01]] * 2)
    done_s = {EXACT: [10.0, 20.0], HALF: [10.0, 9.0], COARSE: [0.5, 1.0], 3: [0.6, 1.2]}
    levels, _ = plan.advance(Measurement(np.zeros((1, 2)), np.ones((1, 2)), np.zeros((1, 2, 3))))
    now_s = 10.0
    for _ in range(3 * MEASURED_STEPS + 1):
        ready_s, done = np.full((1, 2), now_s), now_s + np.array([done_s[levels[0]]])
        errors, now_s = np.tile([0, 1e-4, 0.3], (1, 2, 1)), done[0, -1]
        levels, _ = plan.advance(Measurement(ready_s, done, errors))
    assert levels == [COARSE, level]


def drive(controller, durations_of, error, steps, mixing_s=0.0):
    """Runs `controller` on two buckets that take `durations_of(level)`; returns levels by step.

    A step with two levels takes `mixing_s` longer than forecast.
    """
    levels, now, countdown, taken = [0, 0], 0.0, 1, []
    for _ in range(steps):
        now, taken = now + mixing_s * (levels[0] != levels[1]), [*taken, levels]
        ready = np.array([now, now + 1])
        done = [ready[0] + durations_of(levels[0])]
        done.append(max(done[0], ready[1]) + durations_of(levels[1]))
        now, countdown = done[1] + 3.0, countdown - 1
        if countdown == 0:
            errors = np.tile([0, 1e-4, error, error + 0.2], (1, 2, 1))
            measurement = Measurement(ready[np.newaxis], np.array([done]), errors)
            levels, countdown = controller.advance(measurement)
    return taken


def controller():
    names, measured = ["exact", "half", "four", "one"], [0, 1, 2, 3]
    return Controller(2, names, measured, probe=4, max_error=0.6, interval=10)


def test_it_measures_then_decides_then_looks_again():
    plan = controller()
    times = {0: 10.0, 1: 5.0, 2: 0.5, 3: 0.4, 4: 0.6}
    taken = drive(plan, times.get, 0.3, 40)
    measuring = [[level] * 2 for level in (0, 1, 2, 3) for _ in range(MEASURED_STEPS)]
    first = 1 + len(measuring) + 1
    assert taken[:first] == [[0, 0], *measuring, [4, 4]]
    assert taken[first : first + 10] == [[2, 2]] * 10  # within 3 % of the fastest, and more exact
    assert taken[first + 10] == [4, 4]  # only one probing step: times are as expected
    assert taken[first + 11 : first + 21] == [[2, 2]] * 10
    assert "bucket 1 is sent as four" in plan.log[1]


@pytest.mark.parametrize(("mixing_s", "decided"), [(0.0, [0, 3]), (0.5, [3, 3])])
def test_a_plan_of_several_levels_stays_if_its_steps_are_as_fast(mixing_s, decided):
    """The first bucket hides behind the second's computation, so says the plan."""
    plan, times = controller(), {0: 1.0, 1: 0.9, 2: 0.8, 3: 0.1, 4: 0.1}
    taken = drive(plan, times.get, 0.3, 40, mixing_s)
    first = 1 + 4 * MEASURED_STEPS + 1
    turns = [[0, 3], [3, 3]] * TURNS
    assert taken[first : first + len(turns) + 10] == turns + [decided] * 10
    assert ("exact, one took 4600.0 ms a step, not 4100.0 ms" in plan.log[0]) == (mixing_s > 0)


def test_a_step_lasts_until_the_bucket_that_is_done_last():
    """Of the planned step the second bucket is done first, and the step is slower than forecast."""
    plan = Controller(2, ["exact", "coarse"], [0, 1], probe=2, max_error=0.6, interval=10)
    done_s = {(0, 0): [3.0, 4.0], (1, 1): [5.0, 5.1], (0, 1): [6.0, 1.0], (2, 2): [5.0, 5.1]}
    levels, now_s, taken = [0, 0], 0.0, []
    for _ in range(1 + 2 * MEASURED_STEPS + 1 + 2 * TURNS):
        done, errors = now_s + np.array([done_s[tuple(levels)]]), np.tile([0, 0.3], (1, 2, 1))
        levels, _ = plan.advance(Measurement(np.full((1, 2), now_s), done, errors))
        now_s, taken = np.max(done), [*taken, levels]
    assert [0, 1] in taken and taken[-1] == [0, 0]


def test_it_measures_again_when_times_change():
    plan = controller()
    times = {0: 10.0, 1: 5.0, 2: 0.5, 3: 0.4, 4: 0.6}
    drive(plan, times.get, 0.3, 1 + 4 * MEASURED_STEPS + 1)
    fast = {0: 0.01, 1: 0.02, 2: 0.05, 3: 0.04, 4: 0.06}
    levels, countdown = plan.advance(
        Measurement(np.array([[0.0, 1.0]]), np.array([[0.05, 1.05]]), np.zeros((1, 2, 4)))
    )
    assert (levels, countdown) == ([0, 0], 1)
    assert "measures" in plan.log[-1]
    now_s = 2.0
    for _ in range(4 * MEASURED_STEPS + 1):
        ready, time_s = now_s + np.array([[0.0, 1.0]]), fast[levels[0]]
        errors, now_s = np.tile([0, 1e-4, 0.3, 0.5], (1, 2, 1)), now_s + 2
        levels, countdown = plan.advance(Measurement(ready, ready + time_s, errors))
    assert levels == [0, 0] and countdown == 10


class SlowTransport(ThreadTransport):
    """A network of a few bytes a second."""

    def _collective(self, kind, tensors, combine, shapes=None):
        size = tf.add_n([tf.size(tensor) * tensor.dtype.size for tensor in tensors])
        wait = tf.numpy_function(lambda n: np.int32(time.sleep(n / 1e6) or 0), [size], tf.int32)
        with tf.control_dependencies([wait]):
            tensors = [tf.identity(tensor) for tensor in tensors]
        return super()._collective(kind, tensors, combine, shapes)


def train(compression, gradient, transport, steps):
    step = tf.function(lambda: compression.reduce([gradient(transport.rank)], transport))
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
        steps = 1 + 4 * MEASURED_STEPS + 1 + 2 * TURNS + 1
        total = train(compression, low_rank_gradient, transport, steps)
        return total, compression.report(2), compression._reducer._levels.numpy().tolist()

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
    np.testing.assert_allclose(errors[3:], best, rtol=0.3)


def test_an_overflow_is_seen_at_every_level():
    gradients, adaptive = Gradients([(40, 30)], 2), Adaptive(ranks=(2, 1), interval=5)

    def run(transport):
        compression = GradientCompression(adaptive, gradients.variables)
        step = tf.function(lambda g: compression.reduce([g], transport)[0])
        bad = tf.fill([40, 30], np.inf if transport.rank else 1.0)
        finite = []
        for level in range(5):
            compression._reducer._countdown.assign(100)
            compression._reducer._levels.assign([level])
            before = [v.numpy() for v in compression._states[0].values()]
            finite.append(bool(np.all(np.isfinite(step(bad)))))
            after = [v.numpy() for v in compression._states[0].values()]
            tf.nest.map_structure(np.testing.assert_array_equal, before, after)
            step(gradients.of(transport.rank, level)[0])
        return finite

    assert Meeting(2).run(run) == [[False] * 5] * 2


@pytest.mark.parametrize("levels", [*itertools.permutations(range(3))])
def test_buckets_of_any_levels_share_collectives_and_equal_fixed_compressors(levels):
    gradients = Gradients([(40, 30)] * 3, 2)
    fixed = [None, Cast("float16"), PowerSGD(2)]

    def run(transport):
        adaptive = GradientCompression(Adaptive(ranks=(2, 1)), gradients.variables, bucket_bytes=1)
        others = [each and GradientCompression(each, gradients.variables) for each in fixed]
        adaptive._reducer._countdown.assign(100)
        adaptive._reducer._levels.assign(levels)
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
    # One for each bucket, the last one's second round, and that of float16.
    assert num_sums == [3 + 1 + 1] * 3
    tf.nest.map_structure(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    "options", [{"max_error": 1.0}, {"ranks": ()}, {"ranks": (2, 2)}, {"interval": 0}]
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(ValueError, match="Adaptive must be"):
        Adaptive(**options)
