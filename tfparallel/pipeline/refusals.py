"""What a pipeline refuses, before it trains wrongly or crashes far away."""

import keras

from tfparallel.internals.keras_layers import layers_of
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.validation import validate


def check_schedule(schedule: Schedule, num_devices: int, num_microbatches: int | None) -> None:
    """Refuses a schedule that cannot be carried out, or not on so many devices.

    Raises:
        ValueError: naming both numbers.
    """
    validate(schedule)
    if schedule.num_devices != num_devices:
        raise ValueError(
            f"A schedule must have as many devices as the strategy. Received: schedule "
            f"{schedule.name!r} of {schedule.num_devices} devices, {num_devices} devices."
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        raise ValueError(
            f"A schedule holds the number of microbatches. Received: schedule {schedule.name!r} of "
            f"{schedule.num_microbatches} microbatches, num_microbatches={num_microbatches}."
        )


def check_batch_norm(model: keras.Model) -> None:
    """Refuses synchronised BatchNorm.

    Raises:
        ValueError: naming its layers.
    """
    layers = [layer.name for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if layers:
        raise ValueError(
            "BatchNormalization(synchronized=True) needs all rows of a batch at once, which the "
            f"microbatches of a pipeline never are. Received: layers {layers[:5]} of model "
            f"'{model.name}'. Use synchronized=False: each microbatch is then normalised by its "
            "own statistics."
        )
