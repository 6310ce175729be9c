"""TPUStrategy without a TPU: what it looks for, what it says, and that our train steps compile."""

import keras
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance import models
from tfparallel.strategies import tpu


class RecordingResolver:
    """Stands in for a TPU, which cannot exist here: records what is looked for."""

    asked: list = []

    @classmethod
    def connect(cls, tpu=None):
        cls.asked.append(tpu)
        return "resolver"


@pytest.fixture
def recording_resolver(monkeypatch):
    RecordingResolver.asked = []
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", RecordingResolver)
    return RecordingResolver


@pytest.mark.parametrize("name", ["local", "grpc://10.0.0.1:8470", "my-tpu"])
def test_connects_to_the_tpu_it_is_asked_for(recording_resolver, name):
    assert tpu.connect_to_tpu(name) == "resolver"
    assert recording_resolver.asked == [name]


def test_looks_for_the_local_tpu_by_default(monkeypatch):
    asked = []

    def connect(name):
        asked.append(name)
        raise RuntimeError("enough")

    monkeypatch.setattr(tpu, "connect_to_tpu", connect)
    with pytest.raises(RuntimeError, match="enough"):
        tfparallel.TPUStrategy()
    assert asked == ["local"]


def test_without_a_tpu_says_what_was_looked_for_in_one_sentence():
    with pytest.raises(RuntimeError) as raised:
        tfparallel.TPUStrategy()
    message = str(raised.value)
    assert message.startswith("TPUStrategy looked for the TPU of this TPU VM (tpu='local')")
    assert "\n" not in message
    assert "tfparallel[tpu]" in message


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_the_train_step_is_one_xla_program_of_static_shapes(name):
    """What a TPU asks of a step, proven on the CPU: it compiles, and never calls the host."""
    case = models.MODELS[name]
    strategy = tfparallel.OneDeviceStrategy("CPU:0")
    batch = tf.nest.map_structure(tf.constant, case.data(4))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = case.build()
        model.compile("adam", **case.compile_options())
        model._symbolic_build(data_batch=batch)

    @tf.function(jit_compile=True)
    def step(batch):
        return strategy.run(model.train_step, args=(batch,))

    step(batch)
    program = step.experimental_get_compiler_ir(batch)(stage="hlo")
    assert not [word for word in ("infeed", "outfeed", "callback", "<=") if word in program]
