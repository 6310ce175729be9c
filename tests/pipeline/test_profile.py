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

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]


def timed(operation, *args, device=CPUS[1]):
    return TimedCalls(device).seconds(operation, args, {})


def built(layer, *shape):
    layer.build(shape)
    return layer


def test_the_clock_stops_behind_what_an_asynchronous_device_does_later(monkeypatch):
    """A device whose calls return at once: only who reads the result waits for it."""
    takes_s = 0.2

    class Later:
        def __init__(self, value):
            self.ready, self.value = time.perf_counter() + takes_s, value

        def __float__(self):
            time.sleep(max(0.0, self.ready - time.perf_counter()))
            return float(self.value)

    compiled = timed_calls._compiled

    def asynchronous(passes, given):
        function = compiled(passes, given)
        return lambda *own: Later(function(*own))

    monkeypatch.setattr(timed_calls, "_compiled", asynchronous)
    assert timed(built(layers.Dense(3), None, 4), tf.ones([8, 4])) >= 0.9 * takes_s


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
        passes, given = timed_calls._passes(layer, (inputs,), {})
        concrete = timed_calls._compiled(passes, given)
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
    passes, given = timed_calls._passes(layer, (x,), {})
    assert len(given) == 1 + len(layer.weights)
    set_keras_mask(x, tf.constant([[True] * 5, [True] * 2 + [False] * 3]))
    passes, given = timed_calls._passes(layer, (x,), {})
    assert len(given) == 2 + len(layer.weights)
    assert tf.bool in {each.dtype for each in given} and np.isfinite(float(passes(*given)))


def test_layers_that_compute_alike_are_timed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(timed_calls, "_median_s", lambda *_: calls.append(1) or 0.5)
    times, x = TimedCalls(CPUS[0]), tf.ones([2, 4])
    for layer in (layers.Dense(3), layers.Dense(3, name="other")):
        times.seconds(built(layer, None, 4), (x,), {})
    assert len(calls) == 2  # a call of nothing, and one of them
    times.seconds(built(layers.Dense(3, "relu"), None, 4), (x,), {})
    times.seconds(built(layers.Dense(3), None, 4), (tf.ones([3, 4]),), {})
    times.seconds(built(layers.Dense(3, trainable=False), None, 4), (x,), {})
    assert len(calls) == 5


def test_a_layer_that_cannot_be_traced_is_timed_as_it_is():
    class OfNumpy(layers.Layer):
        def call(self, x):
            time.sleep(0.02)
            return tf.constant(x.numpy())

    assert timed(OfNumpy(), tf.ones([2])) > 0.01

    class Broken(layers.Layer):
        def call(self, x):
            raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        timed(Broken(), tf.ones([2]))


def test_what_no_later_layer_needs_is_freed():
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
