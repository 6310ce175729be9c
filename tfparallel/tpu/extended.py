"""TensorFlow's own TPU strategy inside, with our hooks around."""

import os
from collections.abc import Mapping

import tensorflow as tf

from tfparallel.internals import TPUExtended
from tfparallel.machine.packages import check_tpu_packages, installed
from tfparallel.tpu.spmd_extended import SpmdExtended

_HOSTS_OF_SLICE = "TPU_WORKER_HOSTNAMES"  # set on hosts of a slice, by what starts them


class KerasTPUExtended(SpmdExtended, TPUExtended):
    """`TPUExtended` with the hooks of our strategies that one XLA program allows."""


def connect_to_tpu(tpu: str = "local") -> object:
    """Finds and initialises a TPU.

    Args:
        tpu: name or address of a TPU, or "local" for the TPU of this TPU VM.

    Returns:
        An initialised `tf.distribute.cluster_resolver.TPUClusterResolver`.

    Raises:
        RuntimeError: if there is none, saying what was looked for, and what is wrong with the
            installed packages: a TensorFlow without TPUs looks for them too, and finds none.
    """
    hosts = [name for name in os.environ.get(_HOSTS_OF_SLICE, "").split(",") if name]
    if tpu == "local" and len(hosts) > 1:
        tf.get_logger().warning(
            "This host is one of the %d of a TPU Pod (%s=%s); tpu='local' is for a TPU of one host."
            " One process drives all hosts: run it on one of them alone, with "
            "TPUStrategy(tpu='the name of the TPU'), while TensorFlow's TPU servers run on all.",
            len(hosts),
            _HOSTS_OF_SLICE,
            ",".join(hosts),
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        looked_for = (
            "the TPU of this TPU VM (tpu='local')" if tpu == "local" else f"a TPU at tpu={tpu!r}"
        )
        raise RuntimeError(
            f"TPUStrategy looked for {looked_for} and found none; it needs a machine with a TPU "
            f"and `pip install 'tfparallel[tpu]'`.{_said_of_packages(installed())}"
        ) from error
    return resolver


def _said_of_packages(versions: Mapping[str, str]) -> str:
    problems = [each for each in check_tpu_packages(versions) if each.status == "problem"]
    return "".join(f" Here is {each.found}: {each.cure}." for each in problems)
