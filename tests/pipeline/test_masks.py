"""When all layers of a graph have run, a tensor has the mask that it has then on one device."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.pipeline.masks import MasksInOrder
from tfparallel.pipeline.parts import members


@pytest.mark.parametrize(
    ("layer", "is_taken"), [(layers.Dense(2), False), (layers.MultiHeadAttention(1, 2), True)]
)
def test_a_mask_that_is_taken_is_gone_at_the_end(layer, is_taken):
    x = keras.Input((3, 4))
    y = layer(x, x) if is_taken else layer(x)
    own = members(keras.Model(x, y))
    tensor = tf.ones((1, 3, 4))
    set_keras_mask(tensor, tf.constant([[True, True, False]]))
    masks, tensors = MasksInOrder(own), {id(x): tensor}
    for number in range(len(own)):
        with masks.seen_by(number, tensors):
            assert get_keras_mask(tensor) is not None
    masks.end(tensors)
    assert (get_keras_mask(tensor) is None) is is_taken
