"""Parts in the host's memory: exact, updated there, and read from there by devices.

Logical CPUs stand in for GPUs, as in `tests/gpu`: CPU:1 and CPU:2; CPU:0 is the host.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.gpu.audit import audit, is_stand_in
from tests.gpu.steps import GPUS
from tests.helpers import assert_same_training, train

optimizers = keras.optimizers
WIDTH, LAYERS = 32, 3
KERNEL = 4 * WIDTH * WIDTH


def on_host(host: str | None, **options) -> tfparallel.ShardedStrategy:
    return tfparallel.ShardedStrategy(GPUS, host=host, **{"min_size": 1, **options})


TRAININGS = {
    "optimizer": ({"host": "optimizer"}, lambda: optimizers.Adam(0.01)),
    "parameters": ({"host": "parameters"}, lambda: optimizers.Adam(0.01)),
    "slots_of_whole_weights": (
        {"host": "optimizer", "shard": "optimizer"},
        lambda: optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
    ),
    "with_all_options": (
        {"host": "optimizer"},
        lambda: optimizers.AdamW(
            0.01, weight_decay=0.1, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
        ),
    ),
    "with_accumulation": (
        {"host": "parameters"},
        lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
    ),
    "with_loss_scale": (
        {"host": "optimizer"},
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 64.0),
    ),
    "of_the_whole": ({"host": "parameters"}, lambda: optimizers.Lamb(0.01)),
}
_BY_DEFAULT = {"with_all_options"}


@pytest.mark.parametrize(
    "name", [n if n in _BY_DEFAULT else pytest.param(n, marks=pytest.mark.long) for n in TRAININGS]
)
def test_it_trains_as_one_device(name):
    options, make = TRAININGS[name]
    assert_same_training(train(None, optimizer=make), train(on_host(**options), optimizer=make))


def chain(strategy: tfparallel.ShardedStrategy) -> keras.Model:
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def graph_of_step(strategy: tfparallel.ShardedStrategy, model: keras.Model) -> tf.Graph:
    model.train_on_batch(np.ones((4, WIDTH)), np.ones((4, WIDTH)))

    @tf.function(autograph=False)
    def step(*data):
        return strategy.run(model.train_step, args=(data,))

    return step.get_concrete_function(*[tf.TensorSpec((4, WIDTH))] * 2).graph


def places(variable: keras.Variable) -> list[str]:
    return [part.device.rpartition(":")[2] for part in variable.value.values]


@pytest.mark.parametrize("host", [None, "optimizer", "parameters"])
def test_what_is_asked_for_is_on_the_host(host):
    strategy = on_host(host, min_size=64)  # biases stay whole
    model = chain(strategy)
    layer, slots = model.layers[0], {v.path: v for v in model.optimizer.variables}
    slot = next(v for path, v in slots.items() if path.endswith("kernel_momentum"))
    assert places(layer.kernel) == (["0", "0"] if host == "parameters" else ["1", "2"])
    assert places(slot) == (["1", "2"] if host is None else ["0", "0"])
    assert places(layer.bias) == ["1", "2"]
    rows = {row.device: row for row in strategy.summary(model).devices}
    assert set(rows) == {"CPU:1", "CPU:2"} | (set() if host is None else {"host"})
    kernels, biases = LAYERS * KERNEL // 2, LAYERS * 4 * WIDTH
    for device in GPUS:
        assert rows[device].parameters == biases + (0 if host == "parameters" else kernels)
        assert rows[device].slots == 2 * biases + 12 + (2 * kernels if host is None else 0)
    if host is not None:
        assert rows["host"].parameters == (2 * kernels if host == "parameters" else 0)
        assert rows["host"].slots == 2 * 2 * kernels


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"host": None}, marks=pytest.mark.long),
        pytest.param({"host": "optimizer"}, marks=pytest.mark.long),
        {"host": "parameters"},
        pytest.param({"host": "optimizer", "shard": "optimizer"}, marks=pytest.mark.long),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_updates_are_computed_where_the_slots_are(options):
    """Of a step only Adam takes square roots."""
    strategy = on_host(**options)
    graph = graph_of_step(strategy, chain(strategy))
    found = audit(graph)
    assert not found.without_kernel and not found.narrow_remote_calls and not found.python_calls
    roots = [op for op in graph.get_operations() if op.type == "Sqrt" and op.outputs[0].shape.rank]
    assert len(roots) >= 2 * 2 * LAYERS
    assert {is_stand_in(op.device) for op in roots} == {options["host"] is None}
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    assert products and all(is_stand_in(op.device) for op in products)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "slots"}, r"`host` must be one of .*'optimizer'.*Received: 'slots'"),
        (
            {"host": "parameters", "shard": "optimizer"},
            r"host='parameters' needs shard='parameters'. Received: shard='optimizer'",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.ShardedStrategy(GPUS, **options)
