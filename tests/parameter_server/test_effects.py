"""What a step on behalf of a worker would change is written down, of what is always done alone."""

import pytest
import tensorflow as tf

from tfparallel.parameter_server.effects import Effects


def _assigned(effects, variable, value):
    return effects.assign(variable, value, variable.read_value)


def _added(effects, variable, value):
    return effects.assign_add(variable, value, variable.read_value)


def _applied(effects, variable, value):
    effects.defer("optimizer 'sgd', applied", [value], [variable.device], variable.assign_sub)
    return value


@pytest.mark.parametrize("change", [_assigned, _added, _applied])
def test_a_change_that_a_branch_may_leave_out_is_refused(change):
    """Also of a value from outside of the branch, which is none of the branch's tensors."""
    effects, variable = Effects(), tf.Variable(1.0)

    @tf.function(autograph=False)
    def step(value):
        with effects.recording():
            tf.cond(value > 0, lambda: change(effects, variable, value), lambda: value)

    with pytest.raises(NotImplementedError, match="(variable|optimizer) .* inside of one"):
        step(tf.constant(2.0))
    assert not effects.effects


@pytest.mark.parametrize("change", [_assigned, _added, _applied])
def test_what_a_step_always_changes_is_written_down(change):
    effects, variable = Effects(), tf.Variable(1.0)

    @tf.function(autograph=False)
    def step(value):
        with effects.recording():
            change(effects, variable, value)

    step(tf.constant(2.0))
    assert len(effects.effects) == 1


def test_a_read_after_an_update_is_warned_of_once_and_one_before_it_is_not(recwarn):
    effects, first, second = Effects(), tf.Variable(1.0), tf.Variable(1.0)
    effects.warn_of_update(first)
    effects.update([first, second], "sgd")
    effects.warn_of_update(tf.Variable(1.0))
    assert not recwarn.list
    for variable in (first, second, first):
        effects.warn_of_update(variable)
    (told,) = recwarn.list
    assert "after optimizer 'sgd' was applied" in str(told.message)
