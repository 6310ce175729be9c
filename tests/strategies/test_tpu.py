"""TPUStrategy without a TPU: what it looks for, what it says, and that our train steps compile."""

import re

import keras
import pytest
import tensorflow as tf

import tfparallel
from tests.conformance import models
from tests.helpers import tiny_compile_options, tiny_data
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.strategies import tpu
from tfparallel.tpu import spmd_step


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
    # Tests run with a wheel that is not TPUs'.
    assert re.search(r" Here is tensorflow\S* 2\.\S+, which knows no TPU: pip uninstall ", message)


# One of each kind that XLA could refuse; the others take minutes, for `--everything`.
BY_DEFAULT = {"cnn", "embedding"}
MODELS = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long)
    for name in sorted(models.MODELS)
]


# Of conformance models: those with a loss of all rows, or a state that depends on them, cannot have
# rows of padding, and say so.
WITHOUT_PADDING = "drop_remainder=True"


@pytest.mark.parametrize("batch_rows", [None, 5], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_a_core_is_one_xla_program_of_static_shapes(monkeypatch, name, batch_rows):
    """What a TPU asks of a step, proven on the CPU: it compiles, and never calls the host.

    It is the step that every core runs, of one core: what more than one adds are all-reduces.
    """
    steps = []
    step_on_replica = spmd_step._step_on_replica
    monkeypatch.setattr(
        spmd_step, "_step_on_replica", lambda *args: steps.append(1) or step_on_replica(*args)
    )
    case = models.MODELS[name]
    try:
        program = _program_of_step(case.build, case.data(4), case.compile_options, batch_rows)
    except ValueError as error:
        if batch_rows is None or WITHOUT_PADDING not in str(error):
            raise
        pytest.skip(f"refuses rows of padding: {error}")
    assert steps and not _calls_of_the_host(program)


class OfPython(keras.layers.Layer):
    """Calls the host."""

    def call(self, x):
        y = tf.py_function(lambda value: value, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


class OfUnknownRows(keras.layers.Layer):
    """How many numbers it has in between is not known when it is compiled."""

    def call(self, x):
        return x * tf.reduce_sum(tf.boolean_mask(x, x > 0.5))


def _with(layer):
    return lambda: keras.Sequential([keras.Input((6,)), layer(), keras.layers.Dense(3)])


def test_a_model_that_calls_the_host_is_found():
    with pytest.raises(tf.errors.InvalidArgumentError, match="EagerPyFunc"):
        _program_of_step(_with(OfPython), tiny_data(4), tiny_compile_options)


def test_a_model_of_dynamic_shapes_is_found():
    program = _program_of_step(_with(OfUnknownRows), tiny_data(4), tiny_compile_options)
    assert _calls_of_the_host(program) == ["<="]


def _program_of_step(build, data, compile_options, batch_rows=None) -> str:
    """The program that XLA makes of a `train_step` on one core."""
    strategy = CpuStrategy(num_cores=1)
    strategy._batch_rows = batch_rows
    batch = tf.nest.map_structure(tf.constant, data)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = build()
        model.compile("adam", **compile_options())
        model._symbolic_build(data_batch=batch)
        model.optimizer.build(model.trainable_variables)
    return _program(lambda batch: strategy.run(model.train_step, args=(batch,)), batch)


def _program(function, batch) -> str:
    compiled = tf.function(function, jit_compile=True, autograph=False)
    compiled(batch)
    return compiled.experimental_get_compiler_ir(batch)(stage="hlo")


def _calls_of_the_host(program: str) -> list[str]:
    return [word for word in ("infeed", "outfeed", "callback", "<=") if word in program]
