"""How layers can be cut, and what a call computes, written out for shapes of unlike sizes."""

import keras
import pytest

from tfparallel.tensor_parallel.cuts import cuts_of

layers = keras.layers


def _embedding(tied):
    layer = layers.ReversibleEmbedding(9, 4, tie_weights=tied)
    layer(keras.Input((3,)))
    return layer


def _attention():
    layer = layers.MultiHeadAttention(2, 3)
    layer(keras.Input((5, 4)), keras.Input((6, 4)))
    return layer


def _built(layer, shape):
    layer.build(shape)
    return layer


# The layer, the shapes of a call, each way (size, weights' dims, tensor's dim), multiplications and
# additions of one row.
CALLS = [
    (
        _built(layers.Dense(5), (None, 4, 3)),
        [(None, 4, 3)],
        (None, 4, 5),
        {"column": (5, [("kernel", 1), ("bias", 0)], 2), "row": (3, [("kernel", 0)], 2)},
        2 * 3 * (4 * 5),
    ),
    (
        _built(layers.Conv2D(6, (3, 2)), (None, 9, 9, 5)),
        [(None, 9, 9, 5)],
        (None, 7, 8, 6),
        {"column": (6, [("kernel", 3), ("bias", 0)], 3), "row": (5, [("kernel", 2)], 3)},
        2 * (3 * 2) * 5 * (7 * 8 * 6),
    ),
    (
        _embedding(tied=True),
        [(None, 3, 4)],
        (None, 3, 9),
        dict.fromkeys(("column", "tokens"), (9, [("embeddings", 0)], 2)),
        2 * 4 * (3 * 9),
    ),
    (
        _embedding(tied=False),
        [(None, 3, 4)],
        (None, 3, 9),
        dict.fromkeys(("column", "tokens"), (9, [("reverse_embeddings", 1)], 2)),
        2 * 4 * (3 * 9),
    ),
    (
        _attention(),
        [(None, 5, 4), (None, 6, 4)],
        (None, 5, 4),
        {"heads": (2, [*[("kernel", 1), ("bias", 0)] * 3, ("kernel", 0)], None)},
        # Two projections of five positions, two of six, scores and what they weigh: 2 heads of 3.
        2 * (2 * 5 * (4 * 2 * 3) + 2 * 6 * (4 * 2 * 3)) + 2 * (2 * 5 * 6 * (2 * 3)),
    ),
    (
        _built(layers.Embedding(9, 4), (None, 3)),
        [(None, 3)],
        (None, 3, 4),
        {"tokens": (9, [("embeddings", 0)], None), "column": (4, [("embeddings", 1)], 2)},
        0,
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call[0]).__name__)
def test_each_way_and_what_is_computed(call):
    layer, inputs, output, ways, flops = call
    cuts = cuts_of(layer, inputs, [output])
    found = {
        way: (cut.size, [(v.name, dim) for v, dim in cut.dims], cut.tensor_dim)
        for way, cut in cuts.ways.items()
    }
    assert (found, cuts.flops) == (ways, flops)
