"""The copies of a variable in this process, for who needs each of them, or one that all are like.

What is whole, what is a part and who may assign is told by the classes (`variables.py`); this asks
none of it.
"""

from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import behind


def copies_here(variable: tf.Variable) -> Sequence[tf.Variable]:
    """What the replicas of this process have of `variable`; of one in one place, itself."""
    return getattr(variable, "values", (variable,))


def assigned_here(variable: tf.Variable) -> Iterator[tf.Variable]:
    """All that an assignment to `variable` may assign in this process: copies, and their parts."""
    yield from copies_here(variable)
    for parts in getattr(variable, "copies", list)():
        yield from parts


def first_copy(variable: tf.Variable) -> tf.Variable:
    """The copy that stands for all of `variable`, where they are alike, or are to be."""
    return copies_here(variable)[0]


def copies_of(variable: keras.Variable | tf.Variable) -> Sequence[tf.Variable]:
    """The variables of TensorFlow that `variable` is in this process, each with a value.

    One that is divided over parameter servers is itself: its parts are nobody else's.
    """
    own = behind(variable) if isinstance(variable, keras.Variable) else variable
    return (own,) if hasattr(own, "parts") else copies_here(own)
