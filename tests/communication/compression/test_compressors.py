"""What every compressor promises, whatever it sends."""

import numpy as np
import pytest
import tensorflow as tf

from tests.communication.compression.ranks import Gradients, Meeting
from tfparallel.communication.compression.names import as_compressor
from tfparallel.compression import (
    QSGD,
    Cast,
    GradientCompression,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)

pytestmark = pytest.mark.turns

COMPRESSORS = [
    Cast("float16"),
    Cast("bfloat16"),
    TopK(0.1),
    RandomK(0.1),
    RandomK(0.1, error_feedback=False),
    PowerSGD(2),
    QSGD(8),
    QSGD(4),
    QSGD(2),
    TernGrad(),
    SignSGD(),
]
LINEAR = [each for each in COMPRESSORS if each.sends_sums]
WITH_FEEDBACK = [each for each in COMPRESSORS if each.has_error_feedback]
UNBIASED = [QSGD(8), QSGD(4), QSGD(2), TernGrad(), RandomK(0.1, error_feedback=False)]
SHAPES = [(40, 30), (30,), (3, 3, 4, 16), (), (0, 5)]


@pytest.fixture
def meeting():
    return Meeting(3)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_all_ranks_get_the_same_bits(meeting, compressor):
    steps = 3
    gradients = Gradients(SHAPES, meeting.num_ranks)

    def train(transport):
        compression = GradientCompression(compressor, gradients.variables)
        step = tf.function(lambda g: compression.reduce(g, transport))
        return [step(gradients.of(transport.rank, i)) for i in range(steps)]

    first, *others = meeting.run(train)
    for other in others:
        tf.nest.map_structure(np.testing.assert_array_equal, first, other)
    for sums, shape in zip(zip(*first, strict=True), SHAPES, strict=True):
        assert all(total.shape == shape for total in sums)


@pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=repr)
def test_what_was_sent_and_what_is_kept_is_what_was_given(meeting, compressor):
    """After any number of steps, to rounding."""
    shapes, steps = SHAPES[:3], 4
    gradients = Gradients(shapes, meeting.num_ranks)

    def train(transport):
        compression = GradientCompression(compressor, gradients.variables)
        sums = [
            compression.reduce(gradients.of(transport.rank, i), transport) for i in range(steps)
        ]
        kept = [state.get("residual", tf.zeros(())) for state in compression._states]
        return [tf.add_n(each) for each in zip(*sums, strict=True)], [k.numpy() for k in kept]

    results = meeting.run(train)
    sent = results[0][0]
    for i in range(len(shapes)):
        given = gradients.total(i, range(steps))
        kept = sum(np.asarray(of_rank[1][i], "float64") for of_rank in results)
        np.testing.assert_allclose(sent[i] + kept, given, rtol=0, atol=1e-5)
        assert len(shapes[i]) == 1 or np.max(np.abs(kept)) > 0.1


@pytest.mark.parametrize("compressor", LINEAR, ids=repr)
def test_the_sum_of_the_compressed_is_the_compressed_sum(compressor):
    """What several ranks get is what one gets that has the sum of their gradients."""
    shapes = SHAPES[:3]
    gradients = Gradients(shapes, 3)

    def reduced(meeting, gradient_of):
        def reduce(transport):
            compression = GradientCompression(compressor, gradients.variables)
            return compression.reduce(gradient_of(transport.rank), transport)

        return meeting.run(reduce)[0]

    several = reduced(Meeting(3), lambda rank: gradients.of(rank, 0))
    total = [tf.constant(gradients.total(i, [0]), tf.float32) for i in range(len(shapes))]
    one = reduced(Meeting(1), lambda rank: total)
    rtol = {"Cast('float16')": 2e-3, "Cast('bfloat16')": 2e-2}.get(repr(compressor), 1e-5)
    for a, b in zip(several, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * 5)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_the_wire_carries_the_bytes_that_the_report_states(compressor):
    shapes = [(40, 30), (30,), (3, 3, 4, 17)]
    gradients, meeting = Gradients(shapes, 3), Meeting(3)

    def reduce(transport):
        compression = GradientCompression(compressor, gradients.variables)
        compression.reduce(gradients.of(transport.rank, 0), transport)
        return compression.report(3)

    report = meeting.run(reduce)[0]
    around_the_ring = meeting.bytes_sent("sum") * 4 / 3  # 2 (N - 1) / N
    to_each_other = meeting.bytes_sent("gather") * 2
    assert report.bytes_sent == pytest.approx(around_the_ring + to_each_other, abs=3)
    assert report.bytes_uncompressed == pytest.approx(4 * (1200 + 30 + 612) * 4 / 3, abs=3)
    assert report.bytes_sent < 0.6 * report.bytes_uncompressed
    assert repr(compressor) in str(report)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_all_ranks_see_an_overflow_of_one_and_forget_that_step(compressor):
    """In any tensor; and the state is what it would be without that step."""
    shapes = SHAPES[:3]
    gradients, meeting = Gradients(shapes, 2), Meeting(2)

    def train(transport, overflows):
        compression = GradientCompression(compressor, gradients.variables)
        step = tf.function(lambda g: compression.reduce(g, transport))
        step(gradients.of(transport.rank, 0))
        for i in overflows:
            bad = gradients.of(transport.rank, 1)
            if transport.rank == 1:
                value = [np.nan, np.inf, -np.inf][i]
                bad[i] = bad[i] + np.where(np.arange(bad[i].shape[-1]) == 7, value, 0)
            sums = step(bad)
            assert not np.all(np.isfinite(sums[i])), "the overflow is gone"
        return step(gradients.of(transport.rank, 2))

    expected = meeting.run(lambda transport: train(transport, overflows=[]))[0]
    for received in meeting.run(lambda transport: train(transport, overflows=range(3))):
        tf.nest.map_structure(np.testing.assert_array_equal, received, expected)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_zero_gradients_stay_zero(compressor):
    gradients, meeting = Gradients(SHAPES, 2), Meeting(2)
    zeros = [tf.zeros(shape) for shape in SHAPES]

    def train(transport):
        compression = GradientCompression(compressor, gradients.variables)
        step = tf.function(lambda: compression.reduce(zeros, transport))
        return [step() for _ in range(2)]

    for total in tf.nest.flatten(meeting.run(train)):
        assert not np.any(total)


