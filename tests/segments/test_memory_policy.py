"""What is computed again, or on the host, trains to the same weights, and is not kept."""

import collections
import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance.models import MODELS
from tests.graphs import waited_for
from tests.helpers import assert_same_training, train
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh
from tfparallel.internals.ran_operations import collected_graphs

pytestmark = pytest.mark.turns

FULL = tfparallel.MemoryPolicy("full")
STRATEGIES = {
    "one_device": lambda memory: tfparallel.OneDeviceStrategy("CPU:0", memory=memory),
    "mirrored": lambda memory: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"], memory=memory),
    "central": lambda memory: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"], memory=memory),
    "sharded": lambda memory: tfparallel.ShardedStrategy(
        ["CPU:0", "CPU:1"], min_size=1, memory=memory
    ),
    "tensor": lambda memory: tfparallel.TensorParallelStrategy(
        "auto", device_mesh=cpu_mesh(1, 2), memory=memory
    ),
    "tensor, two replicas": lambda memory: tfparallel.TensorParallelStrategy(
        LayoutOfAnything(cpu_mesh(2, 2)), memory=memory
    ),
    "pipeline": lambda memory: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], 4, memory=memory),
    "pipeline, a microbatch": lambda memory: tfparallel.PipelineStrategy(
        ["CPU:0", "CPU:1"], 1, memory=memory
    ),
    "data x pipeline": lambda memory: tfparallel.HybridStrategy(
        keras.distribution.DeviceMesh((2, 2), ("data", "pipeline"), [f"cpu:{i}" for i in range(4)]),
        memory=memory,
    ),
}

# CPU:0 is the host; the others stand in for GPUs.
AWAY = {
    "one_device": lambda memory: tfparallel.OneDeviceStrategy("CPU:1", memory=memory),
    "mirrored": lambda memory: tfparallel.MirroredStrategy(["CPU:1", "CPU:2"], memory=memory),
    "central": lambda memory: tfparallel.CentralStorageStrategy(["CPU:1", "CPU:2"], memory=memory),
    "sharded": lambda memory: tfparallel.ShardedStrategy(
        ["CPU:1", "CPU:2"], min_size=1, memory=memory
    ),
    "kept": lambda memory: tfparallel.ShardedStrategy(
        ["CPU:1", "CPU:2"], min_size=1, reshard_after_forward=False, memory=memory
    ),
}


def blocks(count: int, width: int) -> keras.Model:
    """Each block has four activations within, and a mask of its own."""

    def block(number):
        inner = [keras.layers.Dense(width, "gelu") for _ in range(2)]
        layers = [inner[0], keras.layers.Dropout(0.3, seed=number), inner[1]]
        return keras.Sequential(layers, name=f"block_{number}")

    layers = [block(i) for i in range(count)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(3)])


def data(rows: int, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("float32"), rng.integers(0, 3, rows)


def trained(strategy, build=lambda: blocks(2, 8)) -> dict[str, np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data(26)
    losses = model.fit(x, y, batch_size=13, epochs=2, shuffle=False, verbose=0).history["loss"]
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    return {"losses": np.asarray(losses), **weights}


@functools.cache
def kept_by(name: str) -> dict[str, np.ndarray]:
    """What a strategy trains to that keeps all activations: the same for every test."""
    return trained(STRATEGIES[name](None))


OFTEN = ("one_device", "sharded", "pipeline")
IN_PARTS = ("tensor", "tensor, two replicas", "pipeline, a microbatch", "data x pipeline")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.long if x in IN_PARTS else []) for x in STRATEGIES],
)
@pytest.mark.parametrize("rematerialize", ["full", ("block_*",)])
def test_it_trains_as_if_all_was_kept(name, rematerialize):
    again = trained(STRATEGIES[name](tfparallel.MemoryPolicy(rematerialize)))
    for key, expected in kept_by(name).items():
        np.testing.assert_allclose(again[key], expected, rtol=0, atol=5e-7, err_msg=key)


@pytest.mark.parametrize("name", ["lstm", "attention", "cnn", "regularized", "shared_layers"])
def test_models_of_all_kinds_train_as_on_one_device(name):
    model = MODELS[name]
    options = {"build": model.build, "compile_options": model.compile_options, "data": model.data}
    strategy = tfparallel.OneDeviceStrategy("CPU:0", memory=FULL)
    assert_same_training(train(None, **options), train(strategy, **options))


