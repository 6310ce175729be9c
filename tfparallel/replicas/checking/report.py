"""What `strategy.check` found, as a table."""

import io
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_WIDTH = 100  # of a table that is made into text


@dataclass(frozen=True)
class Difference:
    """One number, or array of numbers, after the step.

    Attributes:
        name: path of a variable, or name of a logged number.
        kind: "weight", "state" (of a layer), "optimizer" or "log".
        change: the most that the step on one device moved it by.
        difference: the largest under the strategy, on any replica of this process.
        rounding: up to what it is rounding: a multiple of what moving the weights in their last
            digit does on one device.
        in_float64: `difference` of the same step in float64; None if not asked for.
    """

    name: str
    kind: str
    change: float
    difference: float
    rounding: float
    in_float64: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether it is rounding; a NaN where one device has none is not."""
        return self.difference <= self.rounding


@dataclass(frozen=True)
class StepCheck:
    """One step on one device and under a strategy; `print` it.

    Attributes:
        model: name of the model.
        strategy: name of the strategy's class.
        differences: of weights, states of layers, optimizer variables and logs, in this order.
        verdict: "equal" (within rounding), "explained" (by `causes`) or "unexplained".
        causes: what makes the difference, each a sentence.
        rank: the process that speaks; None where there is one only.
    """

    model: str
    strategy: str
    differences: tuple[Difference, ...]
    verdict: str
    causes: tuple[str, ...] = ()
    rank: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        speaker = "" if self.rank is None else f" (rank {self.rank} is speaking)"
        table = Table(title=f"One step of '{self.model}' under {self.strategy}{speaker}")
        table.add_column("", overflow="fold")
        headings = ["moved by", "difference", "rounding is up to"]
        has_float64 = any(each.in_float64 is not None for each in self.differences)
        for heading in headings + ["in float64"] * has_float64:
            table.add_column(heading, justify="right")
        for each in self._rows():
            mark = "" if each.is_equal else " *"
            numbers = each.change, each.difference, each.rounding, each.in_float64
            columns = numbers if has_float64 else numbers[:3]
            table.add_row(each.name + mark, *map(_short, columns))
        yield table
        yield self._words()

    def _rows(self) -> list[Difference]:
        """All but the optimizer's variables that are equal: there are two for each weight."""
        return [each for each in self.differences if each.kind != "optimizer" or not each.is_equal]

    def _words(self) -> str:
        if self.verdict == "equal":
            return "Equal within rounding."
        if self.verdict == "explained":
            return "\n".join(["Differs (*), and this is why:", *self.causes])
        return "\n".join(
            [
                "Differs (*), and nothing that we know explains it. Please report this model and "
                "batch.",
                *self.causes,
            ]
        )

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue()


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.1e}"