@pytest.mark.parametrize(
    "compressor",
    [QSGD(8), QSGD(4), QSGD(2), TernGrad(), RandomK(0.1, error_feedback=False)],
    ids=repr,
)
def test_the_expectation_is_the_gradient(compressor):
    """The mean of n draws is off by the variance over n, over 720 values."""
    gradients, meeting, draws = Gradients([(12, 60)], 2), Meeting(2), 200

    def train(transport):
        compression = GradientCompression(compressor, gradients.variables)
        step = tf.function(lambda g: compression.reduce(g, transport))
        return [step(gradients.of(transport.rank, 0))[0].numpy() for _ in range(draws)]

    received = np.stack(meeting.run(train)[0]).astype("float64")
    squared_error = np.sum((received.mean(0) - gradients.total(0, [0])) ** 2)
    assert squared_error < 1.5 * np.sum(received.var(0)) / draws + 1e-6
    assert np.max(received.var(0)) > 0, "nothing is random"


def test_ranks_round_independently():
    """Else errors of all ranks would add up instead of averaging out."""
    gradients, meeting = Gradients([(12, 60)], 2), Meeting(2)
    same = gradients.of(0, 0)

    def reduce(transport):
        return GradientCompression(QSGD(2), gradients.variables).reduce(same, transport)[0]

    total = meeting.run(reduce)[0].numpy()
    largest = float(np.max(np.abs(same[0])))
    assert np.any(np.isclose(np.abs(total), largest)), "no value was rounded differently"


def test_float16_is_divided_before_the_sum():
    """50000 on each of two ranks: their sum is not a float16, their mean is."""
    gradients, meeting = Gradients([(4, 4)], 2), Meeting(2)

    def reduce(transport):
        compression = GradientCompression("fp16", gradients.variables)
        return compression.reduce([tf.fill([4, 4], 50000.0)], transport)[0]

    np.testing.assert_allclose(meeting.run(reduce)[0], np.full((4, 4), 100000.0), rtol=1e-3)


@pytest.mark.parametrize("size", [100, 70_000, 200_000])
@pytest.mark.parametrize("kind", ["normal", "equal", "few"])
def test_top_k_finds_the_largest(size, kind):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1, size)).astype("float32")
    if kind == "equal":
        values = np.ones_like(values)
    elif kind == "few":  # a sample of them is all zeros
        values *= np.arange(size) < 5
    (sent, indices), _ = TopK(0.01).compress(tf.constant(values), {}, None)
    k = -(-size // 100)
    assert len(set(indices.numpy())) == k
    np.testing.assert_array_equal(sent, values[0, indices.numpy()])
    np.testing.assert_array_equal(np.sort(np.abs(sent)), np.sort(np.abs(values[0]))[-k:])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: Cast("float32"), "float16"),
        (lambda: TopK(0.0), "above 0"),
        (lambda: TopK(0.6), "below 0.5"),
        (lambda: RandomK(1.0), "below 1"),
        (lambda: PowerSGD(0), "rank"),
        (lambda: PowerSGD(2.0), "rank"),
        (lambda: QSGD(3), "2, 4 or 8"),
        (lambda: as_compressor("zip"), "'fp16', 'bf16'"),
        (lambda: as_compressor(3), "Received: 3"),
    ],
)
def test_wrong_arguments_are_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        wrong()


def test_names():
    assert repr(as_compressor("fp16")) == "Cast('float16')"
    assert repr(as_compressor("bf16")) == "Cast('bfloat16')"
    assert repr(as_compressor("powersgd")) == "PowerSGD(rank=4)"  # as it was spelled once
    compressor = PowerSGD(3)
    assert as_compressor(compressor) is compressor
