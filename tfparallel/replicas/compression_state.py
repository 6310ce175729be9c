"""What the compression of a model's gradients remembers from step to step, on this worker."""

from collections.abc import Sequence

import keras
import numpy as np

from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.training import GradientMemory, training_of


def compression_state(model: keras.Model) -> dict[str, np.ndarray]:
    """What this worker's gradient compression remembers; empty where nothing is compressed."""
    return {
        prefix + name: array
        for prefix, compression in _compressions_of(model).items()
        for name, array in compression.state().items()
    }


def set_compression_state(
    model: keras.Model, states: Sequence[dict[str, np.ndarray]], num_workers: int
) -> None:
    """Sets what `compression_state` returned: on this worker, or, if they were others, on all.

    Raises:
        ValueError: if gradients were compressed otherwise, with what was expected and received.
    """
    if not any(states):
        return  # to begin, or to end, compressing is a change of the script that loses nothing else
    for prefix, compression in _compressions_of(model).items():
        try:
            compression.set_state([_of_prefix(prefix, state) for state in states], num_workers)
        except (KeyError, ValueError) as error:
            raise ValueError(
                "Gradients must be compressed as they were. Received: "
                f"{compression.compressor!r}, and what another compressor remembers ({error})."
            ) from error


def _compressions_of(model: keras.Model) -> dict[str, GradientMemory]:
    """What compresses the gradients of each optimizer, by how its arrays' names begin."""
    training = training_of(model.distribute_strategy)
    numbered = [(i, each) for i, each in enumerate(optimizers_of(model)) if each.built]
    found = {f"optimizer_{i}/" if i else "": training.compression_of(each) for i, each in numbered}
    return {prefix: each for prefix, each in found.items() if each is not None}


def _of_prefix(prefix: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not prefix:
        return {name: array for name, array in state.items() if not name.startswith("optimizer_")}
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state[name] for name in names}
