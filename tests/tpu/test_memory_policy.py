"""What a TPU's step computes again: the same training, less that is kept, in one program."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, in_float64, tiny_data, train
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.internals.ran_operations import collected_graphs

pytestmark = pytest.mark.turns

FULL = tfparallel.MemoryPolicy("full")
SCOPES = [
    {"mode": "full"},
    {"mode": "list_of_layers", "layer_names": ["block_0", "block_1"]},
    {"mode": "larger_than", "output_size_threshold": 4},
    {"mode": "activations"},
]


@pytest.fixture(scope="module")
def strategy():
    return CpuStrategy()


@pytest.fixture
def keeping(strategy, monkeypatch):
    """Gives the strategy with a policy, as `TPUStrategy(memory=...)` does."""

    def keeping(memory: tfparallel.MemoryPolicy) -> CpuStrategy:
        monkeypatch.setattr(strategy, "_memory", memory)
        return strategy

    return keeping


def blocks(width: int = 6, dropout: float = 0.0) -> keras.Model:
    """Residual blocks of two layers and statistics of the batch."""

    def block(number: int) -> keras.Model:
        inputs = keras.Input((width,))
        hidden = keras.layers.Dense(2 * width, "tanh", name=f"widen_{number}")(inputs)
        hidden = keras.layers.LayerNormalization(name=f"norm_{number}")(hidden)
        hidden = keras.layers.Dropout(dropout, seed=number, name=f"drop_{number}")(hidden)
        hidden = keras.layers.Dense(width, "gelu", name=f"narrow_{number}")(hidden)
        return keras.Model(inputs, inputs + hidden, name=f"block_{number}")

    layers = [block(0), block(1), keras.layers.BatchNormalization(synchronized=True)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(3, name="head")])


def in_scope(scope: dict) -> keras.Model:
    with keras.RematScope(**scope):
        return blocks()


def adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def by_fit(strategy, build, **options):
    return train(strategy, build=build, optimizer=adam, **options)


@pytest.mark.parametrize(
    "scope",
    [pytest.param(each, marks=[pytest.mark.long] if i else []) for i, each in enumerate(SCOPES)],
    ids=[each["mode"] for each in SCOPES],
)
def test_remat_scopes_train_as_one_device_does(strategy, scope):
    """Of batches of 13 rows on two cores: some rows are padding."""
    with in_float64():
        reference = by_fit(None, blocks)
        candidate = by_fit(strategy, lambda: in_scope(scope))
        x, y = tiny_data(11)
        for each in (reference, candidate):
            each.extra = {
                "on batch": np.asarray(each.model.train_on_batch(x, y)),
                "predicted": each.model.predict(x, batch_size=4, verbose=0),
            }
        assert_same_training(reference.results(), candidate.results(), 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("rematerialize", ["full", ("block_*",)])
def test_a_policy_trains_as_one_device_does(keeping, rematerialize):
    with in_float64():
        reference = by_fit(None, blocks)
        candidate = by_fit(keeping(tfparallel.MemoryPolicy(rematerialize)), blocks)
        assert_same_training(reference.results(), candidate.results(), 1e-9)


@pytest.mark.long
def test_masks_are_drawn_once(keeping):
    """Those of a second drawing would not be those of the step that keeps all."""

    def build() -> keras.Model:
        return blocks(dropout=0.4)

    whole = {"rows": 24, "batch_size": 12}
    kept = by_fit(keeping(tfparallel.MemoryPolicy()), build, **whole)
    again = by_fit(keeping(FULL), build, **whole)
    assert_same_training(kept.results(), again.results(), 1e-6)


def test_replicas_compute_again(keeping):
    def products(memory: tfparallel.MemoryPolicy) -> int:
        with collected_graphs() as nodes:
            by_fit(keeping(memory), blocks, rows=24, batch_size=12)
        return sum("MatMul" in node.operation for node in nodes.values())

    kept, again = products(tfparallel.MemoryPolicy()), products(FULL)
    assert again - kept >= 2 * (2 + 1)  # of two replicas: a block's last product is not kept


def test_one_program_has_all_that_is_computed_again():
    """In TensorFlow's own TPU replication, as far as it goes without a TPU: as a graph.

    An operation outside of the program has no mark of it, and a copied mark is an error.
    """
    model = blocks()
    model.compile("sgd", "mse")
    x, _ = tiny_data(4)

    @tf.function
    def step(rows):
        policy = FULL.during(model, in_xla=True)

        def computation(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(rows, training=True) ** 2)
            weights = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, weights)
            segments.finish_own()
            return [tf.identity(gradient) for gradient in gradients]

        with policy as segments:
            return tf.compat.v1.tpu.replicate(computation, [[rows], [rows]])

    graph = step.get_concrete_function(tf.constant(x)).graph
    operations = graph.get_operations()
    products = [operation for operation in operations if operation.type == "MatMul"]
    kept = [operation for operation in operations if operation.name.split("/")[-1] == "kept"]
    forward = 2 * 2 + 1  # a program is traced once for all
    assert len(products) > 3 * forward and kept
    for operation in [*products, *kept]:
        assert operation.get_attr("_tpu_replicate")


def test_nothing_is_offloaded():
    with pytest.raises(ValueError, match="moves nothing to the host. Received: offload='full'"):
        tfparallel.TPUStrategy(memory=tfparallel.MemoryPolicy(offload="full"))


@pytest.mark.long
def test_losses_of_evaluation_are_those_that_keep_all(keeping):
    def evaluated(memory: tfparallel.MemoryPolicy) -> np.ndarray:
        keras.utils.set_random_seed(0)
        with keeping(memory).scope():
            model = blocks()
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = tiny_data(24)
        return np.append(model.predict(x, verbose=0), model.evaluate(x, y, verbose=0))

    np.testing.assert_array_equal(evaluated(tfparallel.MemoryPolicy()), evaluated(FULL))