def above_rest(
    memory: tfparallel.MemoryPolicy | None,
    build=lambda: blocks(6, 128),
    scope=None,
    **compile_options,
) -> int:
    """Bytes that TensorFlow has in use in a step at most, above those before it.

    Args:
        scope: of another strategy, or of none.
    """
    with scope or tfparallel.OneDeviceStrategy("CPU:0", memory=memory).scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, **compile_options)
    x, y = data(2048, 128)
    model.train_on_batch(x, y)
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    model.train_on_batch(x, y)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def test_what_is_computed_again_is_not_kept():
    assert above_rest(tfparallel.MemoryPolicy({"block_*"})) <= 0.6 * above_rest(None)


def test_xla_does_not_make_one_of_what_is_computed_twice():
    kept = above_rest(None, jit_compile=True)
    assert above_rest(tfparallel.MemoryPolicy({"block_*"}), jit_compile=True) <= 0.6 * kept


def test_all_devices_of_a_group_compute_again():
    """What is behind the all-reduce of a pair, and not on the first device only."""

    def products(memory):
        strategy = STRATEGIES["tensor"](memory)
        with collected_graphs() as nodes:
            trained(strategy)
        kept = [node.device[-1] for name, node in nodes.items() if "/kept" in f"/{name}"]
        every = [node.device[-1] for node in nodes.values() if "MatMul" in node.operation]
        return kept, every

    (none, plain), (kept, again) = products(None), products(FULL)
    assert not none and set(kept) == {"0", "1"}
    more = collections.Counter(again) - collections.Counter(plain)
    assert more["0"] == more["1"] > 0


@pytest.mark.parametrize(
    "scope",
    [
        {"mode": "full"},
        {"mode": "list_of_layers", "layer_names": ["block_0", "block_1"]},
        {"mode": "larger_than", "output_size_threshold": 4},
        {"mode": "activations"},
    ],
    ids=lambda scope: scope["mode"],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            x, marks=[] if x in ("one_device", "sharded", "pipeline") else pytest.mark.long
        )
        for x in STRATEGIES
    ],
)
def test_remat_scopes_of_keras_train_as_if_all_was_kept(name, scope):
    def build():
        with keras.RematScope(**scope):
            return blocks(2, 8)

    for key, again in trained(STRATEGIES[name](None), build).items():
        np.testing.assert_allclose(again, kept_by(name)[key], rtol=0, atol=5e-7, err_msg=key)


def test_a_remat_scope_of_keras_saves_what_the_policy_does():
    def build():
        with keras.RematScope(mode="full"):
            return blocks(6, 128)

    assert above_rest(None, build) <= 0.6 * above_rest(None)


def test_a_segment_that_keeps_all_costs_no_more_than_plain_keras():
    """A threshold that nothing reaches: each block is a segment, and none computes again."""

    def build():
        with keras.RematScope(mode="larger_than", output_size_threshold=10**9):
            return blocks(6, 128)

    plain = above_rest(None, scope=contextlib.nullcontext())
    activation = 2048 * 128 * 4
    assert above_rest(None, build) <= plain + 2 * activation < 1.05 * plain


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("one_device", "sharded") else pytest.mark.long)
        for name in AWAY
    ],
)
def test_what_is_on_the_host_trains_to_the_same_bits(name):
    with collected_graphs() as nodes:
        moved = trained(AWAY[name](tfparallel.MemoryPolicy(offload="full")))
    for key, expected in trained(AWAY[name](None)).items():
        np.testing.assert_array_equal(moved[key], expected, err_msg=key)
    assert_waits_on_the_host(nodes)


def assert_waits_on_the_host(nodes: dict) -> None:
    """In the graph that runs, behind TensorFlow's own optimizer."""
    moved = {k: v for k, v in nodes.items() if is_copy(k, v, "offload")}
    back = {k: v for k, v in nodes.items() if is_copy(k, v, "release")}
    assert len(moved) > 8 and {v.inputs[0] for v in back.values()} == set(moved)
    assert {v.device.rpartition("/")[2] for v in [*moved.values(), *back.values()]} == {
        "device:CPU:0"
    }
    senders = [v.inputs[0] for v in nodes.values() if v.operation == "_Send"]
    for name, node in back.items():
        assert len(node.inputs) == 2  # what it sends, and what it waits for before
        assert name in senders and node.inputs[0] not in senders


