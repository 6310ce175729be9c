"""At the end of data of unknown length there is a step without a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel import PipelineStrategy


@pytest.mark.turns
def test_a_step_without_a_batch_changes_nothing():
    """Stages' devices would be a race to what needs no data: `iterations`, weight decay."""
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], 2)
    known, *unknown = (_trained(strategy, is_known) for is_known in (True, False, False, False))
    for each in unknown:
        assert int(each.optimizer.iterations) == int(known.optimizer.iterations) == 8
        for weight, other in zip(each.get_weights(), known.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)


def _trained(strategy, is_known):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tiny_model()
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.5), **tiny_compile_options())
    rows = tf.data.Dataset.from_tensor_slices(tiny_data(14))
    rows = rows if is_known else rows.filter(lambda x, y: True)
    model.fit(rows.batch(8), epochs=4, verbose=0)
    return model
