"""What a step computes, and where: operations that run are counted, not those that are traced."""

import collections
import contextlib
import re

import keras
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context as eager  # records what each device runs

import tfparallel
from tests.tensor_parallel.layouts import cpu_mesh, layout_map

pytestmark = pytest.mark.turns

MEGATRON = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
ATTENTION = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
}


def _pair(*between):
    outer = [layers.Dense(32, "tanh", name="up"), *between, layers.Dense(16, name="down")]
    return keras.Sequential([keras.Input((16,)), *outer])


def _attention():
    x = keras.Input((5, 8))
    return keras.Model(x, layers.MultiHeadAttention(4, 4)(x, x))


def _operations_that_run(
    layouts, make, shape, parts=2, wrap=lambda optimizer: optimizer, of_words=0, **options
) -> dict:
    """How many operations of each type one step runs on each device.

    Args:
        wrap: makes an optimizer around Adam with `options`.
        of_words: how many there are, where inputs are numbers of words.
    """
    if isinstance(layouts, tf.distribute.Strategy):
        strategy = layouts
    elif layouts == "branches":
        strategy = tfparallel.TensorParallelStrategy(layouts, device_mesh=cpu_mesh(1, parts))
    else:
        strategy = tfparallel.TensorParallelStrategy(layout_map(1, parts, layouts))
    with strategy.scope():
        model = make()
        model.compile(wrap(keras.optimizers.Adam(0.01, **options)), "mse")
    x = y = tf.random.normal(shape)
    if of_words:
        x = tf.random.uniform(shape, 0, of_words, tf.int32)
        y = tf.random.normal((shape[0], *model.output_shape[1:]))
    model.fit(x, y, batch_size=shape[0], verbose=0)  # makes all variables
    step = tf.function(lambda: strategy.run(model.train_step, ((x, y),)))
    step.get_concrete_function()
    with _recorded() as graphs:
        step()  # the first time, when TensorFlow divides the graph among devices
    counts: dict = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for node in graph.node:
            index = tf.DeviceSpec.from_string(node.device).device_index
            counts[index][_operation(node)] += 1
    return counts


def _operation(node) -> str:
    """What a node computes; oneDNN has operations of its own for some, and shapes are no data."""
    operation = re.sub("^_(Mkl)?(Native)?(Fused)?", "", node.op)
    is_shape = node.op == "ConcatV2" and node.attr["T"].type != tf.float32.as_datatype_enum
    return "ConcatV2 of shapes" if is_shape else operation


@contextlib.contextmanager
def _recorded():
    """Gets the graphs that devices run, after TensorFlow has removed what nobody reads."""
    graphs: list = []
    eager.context().enable_run_metadata()
    eager.context().export_run_metadata()  # what there was before
    try:
        yield graphs
        metadata = eager.context().export_run_metadata()
        for each in metadata.function_graphs:
            graphs.extend(each.partition_graphs)
    finally:
        eager.context().disable_run_metadata()


def _on_each(counts, operation, parts=2):
    return [counts[i][operation] for i in range(parts)]


@pytest.mark.parametrize(
    "between",
    [
        list,
        lambda: [layers.Activation("gelu"), layers.Dropout(0.2, seed=1)],
        lambda: [layers.LeakyReLU()],
    ],
    ids=["nothing", "activation and dropout", "leaky relu"],
)
def test_a_column_and_a_row_do_not_gather_in_between(between):
    counts = _operations_that_run(MEGATRON, lambda: _pair(*between()), (12, 16))
    assert _on_each(counts, "MatMul") == [5, 5]  # forward 2; kernels' gradients 2; the hidden's
    assert _on_each(counts, "ConcatV2") == [0, 0]


def test_scores_are_dropped_where_their_heads_are():
    def dropping():
        x = keras.Input((5, 8))
        return keras.Model(x, layers.MultiHeadAttention(4, 4, dropout=0.3, seed=1)(x, x))

    counts = _operations_that_run(ATTENTION, dropping, (12, 5, 8))
    assert counts[0]["Softmax"] == counts[1]["Softmax"] == 1
    assert counts[0]["StatelessRandomUniformV2"] == 1
    assert counts[1]["StatelessRandomUniformV2"] == 0
    plain = _operations_that_run(ATTENTION, _attention, (12, 5, 8))
    assert _on_each(counts, "ConcatV2") == _on_each(plain, "ConcatV2")


CLIPPING = {"global_clipnorm": 0.1, "clipnorm": 0.05, "clipvalue": 0.01}


@pytest.mark.parametrize("name", CLIPPING)
def test_gradients_are_clipped_where_they_are(name):
    counts = _operations_that_run(MEGATRON, _pair, (12, 16), **{name: CLIPPING[name]})
    assert _on_each(counts, "ConcatV2") == [0, 0]
    assert _on_each(counts, "SplitV") == [0, 0]


BESIDE_THE_UPDATE = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    "a fixed loss scale": {"loss_scale_factor": 8.0},
    "averages": {"use_ema": True, "ema_overwrite_frequency": 2},
    "a loss scale": {"wrap": keras.optimizers.LossScaleOptimizer},
    "all": {
        "wrap": keras.optimizers.LossScaleOptimizer,
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.1,
        "use_ema": True,
    },
}


