"""What layers cost: timed on a device that may be asynchronous, with what a cut would send."""

import time
import weakref
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfparallel.internals import set_keras_mask
from tfparallel.pipeline import link_speed, profile, timed_calls
from tfparallel.pipeline.crossing_bytes import CrossingBytes
from tfparallel.pipeline.parts import find_parts
from tfparallel.pipeline.plans.partition import balanced_cuts
from tfparallel.pipeline.profile import profile_parts
from tfparallel.pipeline.stage_scope import Placement
from tfparallel.pipeline.stages import Budget, divide
from tfparallel.pipeline.timed_calls import TimedCalls
from tfparallel.replicas import convolution_hooks

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]


def timed(*calls, device=CPUS[1]):
    """Seconds of calls of operations, each with its arguments, which are timed together."""
    times = TimedCalls(device)
    added = [times.add(operation, operation, args, {}) for operation, *args in calls]
    times.finish()
    return [call.seconds for call in added]


def built(layer, *shape):
    layer.build(shape)
    return layer


class Sleeps(layers.Layer):
    """For so long: in its forward pass, of which nothing is used, and for so long in the other."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self._forward_s, self._backward_s = forward_s, backward_s

    def call(self, x):
        def after(seconds, value):
            time.sleep(seconds)
            return value

        @tf.custom_gradient
        def slow(x):
            unused = tf.numpy_function(lambda y: after(self._forward_s, y), [x], x.dtype)
            own = self._backward_s
            slope = lambda dy: tf.numpy_function(lambda y: after(own, y), [dy], x.dtype)  # noqa: E731
            return (x + 1.0, unused), lambda dy, _: slope(dy)

        return slow(x)


def test_each_of_several_calls_has_what_it_takes_and_nothing_of_others():
    """The clock stops behind all outputs and gradients, whether or not somebody uses them."""
    dense, x = built(layers.Dense(3), None, 4), tf.ones([8, 4])
    calls = [(dense, x), (Sleeps(0.1), x), (layers.ReLU(), x), (Sleeps(0, 0.2), x), (dense, x)]
    times_s = timed(*calls)
    assert times_s[1] > 0.09 and times_s[3] > 0.18  # what slept did so, less a call of nothing
    assert times_s[0] == times_s[4] < times_s[1] < times_s[3] and times_s[2] < times_s[1]


def test_the_clock_waits_for_a_number_that_a_cpu_has():
    """What a GPU is given is done later: only who has a number of it knows when."""
    x = tf.ones([8, 4])
    relu = layers.ReLU()
    call = timed_calls.TimedCall(*timed_calls._passes(relu, relu, (x,), {}))
    with tf.device("/device:GPU:0"):
        graph = timed_calls._clocked([call], CPUS[0]).graph
    looks = [op for op in graph.get_operations() if op.type == "Timestamp"]
    (number,) = [op for op in looks[1].control_inputs if op.type == "Identity"]
    assert len(looks) == 2 and {op.device for op in (*looks, number)} == {CPUS[0]}
    by_data = [x.op for output in graph.outputs for x in output.op.inputs]
    packed = [x.op for op in by_data for x in op.inputs]
    assert number in packed  # TensorFlow leaves out what only the clock waits for


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (built(layers.Dense(3), None, 4), tf.ones([2, 4])),
        (built(layers.Embedding(9, 4), None, 5), tf.ones([2, 5], tf.int32)),
        (built(layers.BatchNormalization(), None, 4), tf.ones([2, 4])),
        (layers.Add(), [tf.ones([2, 4])] * 2),
    ],
    ids=["dense", "sparse_gradient", "state", "no_weights"],
)
def test_both_passes_are_one_function_on_the_device_with_the_weights_there(layer, inputs):
    with tf.device(CPUS[1]):
        passes, given = timed_calls._passes(layer, layer, (inputs,), {})
        concrete = tf.function(passes, autograph=False).get_concrete_function(*given)
    assert {each.device for each in given} == {CPUS[1]}
    assert not concrete.captured_inputs  # no weight is read where it is
    operations = concrete.graph.get_operations()
    # All that is made is wanted for the number that is read: gradients of inputs and weights too.
    reached, waiting = set(), [concrete.outputs[0].op]
    while waiting:
        operation = waiting.pop()
        if operation.name not in reached:
            reached.add(operation.name)
            waiting += [x.op for x in operation.inputs]
    assert {x.op.name for x in concrete.inputs} <= reached
    if isinstance(layer, layers.Dense):
        assert [op.type for op in operations if op.name in reached].count("MatMul") == 3


def test_a_mask_comes_along():
    """An LSTM of masked tokens takes another way than one of all tokens."""
    layer, x = built(layers.LSTM(3), None, 5, 4), tf.ones([2, 5, 4])
    passes, given = timed_calls._passes(layer, layer, (x,), {})
    assert len(given) == 1 + len(layer.weights)
    set_keras_mask(x, tf.constant([[True] * 5, [True] * 2 + [False] * 3]))
    passes, given = timed_calls._passes(layer, layer, (x,), {})
    assert len(given) == 2 + len(layer.weights)
    assert tf.bool in {each.dtype for each in given} and np.isfinite(float(passes(*given)))


def test_layers_that_compute_alike_are_timed_once():
    times, x = TimedCalls(CPUS[0]), tf.ones([2, 4])

    def added(layer, x=x):
        own = built(layer, None, x.shape[-1])
        return times.add(own, own, (x,), {})

    one = added(layers.Dense(3))
    alike = added(layers.Dense(3, name="other"))
    others = [
        added(layers.Dense(3, "relu")),
        added(layers.Dense(3), tf.ones([5, 4])),
        added(layers.Dense(3), tf.ones([2, 1])),
        added(layers.Dense(3), tf.ones([4, 8])),
        added(layers.Dense(3), tf.ones([0, 4])),
        added(layers.Dense(3), tf.ones([2, 1, 4])),
        added(layers.Dense(3, trainable=False)),
    ]
    assert len({one, *others}) == 8 and one.seconds == alike.seconds == 0
    times.finish()
    assert min(call.seconds for call in (one, *others)) > 0 and alike.seconds == one.seconds
    assert added(layers.Dense(3)).seconds == one.seconds
    # What is at most twice as large, or half as large, takes in proportion as long.
    for rows, width in (4, 4), (1, 4), (2, 8), (3, 3):
        times_larger = rows * width / 8
        assert added(layers.Dense(3), tf.ones([rows, width])).seconds == one.seconds * times_larger
    times.finish()  # nothing is left


def test_layers_of_keras_that_give_back_what_they_are_given_cost_nothing():
    class Counts(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(tf.exp(x)))
            return x

    own = [keras.Input((4,)), layers.Dropout(0.5), Counts(), layers.ReLU()]
    model = keras.Sequential(own)
    dropout, counts, relu = profile_parts(model, find_parts(model), tf.ones([2, 4]), CPUS)
    assert dropout.time == 0 < min(counts.time, relu.time)
    assert dropout.activation_bytes == 32


def test_convolutions_that_xla_compiles_are_compiled_once_for_layers_that_are_alike():
    def grouped():
        return layers.Conv2D(4, 3, groups=4, padding="same")

    model = keras.Sequential([keras.Input((5, 9, 4)), *(grouped() for _ in range(3))])
    for layer in model.layers:
        convolution_hooks.hook_convolution(layer)
    known = convolution_hooks._shared.cache_info()
    profile_parts(model, find_parts(model), tf.ones([2, 5, 9, 4]), CPUS)
    found = convolution_hooks._shared.cache_info()
    assert found.misses == known.misses + 1 and found.hits >= known.hits + 3


@pytest.mark.parametrize("limit", ["_MOST_CALLS", "_MOST_BYTES"])
def test_calls_do_not_wait_for_ever(monkeypatch, limit):
    monkeypatch.setattr(timed_calls, limit, 2 if limit == "_MOST_CALLS" else 3 * 1024)
    times = TimedCalls(CPUS[0])
    own = [layers.Activation(name) for name in ("relu", "tanh", "gelu")]
    calls = [times.add(each, each, (tf.ones([512]),), {}) for each in own]
    assert [call.seconds > 0 for call in calls] == [True, True, False]


def test_a_layer_that_cannot_be_traced_is_timed_as_it_is():
    class OfNumpy(layers.Layer):
        def call(self, x):
            time.sleep(0.02)
            return tf.constant(x.numpy())

    relu, of_numpy = timed((layers.ReLU(), tf.ones([2])), (OfNumpy(), tf.ones([2])))
    assert of_numpy > 0.01 and relu < of_numpy

    class Broken(layers.Layer):
        def call(self, x):
            raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        timed((layers.ReLU(), tf.ones([2])), (Broken(), tf.ones([2])))


def test_what_no_later_layer_needs_is_freed(monkeypatch):
    monkeypatch.setattr(timed_calls, "_MOST_BYTES", 0)
    alive = []

    class Watched(layers.Layer):
        def call(self, x):
            if isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x):
                alive.append(sum(each() is not None for each in made))
                y = x + 1.0
                made.append(weakref.ref(y))
                return y
            return x + 1.0

        def compute_output_shape(self, shape):
            return shape

    made: list = []
    model = keras.Sequential([keras.Input((4,)), *(Watched() for _ in range(8))])
    alive.clear(), made.clear()
    profile_parts(model, find_parts(model), tf.ones([2, 4]), CPUS)
    assert len(alive) >= 8 and max(alive) <= 2


@pytest.mark.parametrize("kind", ["functional", "nested", "subclassed"])
def test_layers_are_timed_as_in_inference_whatever_their_default(kind):
    seen = []

    class Trains(layers.Layer):
        def call(self, x, training=True):
            seen.append(training)
            return x + 1.0

    class Calls(keras.Model):
        def __init__(self):
            super().__init__()
            self.own = [Trains(), Trains()]

        def call(self, x):
            return self.own[1](self.own[0](x))

    def sequential(*own):
        return keras.Sequential([keras.Input((4,)), *own])

    model = Calls() if kind == "subclassed" else sequential(Trains(), Trains())
    model = sequential(model, Trains()) if kind == "nested" else model
    model(tf.ones([2, 4]))
    parts = find_parts(model)
    seen.clear()
    profile_parts(model, parts, tf.ones([2, 4]), CPUS)
    assert len(parts) >= 2 and len(seen) > len(parts) and not any(seen)


def test_bytes_that_cross_each_cut():
    x = keras.Input((6,))
    a = layers.Dense(4, name="a")(x)
    b = layers.Dense(10, name="b")(a)
    c = layers.Dense(3, name="c")(b)
    skipped = layers.Concatenate(name="d")([c, a])
    model = keras.Model(x, [layers.Dense(2, name="e")(skipped), c])
    parts = find_parts(model)
    assert [part.name for part in parts] == ["a", "b", "c", "d", "e"]
    costs = profile.profile_parts(model, parts, tf.ones([5, 6]), CPUS)
    assert [cost.sending_time for cost in costs] == [0.0] * 5  # CPUs share their memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "seconds_per_byte", lambda devices: 1.0)
        costs = profile_parts(model, parts, tf.ones([5, 6]), CPUS)
    floats = [4, 4 + 10, 4 + 3, 7 + 3, 0]  # c is an output, too: the loss is behind all
    assert [cost.sending_time for cost in costs] == [2 * 4 * 5 * count for count in floats]
    assert [cost.activation_bytes for cost in costs] == [4 * 5 * n for n in (4, 10, 3, 7, 2)]


def test_bytes_of_integers_cross_once_and_what_nobody_made_is_of_the_part_before():
    crossing = CrossingBytes(3)
    given, tokens, own = tf.ones([8]), tf.ones([2], tf.int32), tf.ones([16])
    crossing.give(given)
    crossing.take(0, [given])
    crossing.make(0, tokens)
    crossing.make(1, [])
    crossing.take(2, [tokens, own, given])
    assert crossing.behind_parts() == [8, 8 + 2 * 64, 0]


def wide_in_the_middle():
    sizes = [8, 4096, 8, 8]
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(size) for size in sizes)])


@pytest.mark.parametrize(
    ("seconds_per_byte", "cut_behind"), [(0.0, 2), (1e-3, 1)], ids=["shared", "slow"]
)
def test_a_slow_link_moves_the_cut(monkeypatch, seconds_per_byte, cut_behind):
    """Layers that take as long as one another are cut in the middle, unless that is wide."""
    monkeypatch.setattr(profile, "seconds_per_byte", lambda devices: seconds_per_byte)
    model = wide_in_the_middle()

    def alike(costs):
        return [cost._replace(time=1.0) for cost in costs]

    given = "balanced", Placement(2), Budget([2, 1])
    stages = divide(model, *given, CPUS, tf.ones([4, 6]), alike)
    assert stages.stage_of == [0] * cut_behind + [1] * (4 - cut_behind)
    sent = [2 * 4 * 4 * size * seconds_per_byte for size in (8, 4096, 8)]
    slowest = {i: max(i + sent[i - 1], 4 - i) for i in (1, 2, 3)}
    assert slowest[cut_behind] == min(slowest.values())
    assert len(balanced_cuts([1.0] * 4, 2, boundary_costs=sent)[0]) == cut_behind


def test_a_link_is_measured_where_memory_is_not_shared(monkeypatch):
    asked = []
    monkeypatch.setattr(
        link_speed, "link_seconds_per_byte", lambda *pair: asked.append(pair) or len(asked) * 1.0
    )
    gpus = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(2)]
    remote = "/job:worker/replica:0/task:1/device:CPU:0"
    assert link_speed.seconds_per_byte([CPUS[0], CPUS[1], CPUS[0]]) == 0.0 and not asked
    assert link_speed.seconds_per_byte([*gpus, *gpus, gpus[1], remote]) == 3.0
    assert asked == [(gpus[0], gpus[1]), (gpus[1], gpus[0]), (gpus[1], remote)]


def test_a_link_that_takes_its_time(monkeypatch):
    """By a clock that only calls move on: the fastest of three counts, less one without a link."""
    now, taken_s = 0.0, iter([5.0, 0.4, 0.2, 0.3])  # the first call is traced
    sending = link_speed._sending

    def slow(source, target):
        def send(value):
            nonlocal now
            now += next(taken_s) if source != target else 0.1
            return sending(source, target)(value)

        return send

    monkeypatch.setattr(link_speed, "_sending", slow)
    monkeypatch.setattr(link_speed, "time", SimpleNamespace(perf_counter=lambda: now))
    by_byte = link_speed.link_seconds_per_byte(*CPUS)
    assert by_byte * 4 * link_speed._NUM_FLOATS == pytest.approx(0.2 - 0.1)
