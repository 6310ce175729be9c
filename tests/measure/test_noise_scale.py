"""The estimates' mean over all batches that can be drawn, in rationals, is the truth itself."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tfparallel.measure.noise_scale import (
    Estimate,
    NoiseScale,
    efficiency,
    estimate,
    forecast_steps,
    local_square,
    noise_rows,
    suggest,
)

# Gradients of the rows of a small population, in two dimensions.
POPULATION = [
    (Fraction(3), Fraction(1)),
    (Fraction(-1), Fraction(2)),
    (Fraction(1, 2), Fraction(-4)),
]
SPLITS = [(2, 1), (3, 1), (2, 1, 1), (1, 1), (2, 2), (2, 0, 1)]


def mean(vectors):
    return tuple(sum(each, Fraction(0)) / len(vectors) for each in zip(*vectors, strict=True))


def square(vector):
    return sum(x * x for x in vector)


def truth():
    """|G|^2 and S of the population."""
    center = mean(POPULATION)
    spread = [tuple(a - b for a, b in zip(each, center, strict=True)) for each in POPULATION]
    return square(center), sum(map(square, spread), Fraction(0)) / len(POPULATION)


def shares(batch, split):
    """The mean gradient of each replica's rows; None of one without rows."""
    rows = iter(batch)
    parts = [list(itertools.islice(rows, n)) for n in split]
    return [mean(part) if part else None for part in parts]


def all_batches(split):
    return itertools.product(POPULATION, repeat=sum(split))


def of_batch(batch, split):
    squares = [Fraction(0) if g is None else square(g) for g in shares(batch, split)]
    groups = sum(n > 0 for n in split)
    return estimate(sum(split), groups, local_square(split, squares), square(mean(list(batch))))


def averaged(split, formula):
    every = [formula(batch, split) for batch in all_batches(split)]
    return tuple(sum(each, Fraction(0)) / len(every) for each in zip(*every, strict=True))


@pytest.mark.parametrize("split", SPLITS)
def test_the_mean_over_all_batches_is_exact(split):
    assert averaged(split, of_batch) == truth()


def equal_shares_formula(batch, split):
    """AdaptDL's and KungFu's: replicas count alike."""
    gradients = [g for g in shares(batch, split) if g is not None]
    count, rows = len(gradients), Fraction(sum(split))
    together = square(mean(gradients))
    local = sum(map(square, gradients), Fraction(0)) / count
    return (count * together - local) / (count - 1), rows / count * (local - together) * count / (
        count - 1
    )


def test_the_formula_of_equal_shares_is_right_for_those_only():
    assert averaged((2, 2), equal_shares_formula) == truth()
    for split in [(2, 1), (3, 1), (2, 1, 1)]:
        assert averaged(split, equal_shares_formula)[1] != truth()[1]


def test_a_quadratic_with_known_covariance():
    """Of many batches in floating point, uneven: |G|^2 = 25, S = trace of the covariance."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    center = np.array([3.0, 4.0, 0, 0, 0, 0])
    split, estimates = (5, 3, 1), []
    for _ in range(4000):
        rows = center + rng.normal(size=(9, 6)) @ root.T
        parts = np.split(rows, np.cumsum(split)[:-1])
        squares = [float(np.sum(part.mean(0) ** 2)) for part in parts]
        together = float(np.sum(rows.mean(0) ** 2))
        estimates.append(estimate(9, 3, local_square(split, squares), together))
    squared, variance = np.mean(estimates, 0)
    assert squared == pytest.approx(25, rel=0.05)
    assert variance == pytest.approx(np.trace(root @ root.T), rel=0.05)


def test_one_replica_has_nothing_to_compare():
    with pytest.raises(ValueError, match="at least 2"):
        estimate(8, 1, 1.0, 1.0)


def test_efficiency_of_pollux():
    """(phi + b0) / (phi + b) with S of one row; a scale of S that is wrong by b shows off b0."""
    scale = noise_rows(Estimate(1.0, 100.0))
    assert efficiency(scale, 10, 20) == pytest.approx(110 / 120)
    assert efficiency(scale, 10, 10) == 1
    assert efficiency(scale * 10, 10, 10) == 1  # which is why b = b0 proves nothing
    assert efficiency(scale, 10, 5) > 1
    assert efficiency(math.inf, 10, 1000) == 1


def test_smoothing_is_of_both_parts_apart():
    """Constant estimates come out at once; ratios of single ones are not averaged."""
    scale = NoiseScale(decay=0.5)
    assert scale.rows is None
    scale.add(Estimate(2.0, 30.0))
    assert scale.smoothed == Estimate(2.0, 30.0)
    assert scale.rows == 15
    scale.add(Estimate(-1.0, 30.0))  # by itself it says infinity
    assert scale.smoothed == Estimate(pytest.approx(0.0), pytest.approx(30.0))
    scale.add(Estimate(4.0, 30.0))
    assert scale.rows == pytest.approx(30 / ((0 + 4.0 * 0.5 - 1.0 * 0.25 + 2.0 * 0.125) / 0.875))


def test_a_suggestion():
    assert suggest(256.4, 64) == (256, 4.0, 2.0)
    assert suggest(math.inf, 64) is None
    assert suggest(0.0, 64) is None


def steps_of_a_quadratic(scale, batch_size, factor=1e-6):
    """Until E|w|^2 / 2 has fallen by `factor`, at the learning rate at which it falls fastest.

    The gradient is w, its noise in a batch of b rows has the square `scale |w|^2 / b`: a step of
    rate e leaves (1 - e)^2 + e^2 scale / b of E|w|^2.
    """
    rates = np.linspace(0, 1, 200_001)[1:]
    left = ((1 - rates) ** 2 + rates**2 * scale / batch_size).min()
    return math.log(factor) / math.log(left)


@pytest.mark.parametrize("batch_size", [4, 16, 64])
def test_the_forecast_is_that_of_a_quadratic_whose_learning_rates_are_the_best(batch_size):
    """Where steps are short: the equation is of their first order."""
    scale, measured = 4000, 8
    stretches = [(steps_of_a_quadratic(scale, measured), scale)]
    forecast = forecast_steps(stretches, measured, batch_size)
    assert forecast == pytest.approx(steps_of_a_quadratic(scale, batch_size), rel=0.01)


def test_the_forecast_follows_a_noise_scale_that_grows():
    """First none at all, then nothing else: as many steps, and as many rows."""
    assert forecast_steps([(100, 0.0)], 32, 8) == 100
    assert forecast_steps([(100, math.inf)], 32, 8) == 400
    assert forecast_steps([(100, 0.0), (50, 96), (20, math.inf)], 32, 96) == pytest.approx(
        100 + 50 * 2 / 4 + 20 / 3
    )
