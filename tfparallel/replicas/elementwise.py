"""Which optimizers update every number alike, so that parts of a variable can be updated apart."""

from typing import Any

import keras

_optimizers = keras.optimizers
_ELEMENTWISE = {
    _optimizers.SGD,
    _optimizers.RMSprop,
    _optimizers.Adam,
    _optimizers.AdamW,
    _optimizers.Adadelta,
    _optimizers.Adagrad,
    _optimizers.Adamax,
    _optimizers.Ftrl,
    _optimizers.Nadam,
    _optimizers.Lion,
}


def is_elementwise(optimizer: Any) -> bool:
    """Whether an update of some rows needs nothing of the others; unknown classes may."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return type(inner) in _ELEMENTWISE
