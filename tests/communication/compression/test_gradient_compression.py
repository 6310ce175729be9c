"""Whatever gradients a model has, and wherever its state is kept."""

import numpy as np
import pytest
import tensorflow as tf

from tests.communication.compression.ranks import Gradients, Meeting, Variable
from tfparallel.communication.compression.transport import sum_halves
from tfparallel.compression import GradientCompression, PowerSGD, TopK
from tfparallel.replicas.compressed_gradients import WorkersTransport


def test_gradients_of_every_kind():
    """Sparse, absent, half precision, integers, scalars, empty ones, of unknown shape."""
    shapes = {
        "table": (50, 8), "none": (40, 30), "half": (40, 30), "brain": (40, 30),
        "double": (40, 30), "scalar": (), "empty": (0, 4), "int": (2, 2), "unknown": (40, 30),
    }  # fmt: skip
    variables = [Variable(name, shape) for name, shape in shapes.items()]
    dtypes = {"half": "float16", "brain": "bfloat16", "double": "float64", "int": "int32"}

    def gradients_of(rank):
        rng = np.random.default_rng(rank)
        values = {
            n: tf.cast(rng.normal(size=s), dtypes.get(n, "float32")) for n, s in shapes.items()
        }
        rows = tf.range(rank + 1)  # ranks have different numbers of rows
        table = tf.fill([rank + 1, 8], 1.0 + rank)
        values["table"] = tf.IndexedSlices(table, rows, tf.constant([50, 8]))
        values["none"] = None
        return list(values.values())

    def reduce(transport):
        compression = GradientCompression(TopK(0.49), variables)
        given = gradients_of(transport.rank)

        @tf.function
        def step():
            hidden = tf.compat.v1.placeholder_with_default(given[-1], [None, 30])
            return compression.reduce([*given[:-1], hidden], transport)

        return given, step()

    results = [[dict(zip(shapes, part, strict=True)) for part in r] for r in Meeting(2).run(reduce)]
    (first, received), (second, other) = results
    assert received.pop("none") is None and other.pop("none") is None
    table = received.pop("table")
    assert isinstance(table, tf.IndexedSlices)
    np.testing.assert_array_equal(table.indices, [0, 0, 1])
    np.testing.assert_array_equal(table.values[:, 0], [1.0, 2.0, 2.0])
    for name, total in received.items():
        assert total.dtype == first[name].dtype and total.shape == shapes[name], name
        np.testing.assert_array_equal(total, other[name])
        exact = tf.cast(first[name], tf.float64) + tf.cast(second[name], tf.float64)
        missed = np.sum((tf.cast(total, tf.float64) - exact) ** 2)
        assert missed <= 0.15 * np.sum(exact**2), name  # half of the values are the larger ones


def train(compression, gradients, transport, steps):
    step = tf.function(lambda g: compression.reduce(g, transport))
    return [step(gradients.of(transport.rank, i)) for i in steps]


@pytest.mark.parametrize("restore_late", [False, True])
def test_a_checkpoint_holds_what_was_left_out(tmp_path, restore_late):
    """Also where the compression is made after `restore`, as that of an optimizer is."""
    gradients = Gradients([(40, 30), (30,), (20, 30)], 2)

    def interrupted(transport):
        path = str(tmp_path / f"rank{transport.rank}")
        before = GradientCompression(PowerSGD(2), gradients.variables)
        train(before, gradients, transport, range(3))
        holder = tf.Module()
        holder.compression = before
        tf.train.Checkpoint(optimizer=holder).write(path)

        resumed = tf.Module()
        if restore_late:
            status = tf.train.Checkpoint(optimizer=resumed).read(path)
            resumed.compression = GradientCompression(PowerSGD(2), gradients.variables)
        else:
            resumed.compression = GradientCompression(PowerSGD(2), gradients.variables)
            status = tf.train.Checkpoint(optimizer=resumed).read(path)
        status.assert_consumed()
        return train(resumed.compression, gradients, transport, range(3, 5))

    def uninterrupted(transport):
        compression = GradientCompression(PowerSGD(2), gradients.variables)
        return train(compression, gradients, transport, range(5))[3:]

    expected, received = Meeting(2).run(uninterrupted), Meeting(2).run(interrupted)
    tf.nest.map_structure(np.testing.assert_array_equal, received, expected)


