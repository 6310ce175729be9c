"""The table of what a layout made of a model."""

import keras
import pytest
from keras import layers

import tfparallel
from tests.tensor_parallel.layouts import layout_map
from tfparallel.tensor_parallel.mesh_groups import MeshGroups


def test_says_parts_bytes_and_reasons():
    layout = layout_map(
        1,
        3,
        {".*up/kernel": (None, "model"), ".*down/kernel": (None, "model"), ".*gamma": ("model",)},
    )
    strategy = tfparallel.TensorParallelStrategy(layout)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, name="up"),
                layers.BatchNormalization(name="norm"),
                layers.Dense(2, name="down", use_bias=False),
            ],
            name="model",
        )
    lines = [" ".join(line.split()) for line in str(strategy.summary(model)).splitlines()]
    assert lines[: lines.index("")] == [
        "weight shape parts largest bytes computed",
        "model/up/kernel (6, 8) dim 1: 3 + 3 + 2 72 in parts",
        "model/up/bias (8,) whole 32 no pattern matches",
        "model/norm/gamma (8,) dim 0: 3 + 3 + 2 12 in parts",
        "model/norm/beta (8,) whole 32 no pattern matches",
        "model/norm/moving_mean (8,) whole 32 no pattern matches",
        "model/norm/moving_variance (8,) whole 32 no pattern matches",
        "model/down/kernel (8, 2) whole 64 dim 1 has 2 indices for 3 devices",
    ]


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([[0, 0], [0, 0]], ""),
        (
            [[0, 0], [1, 1]],
            "Axis 'model' (2) stays inside of a process. Axis 'batch' (2) crosses 2 processes: "
            "what it sends goes over their link.",
        ),
        (
            [[0, 1, 1, 2]],
            "Axis 'model' (4) crosses 3 processes: what it sends goes over their link.",
        ),
    ],
)
def test_says_which_axis_crosses_processes(tasks, says):
    groups = tuple(
        tuple(f"/job:worker/replica:0/task:{task}/device:CPU:{i}" for i, task in enumerate(group))
        for group in tasks
    )
    assert MeshGroups(groups, "batch", "model").over_processes() == says


def test_an_einsum_counts_as_in_parts_along_whichever_letter_it_is_cut():
    """Gemma's heads are the first dim of its kernels; `"auto"` would take the last ones."""
    layout = layout_map(
        1, 2, {".*up/kernel": ("model", None, None), ".*down/kernel": ("model", None, None)}
    )
    strategy = tfparallel.TensorParallelStrategy(layout)
    with strategy.scope():
        inputs = keras.Input((5, 6))
        heads = layers.EinsumDense("btd,ndh->btnh", (None, 2, 4), name="up")(inputs)
        outputs = layers.EinsumDense("btnh,nhd->btd", (None, 6), name="down")(heads)
        model = keras.Model(inputs, outputs)
    table = strategy.summary(model)
    assert [cost.way for cost in table.layers if cost.flops] == ["column", "row"]
    assert "100.0% of the products are in parts. A step sends 1 sums and 0 gathers" in str(table)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), "logits sum 60 sum 40"),
        ("mse", "whole gather 180 gather 180"),
    ],
)
def test_a_loss_sends_three_numbers_of_each_position_or_reads_all_logits(loss, line):
    """Of five positions and nine logits: the largest, a sum, the label's; two have gradients."""
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, {".*kernel": (None, "model")}))
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 4)), layers.Dense(9, name="logits")])
        model.compile("sgd", loss)
    lines = [" ".join(x.split()) for x in str(strategy.summary(model)).splitlines()]
    way, *sent = line.split()
    assert f"loss {way} 0.0% {' '.join(sent)}" in lines


@pytest.mark.turns
def test_a_device_holds_its_share_of_split_weights_and_slots():
    """Bytes of variables by device, counted: at most 1.05/N of the whole."""
    layout = layout_map(1, 4, {".*dense.*/kernel": (None, "model"), ".*dense.*/bias": ("model",)})
    strategy = tfparallel.TensorParallelStrategy(layout)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), layers.Dense(64), layers.Dense(64)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    held = [0] * 4
    for variable in [*model.trainable_variables, *optimizer._momentums, *optimizer._velocities]:
        for i, part in enumerate(variable.value.parts[0]):
            assert part.device.endswith(f"CPU:{i}")
            held[i] += int(part.shape.num_elements())
    whole = 3 * model.count_params()
    assert sum(held) == whole
    assert max(held) <= 1.05 * whole / 4
