"""A stage's passes: the gradients of TensorFlow, from what the forward pass has kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.segments.segment_function import StageFunction
from tfparallel.segments.stash import Stash

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
WEIGHT = tf.Variable([[0.5, -1.0, 2.0], [0.25, 1.5, -0.5]])
SQUARE = tf.Variable([[0.5, 0.1], [0.2, -0.5], [0.3, 0.4]])
TABLE = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))


def dense(x):
    return [tf.nn.relu(x @ WEIGHT), tf.reduce_sum(x)]


def embedding(x):
    rows = tf.gather(TABLE, tf.cast(tf.abs(x[:, 0]), tf.int32) % 4)
    return [rows * x @ WEIGHT]


def loop(x):
    for _ in tf.range(3):
        x = tf.tanh(x @ WEIGHT @ tf.transpose(WEIGHT))
    return [x]


def branches(x):
    return [tf.cond(tf.reduce_sum(x) > 0, lambda: x @ WEIGHT, lambda: x @ WEIGHT * 3.0)]


def with_integers(x):
    return [tf.argmax(x, 1), x**3 @ WEIGHT]


def of_logits(x):
    return [tf.nn.sigmoid_cross_entropy_with_logits(tf.nn.sigmoid(x @ SQUARE[:2]), x @ SQUARE[:2])]


COMPUTATIONS = [dense, embedding, loop, branches, with_integers, of_logits]
RECOMPUTES = {"kept": lambda op: False, "recomputed": lambda op: True}


@pytest.mark.parametrize("passes", ["backward", "backward_halves"])
@pytest.mark.parametrize("recomputes", RECOMPUTES.values(), ids=RECOMPUTES)
@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_gradients_are_those_of_one_function(computation, recomputes, passes):
    x = tf.constant([[1.0, 2.0], [-3.0, 0.5], [2.0, 2.0]])
    variables = [WEIGHT, TABLE]

    def loss_of(outputs):
        return tf.add_n([tf.reduce_sum(y**2) for y in outputs if y.dtype.is_floating])

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(tf.function(computation)(x))
    expected = tape.gradient(loss, [x, *variables])

    @tf.function
    def step(x):
        concrete = tf.function(computation).get_concrete_function(x)
        arguments = [x, *concrete.captured_inputs]
        function = StageFunction("stage", concrete, [True] * len(arguments), recomputes)
        outputs, stash = function.forward(DEVICE, arguments)
        dys = [2 * y if y.dtype.is_floating else None for y in outputs]
        gradients, _ = getattr(function, passes)(DEVICE, arguments, stash, dys)
        handles = {id(a): g for a, g in zip(arguments, gradients)}
        weights = [handles.get(id(variable.handle)) for variable in variables]
        return [tf.convert_to_tensor(g) for g in [gradients[0], *weights] if g is not None]

    expected = [tf.convert_to_tensor(g) for g in expected if g is not None]
    received = step(x)
    assert len(received) == len(expected)
    for ours, theirs in zip(received, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_only_wanted_gradients_are_computed():
    """The first stage's inputs are data: a gradient of them is wasted work."""

    @tf.function
    def step(x):
        concrete = tf.function(dense).get_concrete_function(x)
        arguments = [x, *concrete.captured_inputs]
        function = StageFunction("stage", concrete, [False, True])
        outputs, stash = function.forward(DEVICE, arguments)
        gradients, _ = function.backward(DEVICE, arguments, stash, outputs)
        assert gradients[0] is None and gradients[1].shape == WEIGHT.shape
        return gradients[1]

    definitions = step.get_concrete_function(tf.TensorSpec([2, 2])).graph.as_graph_def().library
    (backward,) = [f for f in definitions.function if "backward_body" in f.signature.name]
    assert [node.op for node in backward.node_def].count("MatMul") == 1


def test_no_half_repeats_the_work_of_the_other():
    """Two products of matrices for each layer: one for its input, one for its weight."""

    def layers(x):
        for _ in range(3):
            x = tf.tanh(x @ WEIGHT @ SQUARE)
        return [x]

    @tf.function
    def step(x):
        concrete = tf.function(layers).get_concrete_function(x)
        arguments = [x, *concrete.captured_inputs]
        function = StageFunction("stage", concrete, [True] * len(arguments))
        outputs, stash = function.forward(DEVICE, arguments)
        gradients, calls = function.backward_halves(DEVICE, arguments, stash, outputs)
        assert [*calls] == ["backward_input", "backward_weight"]
        return gradients

    definitions = step.get_concrete_function(tf.TensorSpec([4, 2])).graph.as_graph_def().library
    for half in ("backward_input_body", "backward_weight_body"):
        (body,) = [f for f in definitions.function if half in f.signature.name]
        assert [node.op for node in body.node_def].count("MatMul") == 6, half