def test_residuals_follow_the_loss_scale():
    """Twice the scale, twice the gradients: then twice the sums, as if it had always been so."""
    gradients = Gradients([(40, 30)], 2)

    def scaled(scales):
        def train(transport):
            compression = GradientCompression(TopK(0.1), gradients.variables)
            step = tf.function(lambda g, s: compression.reduce(g, transport, loss_scale=s))
            return [
                step([scale * gradients.of(transport.rank, i)[0]], tf.constant(scale))[0] / scale
                for i, scale in enumerate(scales)
            ]

        return Meeting(2).run(train)[0]

    for a, b in zip(scaled([8.0, 8.0, 8.0]), scaled([8.0, 2.0, 16.0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_of_some_variables_only():
    """As in a custom loop that trains a part of a model."""
    gradients = Gradients([(40, 30), (20, 30), (30, 30)], 2)

    def reduce(transport):
        compression = GradientCompression(TopK(0.1), gradients.variables)
        chosen = gradients.variables[::-2]  # the last and the first
        given = gradients.of(transport.rank, 0)[::-2]
        sums = compression.reduce(given, transport, variables=chosen)
        kept = [float(tf.norm(state["residual"])) for state in compression._states]
        return sums, kept

    sums, kept = Meeting(2).run(reduce)[0]
    assert [total.shape for total in sums] == [(30, 30), (40, 30)]
    assert kept[1] == 0 and kept[0] > 1 and kept[2] > 1


def test_gradients_of_unknown_variables_are_refused():
    gradients = Gradients([(4, 4)], 1)
    compression = GradientCompression("fp16", gradients.variables)
    with pytest.raises(ValueError, match="Received gradients of others: .*'other'"):
        compression.reduce([None], None, variables=[Variable("other", (4, 4))])
    with pytest.raises(ValueError, match="each of 1 variables. Received: 2"):
        compression.reduce([None, None], None)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, tf.bfloat16), (6, tf.bfloat16), (7, tf.bfloat16), (7, tf.float16)]
)
def test_halves_are_added_where_the_library_cannot(size, dtype):
    rng = np.random.default_rng(0)
    parts = [tf.cast(rng.normal(size=size), dtype) for _ in range(3)]

    def reduce(transport):
        def all_gather(part):
            return transport.all_gather([part])[0]

        def all_to_all(parts):
            return all_gather(parts)[:, transport.rank]

        return sum_halves(parts[transport.rank], 3, all_to_all, all_gather)

    total = sum(np.asarray(part, "float32") for part in parts)
    for received in Meeting(3).run(reduce):
        assert received.dtype == dtype
        np.testing.assert_array_equal(received, tf.cast(total, dtype))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_two_workers_add_halves_by_the_sum_of_their_bits(dtype):
    """Values of all sizes, an overflow, and what is not a number, in shapes of odd sizes."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-20, 15, [2, 5, 3])
    numbers = rng.normal(size=[2, 5, 3]) * 2.0**exponents
    special = [[np.inf, 1.0, -np.inf, -0.0], [1.0, np.nan, np.inf, 0.0]]
    parts = [[tf.cast(each[rank], dtype) for each in (numbers, special)] for rank in (0, 1)]
    parts = [[*both, tf.zeros([0, 2], dtype)] for both in parts]

    def reduce(transport):
        workers = Workers(transport)
        return WorkersTransport(workers, transport.rank, 2).all_reduce_sum(parts[transport.rank])

    meeting = Meeting(2)
    for received in meeting.run(reduce):
        for total, first, second in zip(received, *parts, strict=True):
            assert total.dtype == dtype
            np.testing.assert_array_equal(*(tf.cast(x, "float32") for x in (total, first + second)))
    assert meeting.sent == [("sum", 20 * 2)]  # bytes of 19 values, and of one for an even number


@pytest.mark.parametrize("size", [0, 2])
def test_two_workers_add_all_dtypes_in_one_collective(size):
    """And as ever where it shows that there is no value of 16 bits."""
    rng = np.random.default_rng(0)
    dtypes = [tf.float32, tf.float16, tf.float32]
    parts = [[tf.cast(rng.normal(size=[3, 5]), dtype) for dtype in dtypes] for _ in range(2)]

    def reduce(transport):
        workers, own = Workers(transport), parts[transport.rank]
        add = WorkersTransport(workers, transport.rank, 2).all_reduce_sum
        signature = [[tf.TensorSpec([None, 5], dtype) for dtype in dtypes]]
        step = tf.function(add, input_signature=signature, autograph=False)
        return step([own[0], own[1][:size], own[2]])

    meeting = Meeting(2)
    for received in meeting.run(reduce):
        for total, first, second in zip(received, *parts, strict=True):
            assert total.dtype == first.dtype
            expected = first + second
            np.testing.assert_array_equal(total, expected[: len(total)])
    halves = 2 * (5 * size + 1) // 4 * 4 if size else 0
    assert meeting.sent == [("sum", 2 * 3 * 5 * 4 + halves)]


class Workers:
    """What sums over workers, of a strategy."""

    def __init__(self, transport):
        self._sum_list_between_hosts = transport.all_reduce_sum
