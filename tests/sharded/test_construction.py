"""Which processes and devices share: what cannot be is refused in words."""

import json

import keras
import pytest

import tfparallel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "nccl"}, r"`transport` must be one of .*'ring'.*Received: 'nccl'"),
        ({"transport": "ring"}, r"between the workers of TF_CONFIG. Received: none in it"),
        ({"replicas": 0}, r"4 devices must be a multiple.*Received: 0 `replicas`"),
        ({"replicas": 3}, r"4 devices must be a multiple.*Received: 3 `replicas`"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    devices = [f"CPU:{i}" for i in range(4)]
    with pytest.raises(ValueError, match=message):
        tfparallel.ShardedStrategy(devices, **options)


@pytest.mark.parametrize(
    ("environment", "of"),
    [
        (
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
                        "task": {"type": "worker", "index": 0},
                    }
                )
            },
            "the workers of TF_CONFIG",
        ),
        ({"HOROVOD_RANK": "0"}, "the ranks of Horovod"),
    ],
)
def test_devices_are_not_chosen_in_a_job(environment, of, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"takes all devices of {of}. Received: .*CPU:0"):
        tfparallel.ShardedStrategy(["CPU:0"])


def test_neighbours_share_a_copy():
    """Of four devices in two copies each stores a half."""
    strategy = tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(4)], replicas=2, min_size=1)
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0, 3.0, 4.0])
    parts = [part.numpy().tolist() for part in variable.value.values]
    assert parts == [[1, 2], [3, 4], [1, 2], [3, 4]]


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize(
    "make",
    [
        tfparallel.ShardedStrategy,
        tfparallel.MirroredStrategy,
        tfparallel.MultiWorkerMirroredStrategy,
        lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
    ],
    ids=["sharded", "mirrored", "multi_worker", "pipeline"],
)
def test_a_blank_tf_config_is_as_none(make, text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    strategy = make()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    assert variable.numpy().tolist() == [1.0, 2.0]
