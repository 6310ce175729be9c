"""How noisy gradients are, from what replicas, ranks or microbatches have already.

Replica i of R computes the mean gradient `g_i` of its own `n_i` of a batch's `N` rows:

    L = sum_i (n_i / N) |g_i|^2            of each alone
    T = |sum_i (n_i / N) g_i|^2            of all together, which the update uses

Rows are independent draws with mean gradient G and a covariance whose trace is S, each. Then
`E L = |G|^2 + R S / N` and `E T = |G|^2 + S / N`, whatever the `n_i` are, so that

    |G|^2 ~ (R T - L) / (R - 1)            S ~ N (L - T) / (R - 1)

have the right mean for any split, where formulas for equal shares have not. R counts replicas that
have rows. S is of one row: the noise of a batch of b rows is S / b.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix
A.1, for two batch sizes; Qiao et al., "Pollux", OSDI 2021, for the efficiency.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Rule = Literal["linear", "square_root"]


class Estimate(NamedTuple):
    """Of one batch, or a mean of several; each has the right mean, and may be negative.

    Attributes:
        squared_gradient: |G|^2.
        variance: S, of one row.
    """

    squared_gradient: float
    variance: float


def local_square(rows: Sequence[float], squares: Sequence[float]) -> float:
    """L: the mean of |g_i|^2, weighted by rows.

    Args:
        rows: of each replica.
        squares: |g_i|^2; of a replica without rows, anything.
    """
    total = sum(rows)
    return sum(n * square for n, square in zip(rows, squares, strict=True) if n) / total


def estimate(num_rows: float, num_groups: int, local: float, together: float) -> Estimate:
    """What one batch tells.

    Args:
        num_rows: N, of the batch.
        num_groups: R, replicas that had rows; at least 2.
        local: L.
        together: T.

    Raises:
        ValueError: for a single replica, which has nothing to compare itself with.
    """
    if num_groups < 2:
        raise ValueError(
            "The noise of gradients shows between replicas, ranks or microbatches that have rows: "
            f"at least 2. Received: {num_groups}."
        )
    return Estimate(
        (num_groups * together - local) / (num_groups - 1),
        num_rows * (local - together) / (num_groups - 1),
    )


@dataclass
class NoiseScale:
    """Estimates smoothed over time, numerator and denominator apart: their ratio is noisy.

    A mean in which the past counts less and less, corrected for its beginning at zero.

    Attributes:
        decay: how much of the past stays with each estimate.
    """

    decay: float = 0.95
    _squared: float = 0.0
    _variance: float = 0.0
    _weight: float = 0.0

    def add(self, each: Estimate) -> None:
        """One more estimate."""
        new = 1 - self.decay
        self._squared = self.decay * self._squared + new * each.squared_gradient
        self._variance = self.decay * self._variance + new * each.variance
        self._weight = self.decay * self._weight + new

    @property
    def smoothed(self) -> Estimate | None:
        """|G|^2 and S; None before the first estimate."""
        if not self._weight:
            return None
        return Estimate(self._squared / self._weight, self._variance / self._weight)

    @property
    def rows(self) -> float | None:
        """S / |G|^2: the batch whose noise is as large as the gradient; None while unknown.

        Infinite where nothing but noise is seen.
        """
        each = self.smoothed
        if each is None:
            return None
        return noise_rows(each)


def noise_rows(each: Estimate) -> float:
    """S / |G|^2, in rows; infinite where |G|^2 is not above zero, zero where S is not."""
    if each.variance <= 0:
        return 0.0
    return each.variance / each.squared_gradient if each.squared_gradient > 0 else math.inf


def efficiency(scale_rows: float, reference: float, batch_size: float) -> float:
    """How much a row is worth in a batch of `batch_size`, as a share of in one of `reference` rows.

    `(scale + reference) / (scale + batch_size)`: Pollux's statistical efficiency, equation 6.

    Args:
        scale_rows: S / |G|^2.
        reference: b0.
        batch_size: b.
    """
    if math.isinf(scale_rows):
        return 1.0
    return (scale_rows + reference) / (scale_rows + batch_size)


def forecast_steps(
    stretches: Iterable[tuple[float, float]], batch_size: float, other_size: float
) -> float:
    """How many steps batches of `other_size` rows need for what those of `batch_size` have done.

    A step of b rows comes as far as `1 / (1 + scale / b)` steps without noise (equation 2.7), each
    at the learning rate that suits it best. So a stretch of n steps, in which the noise scale was
    s, is one of `n (1 + s / other_size) / (1 + s / batch_size)` others. Summed over stretches, as
    the noise scale grows while a training goes on; of one stretch, it is the paper's
    `S_min (1 + s / b)`, where S_min is known from one batch size.

    Args:
        stretches: of a training: how many steps, and the noise scale in rows.
        batch_size: of that training.
        other_size: rows of other batches.

    Source: McCandlish et al., arXiv 1812.06162, equations 2.7 and 2.11, and 5.1 for their integral.
    """
    return sum(
        steps * _steps_for_progress(scale, other_size) / _steps_for_progress(scale, batch_size)
        for steps, scale in stretches
    )


def _steps_for_progress(scale_rows: float, batch_size: float) -> float:
    """Steps in the place of one without noise; of nothing but noise, as many as rows ask for."""
    return 1 / batch_size if math.isinf(scale_rows) else 1 + scale_rows / batch_size


class Suggestion(NamedTuple):
    """A batch size, and the learning rates that would go with it; not more than that.

    Attributes:
        batch_size: where twice the steps' gain is paid with half of the rows' worth.
        linear, square_root: the factor on the learning rate: the first for SGD, the second for
            Adam, LAMB and their like.
    """

    batch_size: int
    linear: float
    square_root: float


def suggest(scale_rows: float, batch_size: int) -> Suggestion | None:
    """The critical batch size, which is the noise scale; None where that is not known.

    Below it, a larger batch saves nearly as many steps as it costs rows; above, few.
    """
    if math.isinf(scale_rows) or scale_rows < 1:
        return None
    size = round(scale_rows)
    return Suggestion(size, size / batch_size, math.sqrt(size / batch_size))
