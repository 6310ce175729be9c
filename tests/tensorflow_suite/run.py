"""Runs one of TensorFlow's own tests of `tf.distribute`, unmodified, under our strategies.

    python -m tests.tensorflow_suite.run FILE [names of tests]

TensorFlow's tests take strategies from `strategy_combinations`, by names of that module: there ours
take the place of TensorFlow's. Combinations that ask for a GPU beside the CPU get two logical CPUs.
"""

import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

# TensorFlow's test processes start others by executing `sys.argv[0]`, with options of Python's.
LAUNCHER_VARIABLE = "TENSORFLOW_SUITE_LAUNCHER"
STOCK_VARIABLE = "TENSORFLOW_SUITE_STOCK"  # TensorFlow's own strategies, to compare with


def main() -> None:
    """Runs the file as the program that it is, in the place of this one."""
    file, *arguments = sys.argv[1:]
    if LAUNCHER_VARIABLE not in os.environ:
        os.environ[LAUNCHER_VARIABLE] = str(_write_launcher(file))
    _substitute()
    sys.argv = [os.environ[LAUNCHER_VARIABLE], *arguments]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(Path(file).read_text(), file, "exec"), vars(module))


def _write_launcher(file: str) -> Path:
    launcher = Path(tempfile.mkdtemp()) / "tensorflow_suite"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m {__spec__.name} {file} "$@"\n')
    launcher.chmod(0o755)
    return launcher


def _substitute() -> None:
    from tensorflow.python.distribute import strategy_combinations as combinations
    from tensorflow.python.distribute import test_util

    is_worker = "-c" in sys.argv  # started by the launcher; ours takes all CPUs there are
    num_cpus = 1 if is_worker else 3
    test_util._set_logical_devices = lambda: test_util.set_logical_devices_to_at_least(
        "CPU", num_cpus
    )
    two_cpus = ["/cpu:0", "/cpu:1"]
    _on_cpus(
        combinations,
        {
            "mirrored_strategy_with_gpu_and_cpu": lambda: combinations.MirroredStrategy(two_cpus),
            "central_storage_strategy_with_gpu_and_cpu": (
                lambda: combinations.CentralStorageStrategy(two_cpus)
            ),
        },
    )
    if STOCK_VARIABLE in os.environ:
        return
    import tfparallel

    combinations.MirroredStrategy = tfparallel.MirroredStrategy
    combinations.CentralStorageStrategy = tfparallel.CentralStorageStrategy
    combinations.OneDeviceStrategy = tfparallel.OneDeviceStrategy
    combinations.CollectiveAllReduceStrategy = _multi_worker


def _on_cpus(combinations: types.ModuleType, makers: dict[str, Callable]) -> None:
    for name, make in makers.items():
        combination = getattr(combinations, name)
        combination._distribution_fn, combination.required_gpus = make, 0


def _multi_worker(cluster_resolver):
    """Ours, with the coordination service that TensorFlow's tests have just switched off."""
    from tensorflow.python.eager import context

    import tfparallel

    context.context()._coordination_service_config = None
    return tfparallel.MultiWorkerMirroredStrategy(cluster_resolver)


if __name__ == "__main__":
    main()
