"""PipelineStrategy: activations computed again, or moved to the host: the weights are the same."""

import keras
import pytest
from keras import layers

from tests.helpers import assert_same_training, train
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(3)]
OPTIONS = {
    "full": {"rematerialize": "full"},
    "patterns": {"rematerialize": {"hidden_*", "drop*"}, "schedule": "gpipe"},
    "offloaded": {"rematerialize": "except_last", "offload": True},
}


def random_model():
    """Dropout's masks and BatchNorm's averages would tell whether a pass is made twice."""
    x = inputs = keras.Input((6,))
    for i in range(2):
        x = layers.Dense(8, activation="tanh", name=f"hidden_{i}")(x)
        x = layers.Dropout(0.2, seed=i, name=f"drop_{i}")(x)
        x = layers.BatchNormalization(name=f"norm_{i}")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def trained(**options):
    strategy = PipelineStrategy(CPUS[1:], 3, **options)
    return train(strategy, random_model, rows=36, batch_size=18, epochs=1)


@pytest.fixture(scope="module")
def plain():
    return trained()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_the_same(plain, options):
    assert_same_training(plain, trained(**options))


def test_patterns_that_match_no_layer_are_refused():
    with pytest.raises(ValueError, match="rematerialize must match .* 'deep.* layers are 'hidden"):
        trained(rematerialize={"hidden*", "deep*"})
