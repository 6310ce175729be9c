"""The `input_signature` of a `tf.function` of one replica, as that of the function of all replicas.

What a replica is given as a tensor, all are given as one `PerReplica` of tensors:

    TensorSpec([None, 3])    ->    PerReplicaSpec(TensorSpec([None, 3]), TensorSpec([None, 3]))
"""

from collections.abc import Sequence

import keras

from tfparallel.internals import PerReplica, PerReplicaSpec


def signature_of_all(signature: Sequence, args: tuple) -> Sequence:
    """`signature` with a spec for each replica where `args` have a value for each.

    Args:
        signature: for each positional argument a nest of specs.
        args: what is called with. Where they do not fit, `signature` is returned as it is, which
            they are then refused by.
    """
    try:
        return tuple(
            keras.tree.map_structure_up_to(own, _spec_of_all, own, arg)
            for own, arg in zip(signature, args, strict=True)
        )
    except (TypeError, ValueError):
        return signature


def _spec_of_all(spec: object, value: object) -> object:
    return PerReplicaSpec(*[spec] * len(value.values)) if isinstance(value, PerReplica) else spec
