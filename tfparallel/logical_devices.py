"""Logical CPU devices asked for by the launcher (`tfparallel launch --devices-per-worker`)."""

import os

LOGICAL_CPUS_VARIABLE = "TFPARALLEL_LOGICAL_CPUS"


def open_logical_cpus() -> None:
    """Splits the CPU into the logical devices that the environment asks for.

    Raises:
        RuntimeError: if TensorFlow has started already.
    """
    import tensorflow as tf  # here: the launcher reads the variable's name without TensorFlow

    count = int(os.environ.get(LOGICAL_CPUS_VARIABLE, "0"))
    cpu = tf.config.list_physical_devices("CPU")[0]
    if count > 1 and not tf.config.get_logical_device_configuration(cpu):
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"Expected {LOGICAL_CPUS_VARIABLE}={count} to be read before TensorFlow runs its "
                "first operation. Received: a process in which it has started. "
                "Make the strategy first, right after the imports; in a notebook, restart the "
                "kernel before."
            ) from error
