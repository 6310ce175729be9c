"""A call of each layer of Keras, by the kind of its inputs."""

from collections.abc import Callable, Mapping

import keras
from keras import layers

SHAPES = {"series": (6, 4), "images": (8, 8, 3), "volumes": (4, 4, 4, 2), "integers": (3,)}
INTEGERS = 5  # of which those inputs are
_RANGE = {"value_range": (0, 1)}

_OF_SERIES: Mapping[str, Callable] = {
    "Activation": lambda: layers.Activation("gelu"),
    "ActivityRegularization": lambda: layers.ActivityRegularization(l1=0.1, l2=0.1),
    "AdaptiveAveragePooling1D": lambda: layers.AdaptiveAveragePooling1D(3),
    "AdaptiveMaxPooling1D": lambda: layers.AdaptiveMaxPooling1D(3),
    "AveragePooling1D": lambda: layers.AveragePooling1D(2),
    "BatchNormalization": lambda: layers.BatchNormalization(synchronized=True),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(3), merge_mode="sum"),
    "Conv1D": lambda: layers.Conv1D(3, 2, padding="causal"),
    "Conv1DTranspose": lambda: layers.Conv1DTranspose(3, 2),
    "Cropping1D": layers.Cropping1D,
    "Dense": lambda: layers.Dense(3),
    "DepthwiseConv1D": lambda: layers.DepthwiseConv1D(2),
    "Discretization": lambda: layers.Discretization([0.2, 0.5]),
    "EinsumDense": lambda: layers.EinsumDense("abc,cd->abd", (6, 5), bias_axes="d"),
    "ELU": layers.ELU,
    "Flatten": layers.Flatten,
    "GlobalAveragePooling1D": layers.GlobalAveragePooling1D,
    "GlobalMaxPooling1D": layers.GlobalMaxPooling1D,
    "GroupNormalization": lambda: layers.GroupNormalization(2),
    "GRU": lambda: layers.GRU(3, reset_after=False),
    "Identity": layers.Identity,
    "Lambda": lambda: layers.Lambda(lambda x: 2 * x),
    "LayerNormalization": layers.LayerNormalization,
    "LeakyReLU": layers.LeakyReLU,
    "LSTM": lambda: layers.LSTM(3, go_backwards=True),
    "Masking": lambda: keras.Sequential([layers.Masking(0.0), layers.LSTM(2)]),
    "MaxPooling1D": layers.MaxPooling1D,
    "Normalization": lambda: layers.Normalization(mean=0.5, variance=2.0),
    "Permute": lambda: layers.Permute((2, 1)),
    "PReLU": lambda: layers.PReLU(shared_axes=[1]),
    "ReLU": lambda: layers.ReLU(negative_slope=0.1),
    "RepeatVector": lambda: keras.Sequential([layers.Flatten(), layers.RepeatVector(3)]),
    "Reshape": lambda: layers.Reshape((4, 6)),
    "RMSNormalization": layers.RMSNormalization,
    "RNN": lambda: layers.RNN(layers.SimpleRNNCell(3), return_sequences=True),
    "SeparableConv1D": lambda: layers.SeparableConv1D(2, 2),
    "SimpleRNN": lambda: layers.SimpleRNN(3, unroll=True),
    "Softmax": layers.Softmax,
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(3)),
    "StackedRNNCells": lambda: layers.RNN(
        layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])
    ),
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(3)),
    "UnitNormalization": layers.UnitNormalization,
    "UpSampling1D": layers.UpSampling1D,
    "ZeroPadding1D": layers.ZeroPadding1D,
}
_JOINING: Mapping[str, Callable] = {
    "Add": layers.Add,
    "AdditiveAttention": layers.AdditiveAttention,
    "Attention": lambda: layers.Attention(use_scale=True),
    "Average": layers.Average,
    "Concatenate": layers.Concatenate,
    "Dot": lambda: layers.Dot(axes=2, normalize=True),
    "Maximum": layers.Maximum,
    "Minimum": layers.Minimum,
    "Multiply": layers.Multiply,
    "Subtract": layers.Subtract,
}
_ATTENDING: Mapping[str, Callable] = {  # whose inputs are no list
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 3),
    "GroupedQueryAttention": lambda: layers.GroupQueryAttention(3, 4, 2),
}
_OF_IMAGES: Mapping[str, Callable] = {
    "AdaptiveAveragePooling2D": lambda: layers.AdaptiveAveragePooling2D(3),
    "AdaptiveMaxPooling2D": lambda: layers.AdaptiveMaxPooling2D(3),
    "AutoContrast": lambda: layers.AutoContrast(**_RANGE),
    "AveragePooling2D": lambda: layers.AveragePooling2D(2),
    "CenterCrop": lambda: layers.CenterCrop(4, 4),
    "ContrastLimitedAdaptiveHistogramEqualization": (
        lambda: layers.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2), **_RANGE)
    ),
    "Conv2D": lambda: layers.Conv2D(2, 3, dilation_rate=2),
    "Conv2DTranspose": lambda: layers.Conv2DTranspose(2, 3, strides=2),
    "ConvLSTM1D": lambda: layers.ConvLSTM1D(2, 3),
    "Cropping2D": layers.Cropping2D,
    "DepthwiseConv2D": lambda: layers.DepthwiseConv2D(3),
    "GlobalAveragePooling2D": layers.GlobalAveragePooling2D,
    "GlobalMaxPooling2D": layers.GlobalMaxPooling2D,
    "MaxPooling2D": layers.MaxPooling2D,
    "Pipeline": lambda: layers.Pipeline([layers.Rescaling(2.0), layers.CenterCrop(4, 4)]),
    "Rescaling": lambda: layers.Rescaling(2.0, 0.5),
    "Resizing": lambda: layers.Resizing(3, 3),
    "SeparableConv2D": lambda: layers.SeparableConv2D(2, 3),
    "Solarization": lambda: layers.Solarization(**_RANGE),
    "UpSampling2D": lambda: layers.UpSampling2D(interpolation="bilinear"),
    "ZeroPadding2D": layers.ZeroPadding2D,
}
_OF_VOLUMES: Mapping[str, Callable] = {  # in float32: TensorFlow pools no others on CPUs
    "AdaptiveAveragePooling3D": lambda: layers.AdaptiveAveragePooling3D(2),
    "AdaptiveMaxPooling3D": lambda: layers.AdaptiveMaxPooling3D(2),
    "AveragePooling3D": lambda: layers.AveragePooling3D(2),
    "Conv3D": lambda: layers.Conv3D(2, 2),
    "Conv3DTranspose": lambda: layers.Conv3DTranspose(2, 2),
    "ConvLSTM2D": lambda: layers.ConvLSTM2D(2, 2),
    "ConvLSTM3D": lambda: keras.Sequential(
        [layers.Reshape((2, 2, 4, 4, 2)), layers.ConvLSTM3D(2, 2)]
    ),
    "Cropping3D": layers.Cropping3D,
    "GlobalAveragePooling3D": layers.GlobalAveragePooling3D,
    "GlobalMaxPooling3D": layers.GlobalMaxPooling3D,
    "MaxPooling3D": layers.MaxPooling3D,
    "UpSampling3D": layers.UpSampling3D,
    "ZeroPadding3D": layers.ZeroPadding3D,
}
_OF_INTEGERS: Mapping[str, Callable] = {
    "CategoryEncoding": lambda: layers.CategoryEncoding(INTEGERS, output_mode="count"),
    "Embedding": lambda: layers.Embedding(INTEGERS, 3),
    "Hashing": lambda: layers.Hashing(4, output_mode="multi_hot"),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot"),
    "ReversibleEmbedding": lambda: layers.ReversibleEmbedding(INTEGERS, 3),
}


