"""Tensor parallel: the matrices of a layer are cut, and several devices compute one layer."""

from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import is_keras_step, is_predict_step, model_of_predict_step
from tfparallel.internals.keras_layers import layout_map_of
from tfparallel.replicas.base import KerasStrategy
from tfparallel.tensor_parallel import rules  # noqa: F401  (registers the rules of Keras's layers)
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.found_layouts import FoundLayouts, lay_out
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
        layout: "auto", for the layout that is found in each model; or a
            `keras.distribution.LayoutMap`; or a `keras.distribution.ModelParallel`, whose layouts
            and name of the batch's axis are taken.
        batch_dim_name: the mesh's axis of replicas; by default the one called "batch" or "data",
            else the first of two.
        device_mesh: of `layout="auto"`; by default one group of all GPUs, or of all CPUs.

    Raises:
        TypeError: for another layout.
        ValueError: for axes that the mesh does not have, and devices that do not exist.
    """

    def __init__(self, layout: Any, batch_dim_name: str | None = None, *, device_mesh: Any = None):
        if isinstance(layout, str) and layout == "auto":
            groups = mesh_groups(device_mesh or _all_devices(), batch_dim_name)
            super().__init__(TensorParallelExtended(self, FoundLayouts(None, groups)))
            return
        if device_mesh is not None:
            raise ValueError(
                "device_mesh is for layout='auto'; a LayoutMap has its own. Received: "
                f"device_mesh={device_mesh!r} with {layout!r}."
            )
        if isinstance(layout, keras.distribution.ModelParallel):
            batch_dim_name = batch_dim_name or layout.batch_dim_name
            layout = layout_map_of(layout)
        if not isinstance(layout, keras.distribution.LayoutMap):
            raise TypeError(
                "Expected 'auto', a keras.distribution.LayoutMap or ModelParallel. Received: "
                f"{layout!r}. Make one with keras.distribution.LayoutMap(device_mesh)."
            )
        groups = mesh_groups(layout.device_mesh, batch_dim_name)
        super().__init__(TensorParallelExtended(self, Layouts(layout, groups)))

    def run(
        self, fn: Any, args: tuple = (), kwargs: dict | None = None, options: Any = None
    ) -> Any:
        """`tf.distribute.Strategy.run`; a layout that is to be found is found before."""
        if is_predict_step(fn):
            self.extended.prepare(model_of_predict_step(fn), args)
        elif not is_keras_step(fn) and isinstance(self.extended.layouts, FoundLayouts):
            self.extended.layouts.warn_of_custom_step()
        return super().run(fn, args, kwargs, options)

    def summary(self, model: keras.Model, inputs: Any = None) -> str:
        """A table of what the layout made of `model`'s weights; `print` it.

        Under `layout="auto"` it puts the weights in parts, if no step has done so yet.

        Args:
            model: built under this strategy.
            inputs: a batch of what it is called with, for a model that is not functional.

        Returns:
            For each weight its parts, the bytes of the largest, and how its layer is computed, or
            why it is whole. Then, for each layer that multiplies or sends, how it is cut, its share
            of the products, and the bytes of each tensor that it sends, for one row of the batch.

        Raises:
            ValueError: under "auto", where the model's inputs are not known.
        """
        if isinstance(self.extended.layouts, FoundLayouts):
            lay_out(self, model, inputs)
        return summary(model, self.extended.layouts, inputs)


def _all_devices() -> Any:
    """One group of all GPUs, or of all CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [f"{d.device_type}:{d.name.rpartition(':')[2]}".lower() for d in devices]
    return keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), names)
