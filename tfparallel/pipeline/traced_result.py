"""What the traced function of a stage returns, as a nest of other tensors later."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, record
from tfparallel.internals.keras_layers import (
    add_loss_again,
    added_losses,
    drop_added_losses,
    layers_of,
)
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.pipeline.flat_tensors import (
    TENSORS,
    as_often_as,
    filled,
    flat_tensors,
    present,
    set_masks,
    split_at,
)
from tfparallel.pipeline.masks import note_same, take_mask
from tfparallel.replicas.state_changes import CallOfAllRows, Noted


class TracedResult:
    """What a traced function returns: the tensors in it, their masks, and the losses added.

    Masks that it took from its inputs are gone there, too: `masks.py`. What it returns as it came,
    as Dropout does in `evaluate`, stays one tensor; not while gradients are recorded, for an update
    must not go ahead of a layer that checks its input and returns it.

    Attributes:
        statistics: the variables that were to be assigned, had that not been deferred.
        changed: what was to be assigned otherwise.
    """

    def __init__(
        self,
        inputs: Sequence,
        outputs: object,
        loss_owners: list,
        statistics: list,
        noted: Noted,
    ):
        self._structure, self._loss_owners = outputs, loss_owners
        self.statistics, self.changed, self._calls = statistics, noted.changed, noted.calls
        self._unmasked = [i for i, x in enumerate(inputs) if get_keras_mask(x) is None]
        self._leaves = keras.tree.flatten(outputs)
        self._at = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, TENSORS)]
        self.tensors = [self._leaves[i] for i in self._at]
        self._own_inputs = list(inputs)
        self._all_masks = [get_keras_mask(tensor) for tensor in self.tensors]
        self.masks = present(self._all_masks)
        self._origins = [origin_of(x) if self._input(x) is None else None for x in self.tensors]
        logits = [origin.logits for origin in present(self._origins)]
        self.logits = [x for x in logits if self._input(x) is None]

    def _input(self, tensor: tf.Tensor) -> int | None:
        """Which of the inputs it is, if it is one."""
        return next((i for i, x in enumerate(self._own_inputs) if x is tensor), None)

    @property
    def num_left(self) -> int:
        """How many tensors calls have that are to be made of all rows."""
        return sum(len(tensors) for _, tensors in self._calls)

    def calls(self, flat: Sequence) -> Iterator[tuple[CallOfAllRows, list]]:
        """These calls, with the tensors `flat` for their own."""
        tensors = iter(flat)
        for call, left in self._calls:
            yield call, list(itertools.islice(tensors, len(left)))

    def filled(self, inputs: Sequence, flat: Sequence) -> object:
        """The same nest, of a call with `inputs`: `flat` holds tensors, masks and losses."""
        leaves, tensors = list(self._leaves), filled(self.tensors, flat)
        rest = flat[len(flat_tensors(self.tensors)) :]
        masks, rest = split_at(rest, len(self.masks))
        logits, losses = split_at(rest, len(self.logits))
        tensors = self._with_origins(inputs, tensors, logits)
        set_masks(tensors, self._all_masks, masks)
        for i in self._unmasked:
            take_mask(inputs[i])
        own, found = [*self._own_inputs, *self.tensors], [*inputs, *tensors]
        if record.could_possibly_record():
            note_same(own, found)
        else:
            tensors = as_often_as(own, found)[len(inputs) :]
        for i, tensor in zip(self._at, tensors, strict=True):
            leaves[i] = tensor
        for layer, loss in zip(self._loss_owners, losses, strict=True):
            add_loss_again(layer, loss)
        return keras.tree.pack_sequence_as(self._structure, leaves)

    def _with_origins(self, inputs: Sequence, tensors: Sequence, logits: Sequence) -> list:
        """`tensors` that know the logits that they were made of: returned, or among the inputs."""
        returned, found = iter(logits), []
        for own, origin, tensor in zip(self.tensors, self._origins, tensors, strict=True):
            place = self._input(own)
            if place is not None:
                origin = origin_of(inputs[place])
                found.append(with_origin(tensor, origin, origin and origin.logits))
                continue
            place = None if origin is None else self._input(origin.logits)
            own_logits = inputs[place] if place is not None else origin and next(returned)
            found.append(with_origin(tensor, origin, own_logits))
        return found


def losses_apart(function: Callable, layers: Sequence, inputs: list) -> tuple[object, list[tuple]]:
    """What `function` returns, and the losses that `layers` have added meanwhile, by layer."""
    own = [layer for each in layers if isinstance(each, keras.Layer) for layer in layers_of(each)]
    own = list({id(layer): layer for layer in own}.values())
    before = [len(added_losses(layer)) for layer in own]
    try:
        outputs = function(inputs)
    except Exception:  # what it has added is of a graph that is thrown away
        for layer, count in zip(own, before, strict=True):
            drop_added_losses(layer, count)
        raise
    losses = []
    for layer, count in zip(own, before, strict=True):
        losses += [(layer, loss) for loss in drop_added_losses(layer, count)]
    return outputs, losses
