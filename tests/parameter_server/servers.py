"""What a worker or a parameter server runs in tests: the strategy's constructor, without Keras."""

import os

from tfparallel.cluster import read_tf_config
from tfparallel.parameter_server.cluster import ParameterServerCluster, Timeouts


def serve() -> None:
    """Serves until the chief is done."""
    timeouts = Timeouts(chief_s=float(os.environ.get("TEST_CHIEF_S", "20")))
    config = read_tf_config()
    assert config is not None
    ParameterServerCluster(config.cluster_resolver()).serve(timeouts)
