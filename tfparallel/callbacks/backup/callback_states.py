"""What callbacks remember, so that a resumed run stops, slows down and records as it would have.

A callback of the user joins in with two methods:

- `get_state() -> value`, made of None, numbers, text, NumPy arrays, and lists, tuples and dicts
  (with text as keys) of them;
- `set_state(value)`.

Keras's own callbacks have neither; the attributes they change while training are listed here.
"""

from collections.abc import Iterable
from typing import Any

import keras

_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_current_epoch",
    ),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}


def callback_states(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, object]:
    """The state of every callback that has one, by its class and its position in that class."""
    return {
        name: callback.get_state()
        if hasattr(callback, "get_state")
        else {
            attribute: _copied(getattr(callback, attribute))
            for attribute in _attributes(callback)
            if hasattr(callback, attribute)
        }
        for name, callback in _named(callbacks).items()
    }


def set_callback_states(
    callbacks: Iterable[keras.callbacks.Callback], states: dict[str, Any]
) -> list[str]:
    """Sets what `callback_states` returned; returns the names that are on one side only."""
    named = _named(callbacks)
    for name in named.keys() & states.keys():
        callback, state = named[name], states[name]
        if hasattr(callback, "set_state"):
            callback.set_state(state)
        else:
            for attribute, value in state.items():
                setattr(callback, attribute, _copied(value))
    return sorted(named.keys() ^ states.keys())


def _named(
    callbacks: Iterable[keras.callbacks.Callback],
) -> dict[str, keras.callbacks.Callback]:
    named: dict[str, keras.callbacks.Callback] = {}
    for callback in callbacks:
        if hasattr(callback, "get_state") or _attributes(callback):
            kind = type(callback).__name__
            number = sum(name.startswith(f"{kind}-") for name in named)
            named[f"{kind}-{number}"] = callback
    return named


def _attributes(callback: keras.callbacks.Callback) -> list[str]:
    return [
        attribute
        for kind, attributes in _ATTRIBUTES.items()
        if isinstance(callback, kind)
        for attribute in attributes
    ]


def _copied(value: object) -> object:
    """`value` with lists and dicts of its own; arrays are shared, Keras replaces them whole."""
    return keras.tree.map_structure(lambda leaf: leaf, value)
