"""Tensor parallel: the matrices of a layer are cut, and several devices compute one layer."""

from typing import Any

import keras

from tfparallel.internals.keras_layers import layout_map_of
from tfparallel.replicas.base import KerasStrategy
from tfparallel.tensor_parallel import rules  # noqa: F401  (registers the rules of Keras's layers)
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.layout_table import summary
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.mesh_groups import mesh_groups


class TensorParallelStrategy(KerasStrategy):
    """Computes each layer on several devices, as Keras's `LayoutMap` says.

    ```python
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), ["gpu:0", "gpu:1"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*hidden.*kernel"] = (None, "model")  # columns: each device has half of the outputs
    layout[".*scores.*kernel"] = ("model", None)  # rows: each device has half of the inputs
    strategy = tfparallel.TensorParallelStrategy(layout)
    ```

    Along the mesh's axis of the batch rows are divided, as under `MirroredStrategy`; along the
    other one a group of devices computes each replica. A layout never changes a result.

    Args:
        layout: a `keras.distribution.LayoutMap`, or a `keras.distribution.ModelParallel`, whose
            layouts and name of the batch's axis are taken.
        batch_dim_name: the mesh's axis of replicas; by default the one called "batch" or "data",
            else the first of two.

    Raises:
        TypeError: for another layout.
        ValueError: for axes that the mesh does not have, and devices that do not exist.
    """

    def __init__(self, layout: Any, batch_dim_name: str | None = None):
        if isinstance(layout, keras.distribution.ModelParallel):
            batch_dim_name = batch_dim_name or layout.batch_dim_name
            layout = layout_map_of(layout)
        if not isinstance(layout, keras.distribution.LayoutMap):
            raise TypeError(
                "Expected a keras.distribution.LayoutMap or ModelParallel. Received: "
                f"{layout!r}. Make one with keras.distribution.LayoutMap(device_mesh)."
            )
        groups = mesh_groups(layout.device_mesh, batch_dim_name)
        super().__init__(TensorParallelExtended(self, Layouts(layout, groups)))

    def summary(self, model: keras.Model) -> str:
        """A table of what the layout made of `model`'s weights; `print` it.

        Args:
            model: built under this strategy.

        Returns:
            For each weight its parts, the bytes of the largest, and how its layer is computed, or
            why it is whole.
        """
        return summary(model, self.extended.layouts)
