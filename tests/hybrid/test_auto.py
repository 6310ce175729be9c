"""`layout_map="auto"` on a mesh: what is found in a model is in parts on its stage's devices."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, cpu_mesh_of, tiny_data, train
from tests.hybrid.architectures import gpt, text
from tfparallel import HybridStrategy, PipelineOptions, Sharding


def auto(**sizes):
    options = {"pipeline": PipelineOptions(2)} if "pipeline" in sizes else {}
    return HybridStrategy(cpu_mesh_of(**sizes), layout_map="auto", **options)


def pairs():
    names = ["up_0", "down_0", "up_1", "down_1"]
    sizes = dict.fromkeys(names[::2], 8) | dict.fromkeys(names[1::2], 4)
    stack = [layers.Dense(sizes[name], "tanh", name=name) for name in names]
    return keras.Sequential([keras.Input((6,)), *stack, layers.Dense(3, name="scores")])


def parts(weight):
    split = getattr(weight.value, "parts", None)
    if split is None or len(split[0]) == 1:
        return None
    return [(tf.DeviceSpec.from_string(x.device).device_index, tuple(x.shape)) for x in split[0]]


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [{"pipeline": 2, "model": 2}, {"data": 2, "model": 2}], ids=" x ".join
)
def test_a_gpt_trains_as_on_one_device(sizes):
    options = {"build": gpt, "data": text, "rows": 10, "batch_size": 5}
    training = train(auto(**sizes), **options)
    assert_same_training(train(None, **options), training)
    whole = [w.path for w in training.model.trainable_weights if parts(w) is None]
    assert not [path for path in whole if "dense" in path and "kernel" in path]


@pytest.mark.turns
def test_weights_and_slots_that_were_made_before_move_to_their_stage():
    """The optimizer is built, and the stages are asked for, before anything trains."""
    strategy = auto(pipeline=2, model=2)
    with strategy.scope():
        model = pairs()
        model.compile(adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    assert "4 + 4" in str(strategy.summary(model))
    homes = strategy.stages(model).homes()
    slots = {v.path: v for v in model.optimizer.variables}
    for name in ("up_0", "down_0", "up_1", "down_1"):
        kernel = model.get_layer(name).kernel
        first = 2 * homes[id(kernel)]
        assert [device for device, _ in parts(kernel)] == [first, first + 1]
        of_kernel = [v for path, v in slots.items() if f"{name}_kernel" in path]
        assert [parts(slot) for slot in of_kernel] == [parts(kernel)] * 2
    x, _ = tiny_data(8)
    model.fit(x, x[:, :3], batch_size=8, verbose=0)


def test_beside_shards_it_is_refused():
    with pytest.raises(ValueError, match="'auto' finds parts"):
        HybridStrategy(cpu_mesh_of(shard=2, model=2), shard=Sharding(min_size=1), layout_map="auto")
