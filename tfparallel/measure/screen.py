"""One screen of what an epoch, or a training, has given: for terminals and logs."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tfparallel.measure.record import Record
from tfparallel.measure.verdict import Verdict

_COLOURS = {
    "input": "yellow",
    "compute": "green",
    "communication": "magenta",
    "bubble": "cyan",
    "imbalance": "red",
    "host": "blue",
    "saving": "bright_black",
    "tracing": "bright_yellow",
    "validation": "bright_cyan",
}
_BAR = 40
_SMALLEST = 0.0005
_TOLD_APART = 0.02  # of the wall time


def screen(record: Record, verdict: Verdict, beside: Sequence[str] = ()) -> Group:
    """What is printed.

    Args:
        record: of an epoch or a training.
        verdict: about it.
        beside: more lines: one device, noise, goodput.
    """
    lines: list[Text | Table] = [
        Text(title(record), style="bold"),
        Text(steps_line(record)),
        _bars(record),
    ]
    if record.utilisation:
        each = ", ".join(f"{name} {share:.0%}" for name, share in record.utilisation.items())
        lines.append(Text(f"busy: {each}"))
    lines += [Text(line) for line in beside]
    lines.append(Text(verdict.text, style="bold" if verdict.cause != "none" else ""))
    return Group(*lines)


def title(record: Record) -> str:
    """What is told about, and how fast it was."""
    which = "training" if record.epoch is None else f"epoch {record.epoch + 1}"
    speed = "" if record.rows_per_s is None else f", {record.rows_per_s:,.0f} samples/s"
    return f"{which}: {record.steps} steps in {record.wall_s:.1f} s{speed}"


def steps_line(record: Record) -> str:
    """Step times in one line."""
    step = record.step
    why = f", {step.slowest_because}" if step.slowest_because else ""
    return (
        f"step: median {step.median * 1e3:.1f} ms, p95 {step.p95 * 1e3:.1f} ms, slowest "
        f"{step.slowest * 1e3:.1f} ms (step {step.slowest_step}{why})"
    )


def noise_line(record: Record) -> str:
    """The noise scale and what it suggests; "" where it was not measured."""
    noise = record.details.get("noise")
    if noise is None:
        return ""
    if noise["rows"] is None:
        return "noise scale: all that is seen of the gradient is noise so far"
    line = f"noise scale: {noise['rows']:,.0f} rows"
    if (suggested := noise["suggestion"]) is not None:
        line += (
            f"; a suggestion: batches of {suggested['batch_size']:,} rows, the learning rate times "
            f"{suggested['linear']:.2g} for SGD, {suggested['square_root']:.2g} for Adam or LAMB"
        )
    return line


def efficiency_line(record: Record) -> str:
    """What a row is worth in a batch of this size; "" where noise or size are not known."""
    noise, size = record.details.get("noise"), record.details.get("batch_size")
    if noise is None or noise["efficiency"] is None:
        return ""
    return (
        f"statistical efficiency: {noise['efficiency']:.0%}, what a row is worth in a batch of "
        f"{size:,} beside one alone"
    )


def speed_up_line(record: Record, one_device_rows_per_s: float, num_devices: int) -> str:
    """Against one device, whose speed is of steps alone: without first traces and validation.

    Args:
        record: with rows.
        one_device_rows_per_s: of the one device.
        num_devices: that compute.
    """
    apart_s = record.once_s + record.seconds["validation"]
    if record.rows is None or record.wall_s <= apart_s:
        return ""
    speed_up = record.rows / (record.wall_s - apart_s) / one_device_rows_per_s
    beside = ", without tracing and validation" if apart_s >= _TOLD_APART * record.wall_s else ""
    efficiency = speed_up / num_devices
    return f"speed-up {speed_up:.2f} of {num_devices}, efficiency {efficiency:.0%}{beside}"


def use_line(record: Record) -> str:
    """How much of what the devices could compute was needed; "" where it was not measured."""
    if record.mfu is None or record.flops_per_s is None:
        return ""
    peak = record.details["use"]["peak_flops_per_s"]
    return f"MFU {record.mfu:.1%}: {record.flops_per_s / 1e9:,.1f} of {peak / 1e9:,.1f} GFLOP/s"


def print_screen(group: Group) -> None:
    """To standard output; without colours where that is no terminal."""
    Console(highlight=False).print(group)


def _bars(record: Record) -> Table:
    table = Table.grid(padding=(0, 1))
    for category, share in sorted(record.shares.items(), key=lambda item: -item[1]):
        if share >= _SMALLEST:
            bar = Text("█" * max(1, round(share * _BAR)), style=_COLOURS[category])
            table.add_row(category, f"{share:6.1%}", f"{record.seconds[category]:.2f} s", bar)
    return table
