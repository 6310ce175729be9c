"""What was measured of a training, as one HTML file that needs nothing else and fits a phone."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfparallel.measure.goodput import goodput, read_ledger
from tfparallel.measure.lanes import matplotlib_figure
from tfparallel.measure.noise_scale import suggest
from tfparallel.measure.plots import (
    COLOURS,
    StepModel,
    draw_goodput,
    draw_noise_scale,
    draw_shares,
    draw_throughput,
    has_noise,
)
from tfparallel.measure.reading import FILE, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (5.4, 3.4)  # letters are still read when a phone shows it
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:46rem;padding:1rem;color:#222}
h1{font-size:1.4rem;line-height:1.3}h2{font-size:1.1rem;margin-top:2rem}
.verdict{background:#f3f6fb;border-left:4px solid #4e79a7;padding:.7rem 1rem}
.bar{height:.8rem;border-radius:.2rem;min-width:2px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem .25rem 0;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}td.wide{width:45%}
img{width:100%;height:auto}.lanes img{min-width:44rem}
figure{margin:0}figcaption{font-size:.9rem;color:#555}
"""


def write_report(folder: Path, path: Path) -> None:
    """Writes the report of what `Measure(folder)` has written.

    Args:
        folder: with `measure.jsonl`; a `step.png` in it, of `strategy.profile`, is shown, too.
        path: of the HTML file.

    Raises:
        FileNotFoundError: if nothing was measured there.
        ValueError: if no epoch has ended.
        ImportError: without matplotlib.
    """
    try:
        records = read_records(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "A report is made of what callbacks.Measure(folder=...) has written. Received: "
            f"{folder}, which has no {FILE}."
        ) from error
    epochs = last_training(records)
    if not epochs:
        raise ValueError(
            f"A report needs an epoch that has ended. Received: {folder / FILE} without one."
        )
    path.write_text(_page(folder, records, epochs), encoding="utf-8")


def last_training(records: Sequence[Mapping[str, object]]) -> list[Mapping[str, Any]]:
    """The epochs of the last training in a file that several may have written to.

    A training that ended has a record of its own behind its epochs; numbers of epochs that do not
    rise begin another one.
    """
    found: list[Mapping[str, Any]] = []
    ended = False
    for record in records:
        if record["epoch"] is None:
            ended = True
        elif ended or (found and record["epoch"] <= found[-1]["epoch"]):
            found, ended = [record], False
        else:
            found.append(record)
    return found


def _page(
    folder: Path, records: Sequence[Mapping[str, Any]], epochs: Sequence[Mapping[str, Any]]
) -> str:
    """The page."""
    total = records[-1] if records[-1]["epoch"] is None else epochs[-1]
    title = _title(total)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict">{html.escape(total["verdict"])}</p>',
        *(f"<p>{html.escape(line)}</p>" for line in _lines(total, folder)),
        "<h2>Where the time goes</h2>",
        _bars(total),
        *_pictures(folder, total, epochs),
        "<h2>Epochs</h2>",
        _table(epochs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _title(total: Mapping[str, Any]) -> str:
    speed = total["rows_per_s"]
    words = "" if speed is None else f", {speed:,.0f} samples/s"
    which = "Training" if total["epoch"] is None else f"Until epoch {total['epoch'] + 1}"
    return f"{which}: {total['steps']:,} steps in {total['wall_s']:.1f} s{words}"


def _lines(total: Mapping[str, Any], folder: Path) -> list[str]:
    step = total["step"]
    lines = [
        f"A step takes {step['median'] * 1e3:.1f} ms (median), {step['p95'] * 1e3:.1f} ms (95 %), "
        f"{step['slowest'] * 1e3:.1f} ms at most ({step['slowest_because'] or 'compute'})."
    ]
    if busy := total["utilisation"]:
        lines.append("Busy: " + ", ".join(f"{name} {share:.0%}" for name, share in busy.items()))
    if total.get("mfu") is not None:
        peak = total["details"]["use"]["peak_flops_per_s"] / 1e9
        lines.append(f"MFU {total['mfu']:.1%} of {peak:,.0f} GFLOP/s")
    noise, size = total["details"].get("noise"), total["details"].get("batch_size")
    suggested = suggest(noise["rows"], size) if noise and noise["rows"] and size else None
    if suggested is not None:
        lines.append(
            f"Noise scale {noise['rows']:,.0f} rows. A suggestion: batches of "
            f"{suggested.batch_size:,} rows (now {size:,}), the learning rate times "
            f"{suggested.linear:.2g} for SGD, {suggested.square_root:.2g} for Adam or LAMB."
        )
    if noise and size and noise.get("efficiency") is not None:  # files of 0.1 have none
        lines.append(
            f"Statistical efficiency {noise['efficiency']:.0%}: what a row is worth in a batch of "
            f"{size:,} beside one alone."
        )
    ledger = read_ledger(folder)
    return [*lines, f"{goodput(ledger)}."] if ledger else lines


def _bars(total: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{name}</td><td>{share:.1%}</td><td>{total['seconds'][name]:.2f} s</td>"
        f'<td class="wide"><div class="bar" style="width:{share:.2%};background:{COLOURS[name]}">'
        "</div></td></tr>"
        for name, share in sorted(total["shares"].items(), key=lambda item: -item[1])
        if share >= 5e-4
    ]
    return f"<table>{''.join(rows)}</table>"


def _pictures(
    folder: Path, total: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]
) -> list[str]:
    found = [_picture("Shares by epoch", lambda axes: draw_shares(axes, epochs))]
    if any(each["rows_per_s"] is not None for each in epochs):
        found.append(_picture("Throughput", lambda axes: draw_throughput(axes, epochs)))
    noise, size = total["details"].get("noise"), total["details"].get("batch_size")
    if has_noise(epochs) and size:
        found.append(_picture("Noise scale", lambda axes: draw_noise_scale(axes, epochs, size)))
    if noise and noise["rows"] and size:
        step = StepModel(total, size)
        draw = lambda axes: draw_goodput(axes, noise["rows"], size, step)  # noqa: E731
        found.append(_picture("Goodput over batch sizes", draw))
    if (step_png := folder / "step.png").exists():
        found.append(_figure("One step", step_png.read_bytes(), "scroll lanes"))
    return found


def _picture(caption: str, draw: Callable[["Axes"], None]) -> str:
    figure = matplotlib_figure("A report")(figsize=_SIZE_INCHES, layout="constrained")
    draw(figure.subplots())
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=160)
    return _figure(caption, image.getvalue())


def _figure(caption: str, png: bytes, classes: str = "") -> str:
    """A picture under its caption; `classes` are the page's own."""
    data = base64.b64encode(png).decode()
    alt = html.escape(caption)
    image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
    return f'<h2>{alt}</h2><figure class="{classes}">{image}</figure>'


def _table(epochs: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in COLOURS if any(each["shares"][name] >= 5e-3 for each in epochs)]
    head = "".join(f"<th>{name}</th>" for name in ("epoch", "steps", "samples/s", *names))
    rows = "".join(
        f"<tr><td>{each['epoch'] + 1}</td><td>{each['steps']:,}</td><td>"
        + ("" if each["rows_per_s"] is None else f"{each['rows_per_s']:,.0f}")
        + "</td>"
        + "".join(f"<td>{each['shares'][name]:.1%}</td>" for name in names)
        + "</tr>"
        for each in epochs
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'
