"""The configuration of a training run: what a YAML file may say.

    strategy: {name: mirrored, devices: ["GPU:0", "GPU:1"]}
    optimizer: {name: adam, learning_rate: 0.001}
    data: {global_batch_size: 64}

Whatever a file leaves out has the default given here. Imports no TensorFlow, so that mistakes in
a file show at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tfparallel.launch.config_problems import ConfigError, describe_problems
from tfparallel.launch.config_yaml import apply_override, read_yaml
from tfparallel.launch.option_sections import Section
from tfparallel.launch.strategy_sections import AnyStrategy, OneDevice, StrategySection


class Devices(Section):
    """What to open before TensorFlow starts. Ignored on a machine with GPUs."""

    logical_cpus: int = Field(default=1, ge=1)


class Model(Section):
    """A small convolutional classifier: convolution and pooling pairs, then one hidden layer.

    The defaults are LeNet's smooth functions. With relu and max, a change of one in the last digit
    of a float32 weight grows to 0.05 in 200 steps, on one device too, so that runs which should be
    equal cannot be compared.
    """

    filters: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = [16, 32]
    hidden_units: int = Field(default=64, ge=1)
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    pooling: Literal["average", "max"] = "average"
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Optimizer(Section):
    """`global_clipnorm` limits the norm of all gradients together, after they are reduced."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.05, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    global_clipnorm: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _momentum_is_for_sgd(self) -> Optimizer:
        if self.momentum and self.name != "sgd":
            raise ValueError(
                f"momentum must be left out for {self.name}, which has its own. "
                f"Received: {self.momentum}"
            )
        return self


class Data(Section):
    """Which examples, and how many rows one step of all replicas together takes.

    `drop_remainder` leaves out an uneven last batch; only TPUs need that.
    """

    train_examples: int = Field(default=4000, ge=1)
    global_batch_size: int = Field(default=64, ge=1)
    drop_remainder: bool = False


class TrainingSection(Section):
    """How long to train; `seed` fixes the initial weights, the shuffling and Dropout."""

    epochs: int = Field(default=3, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
    steps_per_execution: int = Field(default=1, ge=1)


class RunConfig(Section):
    """A training run."""

    strategy: AnyStrategy = OneDevice(name="one_device")
    devices: Devices = Devices()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    training: TrainingSection = TrainingSection()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: the YAML file.
        overrides: `"section.key=value"` each, the value a YAML scalar or list; applied in order,
            over what the file says.

    Raises:
        ConfigError: listing everything that is wrong, in the file and in the overrides.
    """
    document, problems = read_yaml(path)
    readable = not problems
    for override in overrides:
        problems += apply_override(document, override)
    config = RunConfig()
    if readable:
        try:
            config = RunConfig.model_validate(document)
        except ValidationError as error:
            problems += describe_problems(error, RunConfig)
    if problems:
        raise ConfigError(problems, source=str(path))
    return config


def build_strategy(strategy: StrategySection) -> Any:
    """Create the `tf.distribute.Strategy` that a configuration names.

    Call it on every worker, before anything else uses TensorFlow's devices.
    """
    import tfparallel

    arguments = strategy.arguments()
    memory = getattr(strategy, "memory", None)
    if memory is not None:
        arguments["memory"] = tfparallel.MemoryPolicy(**memory.model_dump())
    prefetch_batches = getattr(strategy, "prefetch_batches", None)
    if prefetch_batches is not None:
        arguments["prefetch_batches"] = prefetch_batches
    return getattr(tfparallel, strategy.class_name)(**arguments)
