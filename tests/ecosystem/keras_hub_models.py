"""KerasHub's models under the layouts that they bring along; `test_keras_hub` installs it for them.

Configs are tiny and weights random: nothing is downloaded.
"""

import contextlib
import re

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.tensor_parallel.layouts import cpu_mesh

hub = keras_hub.models
_SIZES = {"vocabulary_size": 40, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32}
_HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
_POSITIONS = 8


def _gemma():
    return hub.GemmaCausalLM(hub.GemmaBackbone(**_SIZES, **_HEADS, head_dim=4), preprocessor=None)


def _llama():
    return hub.LlamaCausalLM(hub.LlamaBackbone(**_SIZES, **_HEADS), preprocessor=None)


def _qwen():
    return hub.QwenCausalLM(hub.QwenBackbone(**_SIZES, **_HEADS), preprocessor=None)


def _gpt2(dropout=0.0):
    sizes = {**_SIZES, "num_heads": 4, "max_sequence_length": 12, "dropout": dropout}
    return hub.GPT2CausalLM(hub.GPT2Backbone(**sizes), preprocessor=None)


# With the percentage of products that is in parts, at least.
_PRESETS = [
    (_gemma, hub.GemmaBackbone, 90),
    (_llama, hub.LlamaBackbone, 90),
    (_qwen, hub.QwenBackbone, 90),
]


@pytest.fixture(autouse=True)
def _keras_distribution():
    tfparallel.keras_distribution.enable()
    yield
    tfparallel.keras_distribution.disable()


def _batches():
    tokens = np.random.default_rng(0).integers(1, 40, (12, _POSITIONS + 1))
    mask = np.ones((12, _POSITIONS), "int32")
    mask[::3, 6:] = 0
    return {"token_ids": tokens[:, :-1], "padding_mask": mask}, tokens[:, 1:]


def _trained(make, scope=None):
    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, sampler="greedy")
    x, y = _batches()
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


def _share_in_parts(model):
    inputs = {name: each[:2] for name, each in _batches()[0].items()}
    table = str(model.distribute_strategy.summary(model, inputs))
    return float(re.findall(r"([\d.]+)% of the products are in parts", table)[0])


def _assert_same_weights(reference, model):
    for a, b in zip(reference.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)


def _generated(model):
    prompt = {name: each[:3].copy() for name, each in _batches()[0].items()}
    prompt["padding_mask"][:, 3:] = 0
    return np.asarray(model.generate(prompt, stop_token_ids=None)["token_ids"])


@pytest.mark.parametrize("make, backbone, share", _PRESETS)
def test_a_preset_s_layout_trains_and_generates_as_one_device(make, backbone, share):
    layout_map = backbone.get_layout_map(cpu_mesh(2, 2))
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    model = _trained(make, distribution.scope())
    assert isinstance(model.distribute_strategy, tfparallel.TensorParallelStrategy)
    assert _share_in_parts(model) >= share
    reference = _trained(make)
    _assert_same_weights(reference, model)
    np.testing.assert_array_equal(_generated(model), _generated(reference))


def _with_lora(make):
    """Its base frozen, and pairs of small matrices beside the projections of attention."""

    def build():
        model = make()
        model.backbone.enable_lora(2)
        return model

    return build


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}], ids=["parameters", "optimizer"])
@pytest.mark.parametrize(
    "make",
    [_gemma, _llama, _qwen, _gpt2, _with_lora(_gemma), _with_lora(_llama)],
    ids=["gemma", "llama", "qwen", "gpt2", "gemma_lora", "llama_lora"],
)
def test_models_in_shards_train_and_generate_as_on_one_device(make, options):
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    strategy = tfparallel.ShardedStrategy(devices, min_size=1, **options)
    model, reference = _trained(make, strategy.scope()), _trained(make)
    assert len(model.trainable_weights) == len(reference.trainable_weights)
    _assert_same_weights(reference, model)
    np.testing.assert_array_equal(_generated(model), _generated(reference))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gpt2_which_brings_no_layout_trains_by_auto(dropout):
    def make():
        return _gpt2(dropout)

    strategy = tfparallel.TensorParallelStrategy("auto", device_mesh=cpu_mesh(1, 2))
    model = _trained(make, strategy.scope())
    assert _share_in_parts(model) >= 90
    _assert_same_weights(_trained(make), model)


def test_cached_attention_by_heads_computes_what_one_device_does():
    """A prompt, then a token at a time, in replica context, where heads are in parts."""
    strategy = tfparallel.TensorParallelStrategy("auto", device_mesh=cpu_mesh(1, 2))
    model, reference = _trained(_gpt2, strategy.scope()), _trained(_gpt2)
    attention = model.backbone.transformer_layers[0]._self_attention_layer
    assert [part.shape[1] for part in attention._query_dense.kernel.value.parts[0]] == [2, 2]

    def steps(model):
        tokens = tf.constant(_batches()[0]["token_ids"][:2, :4], tf.int32)
        cache = tf.zeros((2, 1, 2, _POSITIONS, 4, 4))
        first, _, cache = model.call_with_cache(tokens, cache, 0)
        second, _, cache = model.call_with_cache(tokens[:, :1], cache, 4)
        return first, second, cache

    ours = tf.function(lambda: strategy.run(steps, (model,)))
    graph = ours.get_concrete_function().graph
    products = [op for op in graph.get_operations() if op.type in ("Einsum", "BatchMatMulV2")]
    assert len({op.device for op in products}) == 2
    for a, b in zip(steps(reference), ours(), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)
