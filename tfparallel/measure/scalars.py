"""Scalars for TensorBoard, where it is installed.

TensorFlow opens their files, but what it writes into them it has from TensorBoard, which it does
not bring.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tensorflow as tf


class ScalarWriter:
    """Writes scalars into a folder; without TensorBoard none, which it says.

    Args:
        folder: of TensorBoard's files.
    """

    def __init__(self, folder: Path):
        self._writer: Any = None
        if find_spec("tensorboard") is not None:
            import_module("tensorboard.plugins.scalar.summary_v2")  # not while somebody measures
            self._writer = tf.summary.create_file_writer(str(folder))
            return
        tf.get_logger().warning(
            "No scalars for TensorBoard are written to %s, as it is not installed: "
            "pip install tensorboard. The files of JSON lines there have the same.",
            folder,
        )

    def write(self, values: Mapping[str, object], step: int) -> None:
        """One point of each curve, which is in the file when this returns."""
        if self._writer is None:
            return
        with self._writer.as_default(step), tf.device("CPU:0"):
            for name, value in values.items():
                tf.summary.scalar(name, value)
        self._writer.flush()
