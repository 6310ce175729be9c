"""Keeps XLA's clustering away from a pipeline's calls, where it finds nothing and takes long."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import run_independently, unique_number
from tfparallel.internals.graphs import run_after
from tfparallel.pipeline.passes import Passes


def hide_from_clustering(graph: tf.Graph, passes: Passes, devices: Sequence[str]) -> None:
    """Puts all calls behind an operation on a reference, of which XLA's clustering stays clear.

    To find references, a pass of TensorFlow over the step's graph unpacks the bodies of all
    functions at every call of them, unless the call comes behind a reference anyway. For 32
    microbatches of MobileNetV2 that was 11 s. There is nothing to cluster across stages.

    Args:
        devices: of each stage.
    """
    for stage, operations in passes.of_stages().items():
        with graph.as_default(), tf.device(devices[stage]):
            name = f"tfparallel_{unique_number()}"
            reference = tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.float32, var_name=name)
            end = tf.raw_ops.DestroyTemporaryVariable(ref=reference, var_name=name)
        run_independently(graph, [reference.op, end.op])
        for operation in operations:
            run_after(operation, end.op)
