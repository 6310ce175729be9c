"""An action: one pass of one microbatch through one stage."""

from typing import Literal, NamedTuple, get_args

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: tuple[str, ...] = get_args(Kind)


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    Attributes:
        stage: index of the stage, from 0 (the first layers) to `num_stages - 1` (the loss).
        microbatch: index of the microbatch within its batch.
        kind: "forward"; "backward", the whole backward pass; or its two halves, of which only
            the first is on the way to the stage before: "backward_input", the gradient of the
            stage's input, then "backward_weight", the gradient of the stage's weights.
    """

    stage: int
    microbatch: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on stage {self.stage}"
