"""What a `tf.data.Dataset` keeps to itself, and the arrays behind one of Keras's."""

from typing import Any, NamedTuple

import tensorflow as tf

# The arrays behind a dataset that Keras made of them, for workers that keep arrays.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

__all__ = [
    "ArrayDataAdapter",
    "Arrays",
    "arrays_of",
    "dataset_as_graph",
    "set_state_of_iterator",
    "state_of_iterator",
    "unrepeatable_parts",
]

_STATE = "_STATE"  # the key of an iterator's state in a checkpoint


class Arrays(NamedTuple):
    """What `fit` was given, where that is arrays."""

    arrays: Any  # a nest `(x, y, sample_weight)`
    num_rows: int
    batch_size: int
    is_shuffled: Any  # or "batch"


def arrays_of(adapter: ArrayDataAdapter) -> Arrays:
    """What an adapter of Keras makes batches of. It makes them by itself only."""
    own = adapter
    return Arrays(own._inputs, own._num_samples, own._batch_size, own._shuffle)


def state_of_iterator(iterator: Any) -> tf.Tensor:
    """Where a `tf.data` iterator is, as `tf.train.Checkpoint` saves it: a tensor of strings."""
    return iterator._serialize_to_tensors()[_STATE]


def set_state_of_iterator(iterator: Any, state: tf.Tensor) -> None:
    """Lets a `tf.data` iterator go on from a `state_of_iterator`."""
    iterator._restore_from_tensors({_STATE: state})


def dataset_as_graph(dataset: tf.data.Dataset, largest_bytes: int) -> tf.compat.v1.GraphDef | None:
    """A dataset's graph, or None where it holds Python or unseeded randomness, or is too large.

    TensorFlow offers this for its own distribution of datasets only.
    """
    policy = tf.data.experimental.ExternalStatePolicy.FAIL
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except tf.errors.OpError:  # a generator, `py_function`, random operations, lookup tables
        return None
    return tf.compat.v1.GraphDef.FromString(serialized) if len(serialized) < largest_bytes else None


def unrepeatable_parts(dataset: Any) -> list[str]:
    """What of a `tf.data.Dataset` gives another order in each process; nothing of what is no such.

    Datasets keep what they were made with to themselves.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return []
    names = [name for each in dataset._inputs() for name in unrepeatable_parts(each)]
    if not any(int(vars(dataset).get(seed, 1)) for seed in ("_seed", "_seed2")):
        names.append("shuffle without a seed")
    is_deterministic = vars(dataset).get("_deterministic")
    if is_deterministic == "false" or dataset.options().deterministic is False:
        names.append("deterministic=False")
    return list(dict.fromkeys(names))
