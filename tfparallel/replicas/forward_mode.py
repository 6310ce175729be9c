"""Derivatives forward, which some strategies cannot give: `tf.autodiff.ForwardAccumulator`.

It follows operations of TensorFlow. What a strategy records by a backward pass of its own, as the
calls of a pipeline's stages and reads of weights in shards, has no forward rule.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.eager import has_tangents
from tfparallel.replicas.own_step import RefusedStepError


def check_is_not_followed(tensors: Sequence[tf.Tensor], what: str) -> None:
    """Refuses a step that takes derivatives forward through something that has none.

    Args:
        tensors: what it takes, as a gradient tape sees it.
        what: it is, for the message.

    Raises:
        RefusedStepError: if a `ForwardAccumulator` follows any of `tensors`.
    """
    if has_tangents(tensors):
        raise no_forward_mode(what)


def no_forward_mode(what: str) -> RefusedStepError:
    """The error of a step in which a `ForwardAccumulator` would have to follow `what`."""
    return RefusedStepError(
        "A step must take derivatives with a tf.GradientTape. Received: a "
        f"tf.autodiff.ForwardAccumulator, which cannot follow {what}. What it gives (jvp) is the "
        "gradient of a gradient, too, by one tape in another. Or take MirroredStrategy, whose "
        "replicas have whole models."
    )