def _calls(examples: Mapping[str, Callable]) -> dict[str, Callable]:
    return {name: lambda x, make=make: make()(x) for name, make in examples.items()}


# By the kind of inputs: how many a call has, and for each layer a function of so many.
BY_INPUTS: Mapping[str, tuple[int, Mapping[str, Callable]]] = {
    "series": (1, _calls(_OF_SERIES)),
    "two_series": (
        2,
        {
            **{name: lambda *x, make=make: make()(list(x)) for name, make in _JOINING.items()},
            **{name: lambda *x, make=make: make()(*x) for name, make in _ATTENDING.items()},
        },
    ),
    "images": (1, _calls(_OF_IMAGES)),
    "volumes": (1, _calls(_OF_VOLUMES)),
    "integers": (1, _calls(_OF_INTEGERS)),
}
# Each row is changed by a number of its own: not as one device does, and no row of another's.
OF_RANDOM_IMAGES: Mapping[str, Callable] = {
    "AlphaDropout": lambda: layers.AlphaDropout(0.3),
    "AugMix": lambda: layers.AugMix(**_RANGE),
    "Dropout": lambda: layers.Dropout(0.3),
    "GaussianDropout": lambda: layers.GaussianDropout(0.3),
    "GaussianNoise": lambda: layers.GaussianNoise(0.3),
    "RandAugment": lambda: layers.RandAugment(**_RANGE),
    "RandomBrightness": lambda: layers.RandomBrightness(0.2, **_RANGE),
    "RandomColorDegeneration": lambda: layers.RandomColorDegeneration(0.5),
    "RandomColorJitter": lambda: layers.RandomColorJitter(brightness_factor=0.2, **_RANGE),
    "RandomContrast": lambda: layers.RandomContrast(0.2, **_RANGE),
    "RandomCrop": lambda: layers.RandomCrop(4, 4),
    "RandomElasticTransform": layers.RandomElasticTransform,
    "RandomErasing": lambda: layers.RandomErasing(**_RANGE),
    "RandomFlip": layers.RandomFlip,
    "RandomGaussianBlur": layers.RandomGaussianBlur,
    "RandomGrayscale": layers.RandomGrayscale,
    "RandomHue": lambda: layers.RandomHue(0.2, **_RANGE),
    "RandomInvert": lambda: layers.RandomInvert(**_RANGE),
    "RandomPerspective": layers.RandomPerspective,
    "RandomPosterization": lambda: layers.RandomPosterization(4, **_RANGE),
    "RandomRotation": lambda: layers.RandomRotation(0.2),
    "RandomSaturation": lambda: layers.RandomSaturation(0.4, **_RANGE),
    "RandomSharpness": lambda: layers.RandomSharpness(0.4, **_RANGE),
    "RandomShear": lambda: layers.RandomShear(x_factor=0.2),
    "RandomTranslation": lambda: layers.RandomTranslation(0.2, 0.2),
    "RandomZoom": lambda: layers.RandomZoom(0.2),
    "SpatialDropout2D": lambda: layers.SpatialDropout2D(0.3),
}
MEET_ROWS = {"AugMix", "RandAugment"}  # Keras's `Equalization` has one histogram of all rows
OTHER_LAYERS = {
    **dict.fromkeys(
        ("AbstractRNNCell", "Layer", "Wrapper", "BaseImagePreprocessingLayer"), "for subclasses"
    ),
    **dict.fromkeys(("GRUCell", "LSTMCell", "SimpleRNNCell"), "within others"),
    **dict.fromkeys(("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"), "of elsewhere"),
    **dict.fromkeys(("CutMix", "MixUp"), "of pictures with their labels, in a `tf.data.Dataset`"),
    **dict.fromkeys(("SpatialDropout1D", "SpatialDropout3D"), "as SpatialDropout2D"),
    "MelSpectrogram": "of sounds, a conformance case",
    "STFTSpectrogram": "of sounds, as MelSpectrogram",
    "Equalization": "Keras makes no functional model of it; within `RandAugment`",
    "HashedCrossing": "of two columns, before a model",
    "InputLayer": "in every model",
    "MaxNumBoundingBoxes": "of boxes, in a `tf.data.Dataset`",
    "StringLookup": "of text, before a model",
    "TextVectorization": "of text, before a model",
}
