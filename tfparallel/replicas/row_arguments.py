"""The arguments of a function of a batch's rows, on a replica: which are rows, and of what kind."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.replicas.batch import Rows

_ROLES = {"y_true": "targets", "y": "targets", "sample_weight": "weights"}  # by Keras's names


class RowArguments:
    """What a function of a batch is called with on a replica.

    Args:
        args, kwargs: of the function.
        count: how many rows the replica has; None: what has an axis has rows.
        names: of `args`.
        number_of: makes a number of a batch of what is drawn for its rows.

    Attributes:
        leaves: tensors and others.
        rows: the places of dense tensors with as many rows, or a multiple (positions of rows).
        numbers: the places of other dense tensors, which say something of the whole.
        masked: the places of rows that have a Keras mask.
        key: equal for arguments that are alike but for the values of tensors.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict,
        count: Rows | None,
        names: Sequence[str],
        number_of: Callable,
    ):
        self._nest, self._names, self._number_of = (args, kwargs), names, number_of
        self.leaves = keras.tree.flatten(self._nest)
        dense = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, tf.Tensor)]
        self.rows = [i for i in dense if _has_rows(self.leaves[i], count)]
        self.numbers = [i for i in dense if i not in self.rows]
        self.masked = [i for i in self.rows if get_keras_mask(self.leaves[i]) is not None]
        self.key = tuple(
            (str(self._spec(i)), i in self.masked) if i in dense else repr(leaf)
            for i, leaf in enumerate(self.leaves)
        )

    def _spec(self, i: int) -> tf.TensorSpec:
        """Of what is drawn: for a number, of what it is made of."""
        leaf = self.leaves[i]
        return tf.TensorSpec([None, *leaf.shape[1 if i in self.rows else 0 :]], leaf.dtype)

    def specs(self) -> tuple[list, list, list]:
        """Of targets, of predictions and their masks, and of weights, as a trial takes them."""
        targets, predictions, weights = self._by_role()
        specs = [[self._spec(i) for i in places] for places in (targets, predictions, weights)]
        return specs[0], specs[1] + [self._spec_of_mask(i) for i in self.masked], specs[2]

    def _spec_of_mask(self, i: int) -> tf.TensorSpec:
        mask = get_keras_mask(self.leaves[i])
        return tf.TensorSpec([None, *mask.shape[1:]], mask.dtype)

    def drawn(self, targets: Sequence, predictions: Sequence, weights: Sequence) -> tuple:
        """Arguments of what is drawn for `specs()`."""
        roles, leaves = self._by_role(), list(self.leaves)
        masks = predictions[len(roles[1]) :]
        for places, values in zip(roles, (targets, predictions, weights), strict=True):
            for i, value in zip(places, values, strict=False):
                leaves[i] = value if i in self.rows else self._number_of(value, 0)
        for i, mask in zip(self.masked, masks, strict=True):
            set_keras_mask(leaves[i], mask)
        return self.packed(leaves)

    def packed(self, leaves: Sequence) -> tuple[tuple, dict]:
        """Arguments with other leaves."""
        args, kwargs = keras.tree.pack_sequence_as(self._nest, leaves)
        return args, kwargs

    def least_digits(self) -> str | None:
        """The dtype of fewest digits among the tensors, if it is float16 or bfloat16."""
        few = "float16", "bfloat16"
        dtypes = [self.leaves[i].dtype.name for i in self.rows + self.numbers]
        return max((each for each in dtypes if each in few), default=None)

    def _by_role(self) -> tuple[list, list, list]:
        """The places of targets, predictions and weights, as Keras names them."""
        args, kwargs = self._nest
        names = [*[*self._names, *[""] * len(args)][: len(args)], *kwargs]
        roles: dict[str, list] = {"targets": [], "weights": [], "predictions": []}
        place = 0
        for name, argument in zip(names, [*args, *kwargs.values()], strict=True):
            count = len(keras.tree.flatten(argument))
            own = [i for i in range(place, place + count) if i in self.rows + self.numbers]
            roles[_ROLES.get(name, "predictions")] += own
            place += count
        return roles["targets"], roles["predictions"], roles["weights"]


def _has_rows(tensor: tf.Tensor, count: Rows | None) -> bool:
    if not tensor.shape.rank or count is None:
        return bool(tensor.shape.rank)
    first = tensor.shape[0]
    if first is None or not isinstance(count, int):
        return first is None
    return first == count or (count > 1 and first % count == 0)
