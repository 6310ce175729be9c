"""A variable in parts is assigned part by part, in whichever way it is assigned."""

import tensorflow as tf


class AssignedInParts:
    """Every assignment of a distributed variable, as one method of its class."""

    def _to_parts(self, name: str, value: object) -> object:
        """The assignment `name` (of `tf.Variable`) of a value, or of rows, of the whole."""
        raise NotImplementedError

    def assign(self, value: object, *args: object, **kwargs: object) -> object:
        return self._to_parts("assign", value)

    def assign_add(self, delta: object, *args: object, **kwargs: object) -> object:
        return self._to_parts("assign_add", delta)

    def assign_sub(self, delta: object, *args: object, **kwargs: object) -> object:
        return self._to_parts("assign_sub", delta)

    def scatter_add(self, slices: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._to_parts("scatter_add", slices)

    def scatter_sub(self, slices: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._to_parts("scatter_sub", slices)

    def scatter_update(self, slices: tf.IndexedSlices, *args: object, **kwargs: object) -> object:
        return self._to_parts("scatter_update", slices)
