"""Pictures of a training: shares by epoch, throughput, noise scale, goodput over batch sizes.

Each draws into axes of matplotlib that it is given.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfparallel.measure.noise_scale import efficiency
from tfparallel.measure.shares import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "input": "#edc948",
    "compute": "#59a14f",
    "communication": "#b07aa1",
    "bubble": "#76b7b2",
    "imbalance": "#e15759",
    "host": "#4e79a7",
    "saving": "#9c755f",
    "tracing": "#ff9da7",
    "validation": "#bab0ac",
}
_MOST = 64  # points on a curve


def draw_shares(axes: "Axes", records: Sequence[Mapping[str, Any]]) -> None:
    """Stacked shares of the wall time.

    Args:
        axes: to draw into.
        records: of epochs, as `read_records` gives them.
    """
    epochs = [record["epoch"] + 1 for record in records]
    bottom = [0.0] * len(records)
    for category in CATEGORIES:
        shares = [record["shares"][category] for record in records]
        if max(shares) >= 5e-4:
            axes.bar(epochs, shares, bottom=bottom, label=category, color=COLOURS[category])
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1)
    _label(axes, "epoch", "share of the wall time")
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def draw_throughput(axes: "Axes", records: Sequence[Mapping[str, Any]]) -> None:
    """Samples per second by epoch."""
    known = [(r["epoch"] + 1, r["rows_per_s"]) for r in records if r["rows_per_s"] is not None]
    axes.plot(*zip(*known, strict=True), marker="o", color="#4e79a7")
    axes.set_ylim(bottom=0)
    _label(axes, "epoch", "samples/s")


def draw_noise_scale(axes: "Axes", records: Sequence[Mapping[str, Any]], batch_size: int) -> None:
    """The noise scale by epoch, which is the batch size it suggests, beside the present one."""
    known = _noise_by_epoch(records)
    axes.plot(
        *zip(*known, strict=True), marker="o", color="#e15759", label="noise scale: suggested"
    )
    axes.axhline(batch_size, color="#4e79a7", linestyle="--", label="batch size")
    axes.set_yscale("log")
    _label(axes, "epoch", "rows")
    axes.legend(fontsize=8, frameon=False)


def draw_goodput(axes: "Axes", scale_rows: float, batch_size: int, step: "StepModel") -> None:
    """Throughput, and throughput times efficiency, over batch sizes; the present one is marked.

    Args:
        axes: to draw into.
        scale_rows: the noise scale.
        batch_size: of the training.
        step: how long steps of other batch sizes take.
    """
    sizes = [batch_size * 2 ** (i / 8 - _MOST / 16) for i in range(_MOST + 1)]
    speeds = [step.rows_per_s(size) for size in sizes]
    worth = [speed * efficiency(scale_rows, batch_size, size) for speed, size in zip(speeds, sizes)]
    best = max(range(len(sizes)), key=worth.__getitem__)
    axes.plot(sizes, speeds, color="#bab0ac", label="samples/s")
    axes.plot(sizes, worth, color="#59a14f", label="goodput: worth in samples of this batch size")
    axes.plot([batch_size], [step.rows_per_s(batch_size)], "o", color="#4e79a7", label="present")
    axes.plot([sizes[best]], [worth[best]], "*", color="#e15759", markersize=11, label="best")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    _label(axes, "rows of a batch", "samples/s")
    axes.legend(fontsize=8, frameon=False)


class StepModel:
    """How long a step of another batch size takes: what rows take in proportion, the rest as it is.

    Args:
        record: of a training; its compute is of rows, communication and host are of steps, and so
            are tracing and all else that an epoch pays once.
        batch_size: of it.
    """

    def __init__(self, record: Mapping[str, Any], batch_size: int):
        steps = max(1, record["steps"])
        seconds = record["seconds"]
        in_rows = sum(seconds[name] for name in ("compute", "bubble", "imbalance", "input"))
        in_steps = sum(seconds[name] for name in ("communication", "host", "saving"))
        self.each_row_s = in_rows / steps / batch_size
        self.each_step_s = in_steps / steps

    def rows_per_s(self, batch_size: float) -> float:
        """Throughput in batches of this size."""
        return batch_size / max(1e-12, self.each_step_s + self.each_row_s * batch_size)


def _noise_by_epoch(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    found = [(record["epoch"] + 1, record["details"].get("noise")) for record in records]
    return [(epoch, noise["rows"]) for epoch, noise in found if noise and noise["rows"]]


def has_noise(records: Sequence[Mapping[str, object]]) -> bool:
    """Whether there is a noise scale to draw."""
    return bool(_noise_by_epoch(records))


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
