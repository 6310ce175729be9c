"""The devices that stages are on: those of this process, or of the tasks of a cluster."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.security import check_network
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.pipeline.remote_stages import StageCluster
from tfparallel.replicas.checks import check_devices
from tfparallel.replicas.device_names import all_devices_here


def stage_devices(
    devices: Sequence[str] | None,
    resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
    insecure_network: bool,
    timeouts: Timeouts,
    made_first: str | None = None,
) -> tuple[Sequence[str], StageCluster | None]:
    """The devices of the stages, and the cluster that they are in, if they are.

    In a task of the cluster that is not its first this serves until the first is done, and ends
    the process. For other arguments and errors, see `PipelineStrategy`.

    Args:
        made_first: the name of a strategy that has to be made before any variable.
    """
    cluster = _find_cluster(devices, resolver)
    if cluster is None:
        return check_devices(devices) or all_devices_here(), None
    check_network(cluster.tasks, insecure_network)
    if made_first is not None:
        cluster.check_nothing_is_trained(made_first)
    if not cluster.is_chief:
        cluster.serve(timeouts)
    cluster.connect(timeouts)
    return cluster.devices(), cluster


def _find_cluster(
    devices: Sequence[str] | None, resolver: tf.distribute.cluster_resolver.ClusterResolver | None
) -> StageCluster | None:
    """The cluster whose tasks have the stages; None if this process has them all.

    Raises:
        ValueError: for devices beside a cluster.
    """
    if resolver is not None and devices is not None:
        raise ValueError(
            "A pipeline is on devices of this process or on the tasks of a cluster. Received: "
            f"devices={list(devices)!r} and a cluster_resolver. Leave one of them out."
        )
    if resolver is None and devices is None and (config := read_tf_config()) is not None:
        resolver = config.cluster_resolver()
    if resolver is None or sum(map(len, resolver.cluster_spec().as_dict().values())) < 2:
        return None
    return StageCluster(resolver)
