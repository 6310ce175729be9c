"""Which optimizers treat every number of a variable alike."""

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


def is_elementwise(optimizer: keras.Optimizer) -> bool:
    """Whether an update of some numbers needs nothing of the others; unknown classes may."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return type(inner) in _ELEMENTWISE
