"""A graph has equal small constants once, where nobody can tell."""

import threading

import pytest
import tensorflow as tf

from tfparallel.internals.shared_constants import constants_shared


def constants(body, *specs):
    """The constants of the function of `body`, traced with constants shared."""

    def function(*tensors):
        with constants_shared(tf.compat.v1.get_default_graph()):
            return body(*tensors)

    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return [operation for operation in graph.get_operations() if operation.type == "Const"]


VECTOR = tf.TensorSpec([4], tf.float32)


def test_integers_are_made_once():
    made = constants(lambda: tf.constant([2, 3]) + tf.constant([2, 3]) + tf.constant([3, 2]))
    assert len(made) == 2


def test_numbers_that_operations_take_are_made_once():
    assert len(constants(lambda x: (x * 0.5 + 0.5) ** 0.5, VECTOR)) == 1
    assert len(constants(lambda x: tf.maximum(tf.nn.relu(x) * 0.5, 0.5), VECTOR)) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, tf.constant(1, tf.int64).numpy()),  # of another type
        (tf.range(17).numpy(), tf.range(17).numpy()),  # large
        ([[1, 2]], [[1, 2]]),  # of two dims
        ("a", "a"),
        (True, True),
    ],
)
def test_others_are_made_apart(first, second):
    assert len(constants(lambda: (tf.constant(first), tf.constant(second)))) == 2


@pytest.mark.parametrize("value", [3, 0.1])
def test_equal_tensors_from_outside_are_inputs_of_their_own(value):
    """TensorFlow refuses a function that has one tensor twice among its inputs."""
    first, second = tf.constant(value), tf.constant(value)

    @tf.function(autograph=False)
    def function(x):
        with constants_shared(tf.compat.v1.get_default_graph()):
            return first * x + value * second

    assert function(tf.ones([4], first.dtype)).numpy() == pytest.approx(value + value**2)


def test_numbers_that_differ_in_their_sign_alone_are_apart():
    assert len(constants(lambda x: (x * 0.0, x * -0.0), VECTOR)) == 2


def test_each_device_has_its_own():
    def body():
        values = []
        for device in ("CPU:0", "CPU:1", "CPU:1"):
            with tf.device(device):
                values.append(tf.constant(7) + tf.constant(7))
        return values

    assert [operation.device for operation in constants(body)] == ["/device:CPU:0", "/device:CPU:1"]


def test_one_of_a_device_within_another_is_that_of_both():
    def body():
        with tf.device("/job:localhost/task:0"), tf.device("CPU:1"):
            within = tf.constant(7)
        with tf.device("/job:localhost/task:0/device:CPU:1"):
            return within, tf.constant(7)

    assert len(constants(body)) == 1


def test_what_waits_for_something_is_given_to_what_waits_for_that():
    def body(x):
        printed = [tf.print(x), tf.print(x)]
        values = [tf.constant(7)]
        for before in (printed[:1], printed, printed[::-1]):
            with tf.control_dependencies(before):
                values.append(tf.constant(7))
        return [*values, tf.constant(7)]

    assert [len(each.control_inputs) for each in constants(body, VECTOR)] == [0, 1, 2]


def test_other_threads_find_them():
    def body():
        graph, found = tf.compat.v1.get_default_graph(), [tf.constant(7)]

        def ask():
            with graph.as_default():
                found.append(tf.constant(7))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return found

    assert len(constants(body)) == 1


def test_branches_and_functions_have_their_own():
    def body(x):
        inner = tf.function(lambda: tf.constant(7), autograph=False)
        branch = tf.cond(x[0] > 0, lambda: tf.constant(7), lambda: tf.constant(8))
        return tf.constant(7) + inner() + branch

    tf.debugging.assert_equal(tf.function(body)(tf.ones([4])), 21)
    assert len([each for each in constants(body, VECTOR) if each.outputs[0].dtype == tf.int32]) < 4


def test_equal_numbers_that_a_tape_watches_have_gradients_of_their_own():
    @tf.function(autograph=False)
    def function():
        with constants_shared(tf.compat.v1.get_default_graph()), tf.GradientTape() as tape:
            x, y = tf.constant(1.0), tf.convert_to_tensor(1.0)
            tape.watch([x, y])
            loss = x * 1.0 + 3.0 * y
        return tape.gradient(loss, [x, y])

    assert [gradient.numpy() for gradient in function()] == [1, 3]


def test_behind_it_all_is_as_ever():
    def body():
        graph = tf.compat.v1.get_default_graph()
        with pytest.raises(KeyError), constants_shared(graph):
            raise KeyError
        return tf.constant(7), tf.constant(7)

    graph = tf.function(body, autograph=False).get_concrete_function().graph
    assert len(graph.get_operations()) >= 4


def test_within_it_once_more_nothing_changes():
    def body():
        graph, first = tf.compat.v1.get_default_graph(), tf.constant(7)
        with constants_shared(graph):
            second = tf.constant(7)
        return first, second, tf.constant(7)

    assert len(constants(body)) == 1


def test_what_is_no_graph_of_a_function_is_left_alone():
    with tf.Graph().as_default() as graph, constants_shared(graph):
        assert tf.constant(7) is not tf.constant(7)
