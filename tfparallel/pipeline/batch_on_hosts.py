"""A batch of a pipeline whose last stage is on another host than its first.

Targets go there whole, and are cut there. Cut where the inputs are, they, their numbers of rows and
their weights would be a message each for every microbatch.
"""

from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfparallel.replicas.batch import OnHost, OnHosts, Rows


@dataclass(frozen=True)
class _TargetsOnHost(OnHost):
    """Targets, and perhaps sample weights, beside inputs on another host."""

    inputs: OnHost = field(kw_only=True)

    def cut(self, num_replicas: int) -> tuple[list, list, Rows]:
        """`OnHost.cut`, each part with its inputs before it."""
        targets, rows, total = super().cut(num_replicas)
        with tf.device(self.inputs.device):
            inputs, _, _ = self.inputs.cut(num_replicas)
        return [(x, *own) for x, own in zip(inputs, targets, strict=True)], rows, total


def batch_on_hosts(data: object, first: str, last: str, microbatches: range) -> object:
    """`data` as `Batch` takes it, with targets on the last stage's host.

    Args:
        data: of a Keras step: `(x, y)` or `(x, y, sample_weight)`; anything else is left as it is.
        first, last: CPUs of the hosts of the first and the last stage.
        microbatches: the numbers of this process's, among those of all.
    """
    if not isinstance(data, tuple) or len(data) not in (2, 3) or data[1] is None:
        return data
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    shapes = [tf.TensorShape(getattr(leaf, "shape", ())) for leaf in leaves]
    have_rows = all(shape.rank for shape in shapes) and len({shape[0] for shape in shapes}) == 1
    if first == last or not have_rows:
        return data
    with tf.device(last):
        targets = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf), data[1:]
        )
    inputs = OnHost(first, microbatches, data[0])
    return OnHosts([_TargetsOnHost(last, microbatches, targets, inputs=inputs)])
