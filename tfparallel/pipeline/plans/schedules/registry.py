"""The schedules by name."""

import difflib
from collections.abc import Callable

from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.schedules.gpipe import gpipe
from tfparallel.pipeline.plans.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from tfparallel.pipeline.plans.schedules.one_f_one_b import one_f_one_b
from tfparallel.pipeline.plans.schedules.zero_bubble import zero_bubble

# Functions of the number of devices, then of microbatches; interleaved 1F1B also of chunks.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_one_f_one_b,
    "zero_bubble": zero_bubble,
}


_CHUNKS = 2  # of interleaved 1F1B, by default
_MICROBATCHES = 4  # for each stage, by default


def build_schedule(
    name: str,
    num_devices: int,
    num_microbatches: int | None = None,
    chunks_per_device: int | None = None,
) -> Schedule:
    """Build the schedule of that name.

    Args:
        name: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble".
        num_devices: devices.
        num_microbatches: microbatches of a batch. Default: 4 for each stage.
        chunks_per_device: stages on each device; for "interleaved_1f1b" only, where the default
            is 2. The others have one stage on each device.

    Raises:
        ValueError: if there is no schedule of that name, or if it does not take these counts.
    """
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"The schedule must be one of {names}. Received: {name!r}.{hint}")
    is_interleaved = name == "interleaved_1f1b"
    if not is_interleaved and chunks_per_device not in (None, 1):
        raise ValueError(
            f"Schedule {name!r} has one stage on each device. Received: "
            f"chunks_per_device={chunks_per_device!r}. Leave it out, or use 'interleaved_1f1b'."
        )
    if chunks_per_device is None:
        chunks_per_device = _CHUNKS if is_interleaved else 1
    if num_microbatches is None:
        check_counts(chunks_per_device=chunks_per_device)
        num_microbatches = _MICROBATCHES * num_devices * chunks_per_device
    chunks = (chunks_per_device,) if is_interleaved else ()
    return SCHEDULES[name](num_devices, num_microbatches, *chunks)
