"""What those who use a strategy for the first time get wrong, or expect."""

import inspect

import pytest
import tensorflow as tf

import tfparallel


def test_an_unknown_keyword_is_told_what_it_may_have_meant():
    with pytest.raises(
        TypeError, match="no argument 'microbatches'. Did you mean 'num_microbatches'"
    ):
        tfparallel.PipelineStrategy(2, microbatches=4)
    with pytest.raises(TypeError, match="Its arguments are devices, cross_device_ops"):
        tfparallel.MirroredStrategy(xyz=1)


def test_help_shows_the_arguments():
    assert list(inspect.signature(tfparallel.MirroredStrategy).parameters) == [
        "devices",
        "cross_device_ops",
        "memory",
    ]


def test_an_unknown_name_is_told_what_it_may_have_meant():
    with pytest.raises(AttributeError, match="Did you mean 'MirroredStrategy'"):
        tfparallel.MirrorStrategy  # noqa: B018


def test_a_strategy_says_what_it_is():
    pipeline = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4)
    assert repr(pipeline) == (
        "PipelineStrategy(num_stages=2, num_microbatches=4, devices=['CPU:0', 'CPU:1'])"
    )
    assert (pipeline.rank, pipeline.num_workers, pipeline.is_chief) == (0, 1, True)


@pytest.mark.parametrize("outer", [tfparallel.MirroredStrategy, tf.distribute.MirroredStrategy])
def test_a_scope_in_a_scope_is_refused_by_name(outer):
    outer, inner = outer(["CPU:0"]), tfparallel.OneDeviceStrategy("CPU:0")
    with (
        outer.scope(),
        pytest.raises(RuntimeError, match="scope of OneDeviceStrategy.* inside of that of"),
        inner.scope(),
    ):
        pass
    with inner.scope(), inner.scope():  # one strategy's scope may be entered again
        assert tf.distribute.get_strategy() is inner


def test_a_step_of_keras_2_is_refused():
    def run_step(data):
        return data

    run_step.__module__ = "tf_keras.src.engine.training"
    with pytest.raises(RuntimeError, match="Unset TF_USE_LEGACY_KERAS"):
        tfparallel.OneDeviceStrategy("CPU:0").run(run_step, (1,))
    with pytest.raises(RuntimeError, match="Unset TF_USE_LEGACY_KERAS"):
        tfparallel.OneDeviceStrategy("CPU:0").run(tf.function(run_step), (1,))