def is_copy(name: str, node: object, kind: str) -> bool:
    return node.operation == "Identity" and name.rpartition("/")[2].startswith(kind)


@pytest.mark.parametrize(
    "offload", ["full", pytest.param(("block_0", "*/dense*"), marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "name",
    ["one_device", *(pytest.param(x, marks=pytest.mark.long) for x in ("mirrored", "sharded"))],
)
def test_what_is_computed_again_is_so_from_the_host(name, offload):
    policy = tfparallel.MemoryPolicy(rematerialize={"block_*"}, offload=offload)
    kept, again = trained(AWAY[name](None)), trained(AWAY[name](policy))
    for key, expected in kept.items():
        np.testing.assert_allclose(again[key], expected, rtol=0, atol=5e-7, err_msg=key)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "sharded"])
def test_models_of_all_kinds_train_with_their_activations_on_the_host(strategy, name):
    model = MODELS[name]
    options = {"build": model.build, "compile_options": model.compile_options, "data": model.data}
    away = AWAY[strategy](tfparallel.MemoryPolicy(offload="full"))
    assert_same_training(train(None, **options), train(away, **options))


def test_a_device_keeps_nothing_of_what_is_on_the_host():
    def kept(memory):
        strategy = AWAY["sharded"](memory)
        with strategy.scope():
            model = blocks(6, 128)
            model.compile("sgd", "mse")
        return strategy.summary(model, data(64, 128)[0]).devices[0].activations

    every, within = kept(None), kept(tfparallel.MemoryPolicy(offload={"block_*"}))
    logits = 32 * 128 * 4  # of the last layer its input, which is no block's
    assert within == logits and every > 20 * within


@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_a_layer_waits_until_what_those_before_the_last_keep_is_on_the_host(name):
    """On an asynchronous device all would be there at once, however fast the copies are."""
    strategy = AWAY[name](tfparallel.MemoryPolicy(offload="full"))
    with strategy.scope():
        hidden = [keras.layers.Dense(8, "tanh", name=f"hidden_{i}") for i in range(5)]
        model = keras.Sequential([keras.Input((8,)), *hidden])
        model.compile("sgd", "mse")
    model.train_on_batch(np.ones([12, 8]), np.ones([12, 8]))

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(model.train_step, args=((x, x),))

    graph = step.get_concrete_function(tf.TensorSpec([12, 8])).graph
    operations, behind = graph.get_operations(), waited_for(graph)
    traced = {operation: i for i, operation in enumerate(operations)}
    copies = [op for op in operations if "offload" in op.name.rpartition("/")[2]]
    for device in {copy.inputs[0].device for copy in copies}:
        own = [copy for copy in copies if copy.inputs[0].device == device]
        products = [op for op in operations if op.type == "MatMul" and op.device == device][:5]
        assert len(own) >= 5 and all("hidden" in op.name for op in products)
        for before, last, product in zip([None, *products], products, products[1:], strict=False):
            done = {copy for copy in own if traced[copy.inputs[0].op] < traced[last]}
            assert done <= behind[product] and (done or before is None)
            assert not behind[product] & {*own} - done  # what the last one keeps is on its way


def test_the_host_is_no_other_device_for_itself():
    with collected_graphs() as nodes:
        trained(STRATEGIES["one_device"](tfparallel.MemoryPolicy(offload="full")))
    assert not [k for k, v in nodes.items() if is_copy(k, v, "offload")]


def test_what_xla_compiles_is_not_moved():
    with STRATEGIES["one_device"](tfparallel.MemoryPolicy(offload="full")).scope():
        model = blocks(1, 8)
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="moves nothing to the host. Received: offload='full'"):
        model.fit(*data(8), verbose=0)


@pytest.mark.parametrize("what", ["rematerialize", "offload"])
@pytest.mark.parametrize("choice", ["everything", "", ()])
def test_a_choice_that_is_none_is_refused(what, choice):
    with pytest.raises(ValueError, match=f"`{what}` must be one of 'none', 'full' or a set"):
        tfparallel.MemoryPolicy(**{what: choice})


@pytest.mark.parametrize("what", ["rematerialize", "offload"])
def test_a_pattern_that_names_no_layer_is_refused(what):
    with pytest.raises(ValueError, match=rf"`{what}` must name a layer. Received: 'blocks'"):
        trained(STRATEGIES["one_device"](tfparallel.MemoryPolicy(**{what: {"blocks"}})))