@pytest.mark.parametrize("name", BESIDE_THE_UPDATE)
def test_what_is_done_beside_the_update_makes_no_whole(name):
    counts = _operations_that_run(MEGATRON, _pair, (12, 16), **BESIDE_THE_UPDATE[name])
    assert _on_each(counts, "ConcatV2") == [0, 0]
    assert _on_each(counts, "SplitV") == [0, 0]


@pytest.mark.parametrize("name", ["accumulation", "accumulation and clipping", "all"])
def test_a_sparse_gradient_becomes_dense_by_parts(name):
    def words():
        table = layers.Embedding(40, 8, name="table")
        outer = [layers.GlobalAveragePooling1D(), layers.Dense(3, name="scores")]
        return keras.Sequential([keras.Input((5,), dtype="int32"), table, *outer])

    counts = _operations_that_run(
        {".*embeddings": ("model", None)}, words, (12, 5), of_words=40, **BESIDE_THE_UPDATE[name]
    )
    on_each = _on_each(counts, "UnsortedSegmentSum")
    assert on_each[0] == on_each[1] > 0
    assert _on_each(counts, "SplitV") == [0, 0]


@pytest.mark.parametrize(
    "norm, gathers",
    [
        (layers.LayerNormalization, 0),
        (layers.RMSNormalization, 0),
        (layers.BatchNormalization, 1),  # of its moments, for the moving averages
    ],
)
def test_a_norm_in_a_pair_gathers_no_features(norm, gathers):
    layouts = {**MEGATRON, ".*norm/(gamma|beta|scale)": ("model",)}
    counts = _operations_that_run(layouts, lambda: _pair(norm(name="norm")), (12, 16))
    assert _on_each(counts, "MatMul") == [5, 5]
    assert _on_each(counts, "ConcatV2") == [gathers, 0]
    assert _on_each(counts, "SplitV") == [0, 0]
    assert counts[0]["Rsqrt"] == counts[1]["Rsqrt"] > 0


class Pair(layers.Layer):
    """Has its layers built by Keras, when it is called."""

    def __init__(self):
        super().__init__()
        outer = layers.Dense(32, "tanh", name="up"), layers.Dense(16, name="down")
        self.inner = list(outer)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def _nested_pair():
    return keras.Sequential([keras.Input((16,)), Pair()])


def test_layers_in_a_layer_are_computed_in_parts():
    counts = _operations_that_run(MEGATRON, _nested_pair, (12, 16))
    assert _on_each(counts, "MatMul") == [5, 5]
    assert _on_each(counts, "ConcatV2") == [0, 0]


def test_three_devices_multiply_as_many_matrices_each():
    counts = _operations_that_run(MEGATRON, _pair, (12, 16), parts=3)
    assert _on_each(counts, "MatMul", 3) == [5, 5, 5]
    assert _on_each(counts, "ConcatV2", 3) == [0, 0, 0]


def test_a_pair_of_layers_sends_its_partial_sums_and_nothing_else():
    counts = _operations_that_run(MEGATRON, lambda: _with_inner_pair(), (12, 16))
    assert _on_each(counts, "ConcatV2") == [0, 0]
    assert _on_each(counts, "SplitV") == [0, 0]
    assert _on_each(counts, "AddN") == [2, 0]  # the row's output, and the column's gradient


def _with_inner_pair():
    """A pair whose input needs a gradient, too."""
    first = layers.Dense(16, name="first")
    return keras.Sequential([keras.Input((16,)), first, *_pair().layers])


def test_a_device_is_sent_the_learning_rate_and_the_step_once():
    counts = _operations_that_run(MEGATRON, _pair, (12, 16))
    # The input, the gradient of the output, two numbers of Adam; back, a sum and that it is done.
    assert _on_each(counts, "Send") == [4, 2]


def test_query_key_and_value_send_one_gradient_of_their_input():
    def within():
        x = keras.Input((5, 8))
        y = layers.LayerNormalization()(x)
        return keras.Model(x, layers.MultiHeadAttention(4, 4)(y, y))

    counts = _operations_that_run(ATTENTION, within, (4, 5, 8))
    # The input, the gradient of the output, two numbers; back, two sums and that it is done.
    assert _on_each(counts, "Send") == [4, 3]


def test_heads_stay_where_they_are():
    counts = _operations_that_run(ATTENTION, _attention, (4, 5, 8))
    assert _on_each(counts, "ConcatV2") == [0, 0]
    assert counts[0]["BatchMatMulV2"] == counts[1]["BatchMatMulV2"] > 0
    assert counts[0]["Einsum"] == counts[1]["Einsum"] > 0


def test_slots_and_updates_are_where_their_part_is():
    counts = _operations_that_run(MEGATRON, _pair, (12, 16))
    assert counts[1]["AssignSubVariableOp"] == 3  # two kernels and a bias
    assert counts[1]["AssignAddVariableOp"] == 6  # and two moments of each
