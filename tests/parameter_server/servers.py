"""What a server runs in tests: what the strategy's constructor does there, without Keras."""

import os

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.logical_devices import open_logical_cpus
from tfparallel.parameter_server.server_cluster import ParameterServerCluster
from tfparallel.pipeline.remote_stages import StageCluster


def serve() -> None:
    """Serves until the chief is done."""
    open_logical_cpus()
    chief_s = float(os.environ.get("TEST_CHIEF_S", "20"))
    start_s = float(os.environ.get("TEST_START_S", "600"))
    config = read_tf_config()
    assert config is not None
    resolver = config.cluster_resolver()
    if "ps" in config.cluster:
        ParameterServerCluster(resolver).serve(Timeouts(start_s, chief_s=chief_s))
    else:
        StageCluster(resolver).serve(Timeouts(start_s, chief_s=chief_s))
