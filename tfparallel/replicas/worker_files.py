"""Callbacks that write files write them once: on all workers but the chief, to a scratch folder.

Every worker has to run every callback (saving may read variables from all of them), so they are not
skipped; it is what TensorFlow's multi-worker guide tells users to do by hand.
Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Sequence

import keras

# The attribute of each callback that holds the path it writes to.
_PATHS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.CSVLogger: "filename",
}


def keep_files_of_other_workers_apart(
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None,
) -> None:
    """Moves what `callbacks` of this worker (not the chief) write into a folder deleted at exit.

    Args:
        callbacks: what the user passed to `fit`: None, a callback, a list, or a `CallbackList`.
    """
    if isinstance(callbacks, keras.callbacks.Callback):
        callbacks = getattr(callbacks, "callbacks", [callbacks])
    for callback in callbacks or []:
        for kind, attribute in _PATHS.items():
            if isinstance(callback, kind) and "_tfparallel_path" not in vars(callback):
                path = os.fspath(getattr(callback, attribute))
                callback._tfparallel_path = path
                setattr(
                    callback, attribute, os.path.join(_scratch_folder(), os.path.basename(path))
                )


def _scratch_folder() -> str:
    folder = tempfile.mkdtemp(prefix="tfparallel-worker-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
