"""What TensorFlow cannot compute of no rows: it gets a row of zeros there.

A batch may have fewer rows than there are replicas, and some then compute of no rows. Where
TensorFlow computes layers by oneDNN, as on most CPUs, that ends in an error, or ends the process:

    a convolution and its bias       "Missing 1-th output from ... Conv2DBackpropFilter"
    a dilated or 1D convolution      "Must provide as many biases as the last dimension"
    that of a transposed one         another shape: "shape of dy was [0,7,7,2] instead of [0,6,6,2]"
    the gradient of a max pooling    "Check failed: dtype() == expected_dtype": the process is gone

On any device, an error ends what mirrors a signal's ends ("paddings must be less than the dimension
size"), an elastic transform, which looks at its first image ("slice index 0 out of bounds"), and a
compiled loss of CTC ("Indices and updates specified for empty output tensor").

So such a layer or loss is called with one row of zeros where there is none, and what comes out is
cut off:

    x  --pad by 0 rows, or by 1-->  layer  --slice [:rows]-->  y

What is cut off has no gradient. Where there are rows, neither copies: both pass on the buffer.

A user's own operations, as `tf.nn.conv2d` and `ops.stft`, are no layer's call and end as above.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import layers_of, losses_asked_for
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.internals.read_code import names_in
from tfparallel.replicas.local_replicas import LocalReplicas

# From Keras 3.13 on.
_OF_NEW_KERAS = ("AdaptiveMaxPooling1D", "AdaptiveMaxPooling2D", "AdaptiveMaxPooling3D")
_ON_CPUS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    *(getattr(keras.layers, name) for name in _OF_NEW_KERAS if hasattr(keras.layers, name)),
)
_ANYWHERE = (keras.layers.MelSpectrogram, keras.layers.RandomElasticTransform)


@contextlib.contextmanager
def never_without_rows(model: keras.Model, extended: LocalReplicas) -> Iterator[None]:
    """Within it, no layer of `model` and no loss that cannot do so computes no rows.

    XLA has a program of its own for each number of rows, and no oneDNN in it.
    """
    if model.jit_compile or extended._num_replicas_in_sync == 1:
        yield
        return
    with layers_never_without_rows(layers_of(model), extended), contextlib.ExitStack() as hooks:
        for loss in losses_asked_for(model):
            if isinstance(loss, keras.Loss) and _is_of_ctc(loss):
                hooks.enter_context(
                    shadowed(
                        loss,
                        "call",
                        functools.partial(_call_of_loss, loss.call),
                        during="a step on replicas",
                        why="TensorFlow cannot compute it of no rows: it gets one, cut off again.",
                    )
                )
        yield


@contextlib.contextmanager
def layers_never_without_rows(
    layers: Iterable[keras.Layer], extended: LocalReplicas
) -> Iterator[None]:
    """As `never_without_rows`, of these layers."""
    is_on_cpus = any("cpu" in device.lower() for device in extended.worker_devices)
    kinds = (*_ON_CPUS, *_ANYWHERE) if is_on_cpus else _ANYWHERE
    with contextlib.ExitStack() as hooks:
        for layer in layers if extended._num_replicas_in_sync > 1 else ():
            if isinstance(layer, kinds):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        functools.wraps(layer.call)(functools.partial(_call, layer.call)),
                        during="a step on replicas",
                        why="TensorFlow cannot compute it of no rows: it gets one, cut off again.",
                    )
                )
        yield


def _call(call: Callable, inputs: object, *args: object, **kwargs: object) -> object:
    others = [x for x in keras.tree.flatten((args, kwargs)) if tf.is_tensor(x)]
    if not isinstance(inputs, tf.Tensor) or inputs.shape[0] or any(x.shape.rank for x in others):
        return call(inputs, *args, **kwargs)
    rows = tf.shape(inputs)[0]
    outputs = call(_at_least_one_row(inputs, rows), *args, **kwargs)

    def own_part(output: tf.Tensor) -> tf.Tensor:
        origin = origin_of(output)
        logits = None if origin is None else own_part(origin.logits)
        return with_origin(_first_rows(output, rows, inputs.shape[0]), origin, logits)

    return keras.tree.map_structure(own_part, outputs)


def _is_of_ctc(loss: keras.Loss) -> bool:
    """Whether the function that it wraps, Keras's or a user's, or its own call mentions CTC."""
    names = names_in(getattr(loss, "fn", type(loss).call))
    return any("ctc" in name.lower() for name in names)


def _call_of_loss(call: Callable, *given: object) -> tf.Tensor:
    tensors = [x for x in given if isinstance(x, tf.Tensor) and x.shape.rank]
    known_rows = tensors[-1].shape[0] if tensors else None
    if len(tensors) < len(given) or known_rows:
        return call(*given)
    rows = tf.shape(tensors[-1])[0]
    losses = call(*(_at_least_one_row(x, rows) for x in tensors))
    return _first_rows(losses, rows, known_rows) if losses.shape.rank else call(*given)


def _at_least_one_row(inputs: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """`inputs`, or a row of zeros.

    Not `tf.pad`, which oneDNN merges with the convolution, and then forgets the row.
    """
    missing = tf.maximum(1 - rows, 0)  # of integers: with a GPU, too, on the host
    paddings = tf.stack([[0, missing], *[[0, 0]] * (inputs.shape.rank - 1)])
    zero = tf.zeros([], inputs.dtype)
    padded = tf.raw_ops.PadV2(input=inputs, paddings=paddings, constant_values=zero)
    return tf.ensure_shape(padded, [None, *inputs.shape[1:]])


def _first_rows(outputs: tf.Tensor, rows: tf.Tensor, known_rows: int | None) -> tf.Tensor:
    """`outputs[:rows]`, whose gradient is a pad and no copy."""
    rank = outputs.shape.rank
    part = tf.slice(outputs, [0] * rank, tf.stack([rows, *[-1] * (rank - 1)]))
    return tf.ensure_shape(part, [known_rows, *outputs.shape[1:]])