@pytest.mark.parametrize("recomputes", RECOMPUTES.values(), ids=RECOMPUTES)
def test_what_is_computed_again_is_not_kept(recomputes):
    """Of a chain of layers the input is kept, the random numbers, and weights where they are."""

    @tf.function
    def chain(x):
        for _ in range(3):
            x = tf.nn.dropout(tf.tanh(x @ WEIGHT @ tf.transpose(WEIGHT)), 0.5)
        return [x]

    concrete = chain.get_concrete_function(tf.TensorSpec([7, 2]))
    watched = [True] * len(concrete.inputs)
    function = StageFunction("stage", concrete, watched, recomputes)
    kinds = {x.op.type for x in function.kept}
    if recomputes(None):
        assert kinds == {"Placeholder", "ReadVariableOp", "RandomUniform"}
    else:
        assert {"Tanh", "MatMul"} <= kinds
    is_weight = [x.op.type == "ReadVariableOp" for x in function.kept]
    assert is_weight == sorted(is_weight) and any(is_weight)


def test_integers_are_computed_again_and_not_kept():
    """Sizes, shapes and indices of a batch of any size: a GPU would send each to the host."""

    @tf.function
    def rows(x, tokens):
        size = tf.shape(x)[0] * tf.size(x)
        picked = tf.gather(x, tf.range(tf.shape(x)[0]) // 2)
        found = tf.gather(TABLE, tokens + 1)
        return [tf.reshape(picked, [-1]) * found[:, 0] / tf.cast(size, tf.float32), x**2]

    specs = tf.TensorSpec([None, 1]), tf.TensorSpec([None], tf.int32)
    concrete = rows.get_concrete_function(*specs)
    function = StageFunction("stage", concrete, [True] * len(concrete.inputs))
    integers = [x for x in function.kept if x.dtype == tf.int32]
    assert {x.op.type for x in integers} <= {"Placeholder"}
    assert any(x.dtype.is_floating for x in function.kept)


@pytest.mark.parametrize("rows", [4, None])
def test_what_is_compared_is_compared_again(rows):
    """A loss of logits keeps nothing but floats; Dropout which of its random numbers are large."""

    def kept_by(computation):
        specs = tf.TensorSpec([rows, 2]), tf.TensorSpec([rows, 2])
        concrete = tf.function(computation).get_concrete_function(*specs)
        function = StageFunction("stage", concrete, [True] * len(concrete.inputs))
        return [x.dtype for x in function.kept]

    of_logits = kept_by(lambda x, y: [tf.nn.sigmoid_cross_entropy_with_logits(y, x)])
    assert of_logits and set(of_logits) == {tf.float32}
    assert tf.bool in kept_by(lambda x, y: [tf.nn.dropout(x * y, 0.5)])


def test_a_loop_keeps_nothing_for_a_gradient_that_nobody_wants():
    """An RNN's data has none; for it each turn would keep three int32: its number, of the data's
    list the length and the shape."""
    layer = keras.layers.SimpleRNN(3)
    layer.build([2, 5, 4])

    def lists_of_the_loop(is_wanted):
        concrete = tf.function(lambda x: [layer(x)]).get_concrete_function(tf.TensorSpec([2, 5, 4]))
        StageFunction("stage", concrete, [is_wanted, *[True] * len(concrete.captured_inputs)])
        (loop,) = [op for op in concrete.graph.get_operations() if op.type == "While"]
        assert not hasattr(loop, "skip_input_indices")  # a hint for that gradient alone
        return sum(x.dtype == tf.variant for x in loop.outputs)

    assert lists_of_the_loop(False) == lists_of_the_loop(True) - 3


def test_a_stash_gives_back_what_it_is_given():
    tensors = [
        tf.constant([[1.0, 2.0]]),
        tf.constant(3),
        tf.constant([True, False]),
        tf.constant(4.0),
        tf.zeros([0, 3]),
        tf.constant(["a", "b"]),
    ]

    @tf.function
    def there_and_back():
        stash = Stash(tensors)
        packed = stash.pack(tensors)
        assert len(packed) == 1
        return stash.unpack(packed)

    for before, after in zip(tensors, there_and_back()):
        assert before.shape == after.shape
        np.testing.assert_array_equal(before, after)
