"""Gradients of split variables stay in parts: each is summed over replicas on its own devices."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.internals import distribute_lib, distribute_utils, record
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.tensor_parallel.known_parts import joined_as, known_parts, parts_of
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


def in_parts(
    gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, stored: bool = False
) -> list[tf.Tensor] | None:
    """A dense gradient as parts of a split variable's; None for any other.

    Args:
        stored: as the variable is stored, instead of computed with.

    Raises:
        ValueError: for one that is not of the whole.
    """
    if not isinstance(variable, SplitVariable) or isinstance(gradient, tf.IndexedSlices):
        return None
    if not gradient.shape.is_compatible_with(variable.shape):
        raise ValueError(
            f"Expected a gradient of shape {variable.shape} for '{variable.name}', which is in "
            f"parts. Received: {gradient.shape}. It was read in a tf.function that a tape around "
            "it differentiates: remove the @tf.function, the step is compiled as a whole."
        )
    if not gradient.shape.is_fully_defined():
        gradient = tf.ensure_shape(gradient, variable.shape)
    rows, known = variable.stored if stored else variable.rows, known_parts(gradient)
    if known is not None and known[0] == rows:
        return list(known[1])
    with record.stop_recording():
        return parts_of(gradient, rows)


def sum_parts(
    gradients: list[list[tf.Tensor]],
    firsts: list[int],
    groups: Sequence[Sequence[str]],
    over_workers: Callable[[list], list] | None,
) -> list[list[tf.Tensor]]:
    """Sums over replicas of gradients in parts, on each part's devices.

    Args:
        gradients: of a replica, each a list of parts; called in a replica context.
        firsts: the number of the device that has part 0, of each.
        groups: the devices of each replica.
        over_workers: adds up tensors of one process and those of others, where there are any.
    """
    sizes = [len(parts) for parts in gradients]
    flat = [part for parts in gradients for part in parts]
    step = current_replica_step()
    if step is not None:
        flat = step.zero_without_rows(flat)
    starts = zip(firsts, sizes, strict=True)
    places = [first + k for first, size in starts for k in range(size)]

    def merge(_: tf.distribute.Strategy, *values: tf.distribute.DistributedValues) -> list:
        sums = [_sum_on(groups[0][k], value) for k, value in zip(places, values, strict=True)]
        if over_workers is not None:
            sums = over_workers(sums)
        return [_copies(groups, k, total) for k, total in zip(places, sums, strict=True)]

    if len(groups) > 1 or over_workers is not None:
        flat = distribute_lib.get_replica_context().merge_call(merge, args=flat)
    summed = iter(flat)
    return [[next(summed) for _ in range(size)] for size in sizes]


def _sum_on(device: str, value: object) -> tf.Tensor:
    """The sum of `value` over replicas."""
    with tf.device(device):
        return sum_in_order(getattr(value, "values", [value]))


def _copies(groups: Sequence[Sequence[str]], part: int, total: tf.Tensor) -> object:
    """A copy of `total` on device number `part` of each group."""
    copies = []
    for group in groups:
        with tf.device(group[part]):
            copies.append(tf.identity(total))
    return distribute_utils.regroup(tuple(copies), always_wrap=True)


def as_whole(parts: list[tf.Tensor], rows: Rows) -> tf.Tensor:
    """The gradient that an optimizer gets."""
    with record.stop_recording():
        return joined_as(parts, rows)
