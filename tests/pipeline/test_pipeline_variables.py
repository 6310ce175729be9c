"""PipelineStrategy: what a step reads of the optimizer's own numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiny_compile_options, tiny_data
from tests.strategies.test_pipeline import CPUS, deep_model
from tfparallel import PipelineStrategy


def traced_step(strategy, model):
    """The graph of a training step of `model`."""
    x, y = (tf.constant(array) for array in tiny_data(8))
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, y, None))
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)))
        return step.get_concrete_function(x, y).graph


def reads_of(graph, variable):
    """How often a graph reads a Keras variable."""
    handle = variable.value.values[0].handle
    (inner,) = [inner for outer, inner in graph.captures if outer is handle]
    return sum(op.type == "ReadVariableOp" for op in inner.consumers())


@pytest.mark.turns
def test_what_all_updates_need_is_read_once_and_again_after_it_has_changed():
    """Each reading would be sent by itself to the process of another stage."""
    strategy = PipelineStrategy(CPUS[:2], 2)
    with strategy.scope():
        model = deep_model()
        model.compile(keras.optimizers.Adam(0.01), **tiny_compile_options())
    graph = traced_step(strategy, model)
    assert len(model.trainable_variables) == 14
    assert reads_of(graph, model.optimizer.learning_rate) == 1
    assert reads_of(graph, model.optimizer.iterations) <= 2  # the increment may read it again


class TwoFaced(keras.optimizers.SGD):
    """Changes its learning rate in the middle of a step, in a branch."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        rate = self._learning_rate
        keras.ops.cond(
            keras.ops.equal(self.iterations % 2, 1),
            lambda: rate.assign(rate * 10.0),
            lambda: rate.assign(rate * 0.1),
        )
        super().apply(grads, trainable_variables)


def test_a_number_that_changes_within_a_step_is_read_anew():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = deep_model()
            model.compile(TwoFaced(0.01), **tiny_compile_options())
        model.fit(*tiny_data(24), batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    ours, theirs = trained(PipelineStrategy(CPUS[:2], 2)), trained(tf.distribute.get_strategy())
    assert max(abs(a - b).max() for a, b in zip(ours, theirs)) < 1e-5


def test_models_that_share_layers_read_them_where_they_have_moved_to():
    """`predict` of a part is traced when that is divided by itself, before the whole is."""
    strategy, x = PipelineStrategy(CPUS[:2], 2), np.ones((8, 4), "float32")
    with strategy.scope():
        last = keras.layers.Dense(5)
        generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), last])
        # The second is slower than all others together, however they are measured.
        slow = [keras.layers.Dense(3000), keras.layers.Dense(3000), keras.layers.Dense(1)]
        whole = keras.Sequential([generator, *slow])
        whole.compile(keras.optimizers.SGD(0.1), "mse")
    generator.predict(x, verbose=0)
    before = last.kernel.value.values[0].device
    whole.train_on_batch(x, np.ones((8, 1)))
    assert last.kernel.value.values[0].device != before
    received = generator.predict(x, verbose=0)
    np.testing.assert_allclose(received, generator(x), rtol=1e-5, atol=1e-6)


def test_a_function_that_was_traced_before_variables_moved_fails():
    """It would go on with the values of then."""
    strategy, (x, y) = PipelineStrategy(CPUS[:2], 2), tiny_data(8)
    with strategy.scope():
        model = deep_model()
        model.compile(keras.optimizers.SGD(0.1), **tiny_compile_options())
    early, late = tf.function(lambda rows: model(rows)), tf.function(lambda rows: model(rows))
    early(tf.constant(x))
    model.fit(x, y, batch_size=8, verbose=0)
    with pytest.raises(tf.errors.OpError):
        early(tf.constant(x))
    np.testing.assert_allclose(late(tf.constant(x)), model(x), rtol=1e-5, atol=1e-6)
