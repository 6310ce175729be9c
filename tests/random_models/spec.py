"""A random training as data: small, printable, and enough to build the same model again.

A model is a list of nodes. Values are numbered: the inputs first, then what each node gives.
"""

from dataclasses import dataclass, field

Shape = tuple[int, ...]  # of one row


@dataclass(frozen=True)
class Layer:
    """One layer: `kind` names a function of `layers.py`, `options` are its arguments."""

    kind: str
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Nested:
    """A model within the model: `layers` one after another, with a residual if the shape allows.

    Attributes:
        kind: "sequential", "functional" or "subclassed".
    """

    kind: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Node:
    """A layer called with values; `again` calls the layer of an earlier node instead.

    Attributes:
        values: numbers of the values that it takes.
        layer: what is called; None with `again`.
        again: the number of the node whose layer is called.
    """

    values: tuple[int, ...]
    layer: Layer | Nested | None = None
    again: int | None = None


@dataclass(frozen=True)
class Output:
    """A value, its head of `classes` numbers, and how it is judged."""

    value: int
    classes: int
    loss: str
    reduction: str | None
    loss_weight: float
    metrics: tuple[str, ...]
    weighted_metrics: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """Inputs by their shapes, nodes and outputs; an input of tokens has the shape `("tokens",)`.

    Attributes:
        policy: the dtype policy of its layers.
        head_policy: that of its heads.
    """

    inputs: tuple
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    policy: str = "float64"
    head_policy: str = "float64"


@dataclass(frozen=True)
class Fit:
    """How a model is trained: two steps, the second one of `last_rows` rows."""

    optimizer: str
    optimizer_options: dict
    batch_size: int
    last_rows: int
    weights: str | None  # "sample", "class" or None
    steps_per_execution: int


@dataclass(frozen=True)
class Distribution:
    """A strategy of tfparallel by its name, and its arguments."""

    name: str
    arguments: dict


@dataclass(frozen=True)
class Trial:
    """A model, its training, and the strategy that must not change it."""

    model: Model
    fit: Fit
    distribution: Distribution
