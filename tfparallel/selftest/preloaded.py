"""What forks find imported: TensorFlow, Keras and all strategies, and no devices opened.

The package opens at its import those that the environment asks for; each fork opens its own.
"""

import importlib
import os

from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE

_asked = os.environ.pop(LOGICAL_CPUS_VARIABLE, None)
importlib.import_module("tfparallel.selftest.exactness_checks")
if _asked is not None:
    os.environ[LOGICAL_CPUS_VARIABLE] = _asked
