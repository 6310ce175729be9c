"""What a traced step would give, without a run of it."""

import tensorflow as tf

from tfparallel.internals.graphs import FuncGraph
from tfparallel.internals.traced_values import computed_from, draws_otherwise, read_as_assigned


def test_what_is_read_behind_an_assignment_is_what_is_assigned():
    variable = tf.Variable(2.0)
    graph = FuncGraph("step")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        variable.assign(3 * x + variable)
        variable.assign_add(x)
        variable.assign_sub(1.0)
        value = tf.square(variable.read_value())
    read_as_assigned(graph, graph.get_operations())
    compute = computed_from(graph, [x], value)
    assert compute([tf.constant(5.0)]).numpy() == (3 * 5 + 2 + 5 - 1) ** 2
    assert variable.numpy() == 2.0


def test_what_a_call_gives_is_given_at_each_call():
    """As keys of collectives are."""
    graph, keys = FuncGraph("step"), iter((2.0, 3.0))
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None])
        key = graph.capture_call_time_value(lambda: next(keys), tf.TensorSpec([], tf.float32))
        compute = computed_from(graph, [x], x * key)
    assert [compute([tf.ones([1])]).numpy().tolist() for _ in range(2)] == [[2.0], [3.0]]


def test_which_numbers_are_left_to_chance():
    def drawn(draw):
        with FuncGraph("step").as_default():
            return draws_otherwise(tf.square(draw()))

    assert not drawn(lambda: tf.random.uniform([3]))
    assert not drawn(lambda: tf.random.stateless_normal([3], [1, 2]))
    assert not drawn(lambda: tf.constant(1.0))
    assert drawn(lambda: tf.random.shuffle(tf.ones(3)))
    assert drawn(lambda: tf.random.uniform([3], 0, 5, tf.int32))
    assert drawn(lambda: tf.map_fn(lambda x: x * tf.random.normal([]), tf.ones(3)))
