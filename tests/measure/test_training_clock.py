"""The clock on hands that the tests turn."""

import threading

import pytest

from tfparallel.communication.link_times import LinkTimes
from tfparallel.measure.training_clock import Sources, TrainingClock


class Hands:
    """A clock whose time passes as told."""

    def __init__(self):
        self.now = self.python = self.waited = self.spent = 0.0
        self.traces = self.rows = 0

    def clock(self, splits_python=True):
        sources = Sources(
            links=lambda: LinkTimes(self.spent, 0.0, 0),
            traces=lambda: self.traces,
            waited_s=lambda: self.waited,
            rows=lambda: self.rows,
            splits_python=splits_python,
        )
        return TrainingClock(sources, lambda: self.now, lambda: self.python)

    def step(self, clock, seconds=1.0, python=0.0, waited=0.0, traces=0, spent=0.0, num=1):
        clock.begin_step()
        self.now += seconds
        self.python += python
        self.waited += waited
        self.traces += traces
        self.spent += spent
        self.rows += 4 * num
        clock.end_step(num)


def test_an_epoch():
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=5, python=4, traces=1)
    for _ in range(3):
        hands.step(clock, seconds=1, python=0.25, waited=0.5, spent=0.125)
    hands.now += 2
    epoch = clock.end_epoch()
    assert epoch.spent.wall_s == 10
    assert epoch.spent.steps_s == 8
    assert epoch.spent.tracing_s == 5 - (1 - 0.125)
    assert epoch.spent.python_s == 0.75
    assert epoch.spent.input_s == 1.5
    assert epoch.spent.linked_s == 0.375
    assert (epoch.traces, epoch.num_steps, epoch.rows) == (1, 4, 16)
    assert epoch.step_times().median == 1
    assert clock.end_epoch().spent.wall_s == 0


def test_steps_that_are_executed_together():
    """Each takes its part; how long tracing took is told of executions."""
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=12, python=8, traces=1, num=4)
    for seconds in (4, 4, 16, 4):
        hands.step(clock, seconds=seconds, num=4)
    epoch = clock.end_epoch()
    steps = epoch.step_times()
    assert (epoch.num_steps, epoch.rows) == (20, 80)
    assert (steps.median, steps.slowest, steps.slowest_step) == (1, 4, 8)
    assert (epoch.spent.steps_s, epoch.spent.tracing_s) == (40, 12 - 4)


def test_an_iterator_that_is_let_go_is_waited_for_as_input():
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=5, traces=1)
    clock.end_epoch()
    for waited in (3, 0.5):
        clock.begin_step()
        with clock.in_callback("another"):
            hands.now += 0.25
        hands.now += waited
        if waited == 3:
            clock.enter_first_step()
        hands.now += 1
        clock.end_step()
    spent = clock.end_epoch().spent
    assert spent.iterators_s == 3
    assert spent.steps_s == 1.25 + 1.75
    assert spent.callbacks_s == {"another": 0.5}


@pytest.mark.parametrize("between_s", [2**-14, 1])
def test_python_between_steps_is_not_python_of_a_step(between_s):
    """Of a short time between them, the thread's clock is not asked twice."""
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, traces=1)
    for _ in range(2):
        hands.now += between_s
        hands.python += between_s
        hands.step(clock, seconds=1, python=0.25)
    assert clock.end_epoch().spent.python_s == 0.5


def test_tracing_is_what_a_step_takes_longer_than_others():
    """Threads that the main one waits for count too; callbacks do not; alone, its own time does."""
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=9, python=2, traces=1)
    assert clock.so_far().tracing_s == 2
    hands.step(clock)
    clock.begin_step()
    hands.traces += 1
    hands.now += 5
    with clock.in_callback("Slow"):
        hands.now += 3
    clock.end_step()
    assert clock.so_far().tracing_s == 8 + 4
    assert clock.end_epoch().spent.tracing_s == 8 + 4


def test_waiting_within_a_step_that_traces_is_not_tracing():
    """Else the two are more than the step, and nothing is left for what others wait for."""
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=9, python=1, waited=3, spent=2, traces=1)
    hands.step(clock)
    hands.step(clock)
    spent = clock.end_epoch().spent
    assert (spent.input_s, spent.linked_s, spent.tracing_s) == (3, 2, 9 - 3 - 2 - 1)
    hands.step(clock, waited=0.5)
    hands.step(clock, seconds=9, python=1, waited=0.5, traces=1)
    assert clock.end_epoch().spent.tracing_s == 9 - 0.5 - 1


def test_the_slowest_step_says_why():
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, traces=1)
    for _ in range(5):
        hands.step(clock)
    hands.step(clock, seconds=9, waited=8)
    hands.step(clock)
    slowest = clock.end_epoch().step_times()
    assert (slowest.slowest, slowest.slowest_step, slowest.slowest_because) == (9, 5, "input")


def test_callbacks_within_and_outside_of_steps():
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, traces=1)
    clock.begin_step()
    with clock.in_callback("Outer"):
        hands.now += 2
        hands.python += 1
        with clock.in_callback("Inner"):  # is part of what the outer one takes
            hands.now += 1
    clock.end_step()
    with clock.in_callback("Outer"):
        hands.now += 4
    spent = clock.end_epoch().spent
    assert spent.callbacks_s == {"Outer": 3}
    assert spent.outside_s == {"Outer": 4}
    assert spent.python_s == 0


def test_callbacks_of_validation_and_of_other_threads_are_not_counted():
    hands = Hands()
    clock = hands.clock()

    def call():
        with clock.in_callback("A"):
            hands.now += 1

    other = threading.Thread(target=call)
    other.start()
    other.join()
    clock.begin_validation()
    call()
    clock.end_validation()
    spent = clock.end_epoch().spent
    assert spent.outside_s == {}
    assert spent.validation_s == 1


def test_letting_go_of_the_iterator_of_validation_belongs_to_it():
    hands = Hands()
    clock = hands.clock()
    clock.begin_validation()
    hands.now += 2
    clock.end_validation()
    hands.now += 0.5
    with clock.in_callback("A"):
        hands.now += 1
    hands.now += 4
    spent = clock.end_epoch().spent
    assert (spent.validation_s, spent.outside_s) == (2.5, {"A": 1})


def test_a_step_that_was_none_is_forgotten():
    hands = Hands()
    clock = hands.clock()
    clock.begin_step()
    hands.now += 1
    clock.forget_step()
    assert clock.end_epoch().num_steps == 0


@pytest.mark.parametrize("splits", [True, False])
def test_python_of_a_step_that_computes_on_the_main_thread(splits):
    hands = Hands()
    clock = hands.clock(splits)
    hands.step(clock, traces=1)
    hands.step(clock, python=0.5)
    assert clock.end_epoch().spent.python_s == (0.5 if splits else 0)


def test_many_steps_between_two_looks_at_an_epoch():
    """They are added up together now and then: all count, whenever somebody looks."""
    hands = Hands()
    clock = hands.clock()
    hands.step(clock, seconds=5, python=4, traces=1)
    for number in range(1, 200):
        hands.step(clock, seconds=1, python=0.25, spent=0.125)
        if number in (1, 63, 130):
            assert clock.so_far().steps_s == 5 + number
            assert clock.so_far().linked_s == number * 0.125
    epoch = clock.end_epoch()
    assert (epoch.num_steps, epoch.rows) == (200, 800)
    assert (epoch.spent.python_s, epoch.spent.tracing_s) == (199 * 0.25, 5 - (1 - 0.125))
    hands.step(clock)
    assert clock.end_epoch().num_steps == 1
