"""A table of a model's stages: what is where, and what share of time and memory it takes."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from tfparallel.pipeline.memory import num_values, parameter_bytes
from tfparallel.pipeline.parts import variables_by_part
from tfparallel.pipeline.stages import Stages

_WIDTH = 100  # of a table that is made into text


class StageSummary(NamedTuple):
    """One stage.

    Attributes:
        stage: its index.
        device: its name.
        layers: names of its layers, as `Part.name`, in the order in which they run.
        num_parameters: numbers in the variables that live there.
        time_share: its share of the model's time, forward and backward; None if not measured.
        parameter_bytes: of its variables, two copies of their gradients, optimizer slots.
        activation_bytes: of its layers' outputs, for all microbatches that it holds at once; None
            if not measured.
    """

    stage: int
    device: str
    layers: tuple[str, ...]
    num_parameters: int
    time_share: float | None
    parameter_bytes: int
    activation_bytes: int | None


@dataclass(frozen=True)
class Summary:
    """The stages of a model; `print` it.

    Attributes:
        model_name: of the model.
        stages: one for each stage.
    """

    model_name: str
    stages: tuple[StageSummary, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"Stages of model '{self.model_name}'")
        for heading in ("stage", "device", "layers"):
            table.add_column(heading, overflow="fold")
        for heading in ("parameters", "time", "parameter bytes", "activation bytes"):
            table.add_column(heading, justify="right")
        for row in self.stages:
            table.add_row(
                str(row.stage),
                row.device,
                _list_layers(row.layers),
                f"{row.num_parameters:,}",
                "-" if row.time_share is None else f"{row.time_share:.0%}",
                f"{row.parameter_bytes:,}",
                "-" if row.activation_bytes is None else f"{row.activation_bytes:,}",
            )
        yield table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=_WIDTH, color_system=None).print(self)
        return text.getvalue()


def short_name(device: str) -> str:
    """A device as tables name it: "GPU:1", or "worker 1 CPU:0" in another process."""
    spec: Any = tf.DeviceSpec.from_string(device)
    own = f"{spec.device_type}:{spec.device_index}"
    return own if spec.job in (None, "localhost") else f"{spec.job} {spec.task} {own}"


def summarise(
    model_name: str, stages: Stages, devices: Sequence[Sequence[str]], live: Sequence[int]
) -> Summary:
    """The summary of `stages`.

    Args:
        model_name: of the model.
        stages: of the model.
        devices: for each stage its device in each pipeline.
        live: how many microbatches each stage holds at once.
    """
    owned = variables_by_part(stages.parts)
    rows = []
    for stage, own_devices in enumerate(devices):
        at = [i for i, own in enumerate(stages.stage_of) if own == stage]
        variables = [variable for i in at for variable in owned[i]]
        shares, activations = stages.time_shares, stages.activation_bytes
        rows.append(
            StageSummary(
                stage,
                ", ".join(map(short_name, own_devices)),
                tuple(dict.fromkeys(stages.parts[i].name for i in at)),
                sum(num_values(variable) for variable in variables),
                sum(shares[i] for i in at) if shares else None,
                parameter_bytes(variables),
                live[stage] * sum(activations[i] for i in at) if activations else None,
            )
        )
    return Summary(model_name, tuple(rows))


def _list_layers(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)})"
