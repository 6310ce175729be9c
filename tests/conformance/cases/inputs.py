"""However the rows come, `fit`, `evaluate` and `predict` see each of them once."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.conformance.case import Run, case
from tests.conformance.models import MODELS
from tests.helpers import (
    BATCH,
    EVEN_ROWS,
    SEED,
    UNEVEN_ROWS,
    Training,
    momentum_sgd,
    numbered,
    tiny_data,
)


@case()
def even_batches(run: Run):
    return _train(run, rows=EVEN_ROWS).results()


@case(core=True)
def last_batch_of_one_row(run: Run):
    return _train(run, rows=BATCH + 1).results()


@case(core=True)
def every_batch_of_one_row(run: Run):
    return _train(run, rows=3, batch_size=1).results()


@case(core=True)
def images_of_one_row(run: Run):
    """Replicas without rows compute what TensorFlow cannot compute of no rows on a CPU."""

    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(72, "tanh"),
                layers.Reshape((6, 6, 2)),
                layers.Conv2D(3, 2, activation="tanh"),
                layers.MaxPooling2D(2, 1),
                layers.Conv2D(2, 2, dilation_rate=2),
                layers.SeparableConv2D(2, 2),
                layers.Flatten(),
                layers.Reshape((2, -1)),
                layers.Conv1D(4, 2, padding="same"),
                layers.MaxPooling1D(2),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    training = _train(run, build=build, rows=3, batch_size=1, validation_data=tiny_data(1))
    training.extra["predicted"] = training.model.predict(tiny_data(1)[0], verbose=0)
    return training.results()


@case(atol=1e-6)  # TensorFlow computes it in float32
def ctc_of_one_row(run: Run):
    """The loss of no rows, Keras's or a function's, is one that TensorFlow makes an error of."""

    def build():
        inputs = keras.Input((6,))
        hidden = layers.Dense(5, "tanh")(layers.Reshape((6, 1))(inputs))
        return keras.Model(inputs, [layers.Dense(4)(hidden), layers.Dense(4)(hidden)])

    def data(rows: int):
        y = np.arange(3 * rows).reshape(rows, 3) % 3 + 1
        return tiny_data(rows)[0], [y, y]

    def own(y_true, y_pred):
        lengths = keras.ops.sum(keras.ops.ones_like(y_true, "int32"), 1)
        steps = keras.ops.sum(keras.ops.ones_like(y_pred[..., 0], "int32"), 1)
        losses = keras.ops.ctc_loss(y_true, y_pred, lengths, steps)
        return losses[:, None]

    options = {"loss": [keras.losses.CTC(), own]}
    return _train(
        run, build=build, data=data, compile_options=lambda: options, rows=5, batch_size=4
    ).results()


@case()
def sounds_of_one_row(run: Run):
    """Other layers that TensorFlow cannot compute of no rows, two of them on any device."""
    adaptive = getattr(layers, "AdaptiveMaxPooling1D", layers.MaxPooling1D)  # from Keras 3.13 on

    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(128, "tanh"),
                layers.MelSpectrogram(
                    32, 16, sampling_rate=800, num_mel_bins=8, min_freq=20, power_to_db=False
                ),
                layers.Reshape((2, 6, 6, 1)),
                layers.TimeDistributed(layers.Conv2DTranspose(2, 2, activation="tanh")),
                layers.Reshape((14, 14)),
                adaptive(3),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    training = _train(run, build=build, rows=3, batch_size=1, validation_data=tiny_data(1))
    training.extra["predicted"] = training.model.predict(tiny_data(1)[0], verbose=0)
    return training.results()


@case()
def shuffled_arrays(run: Run):
    return _train(run, shuffle=True).results()


@case(core=True)
def sample_weight(run: Run):
    return _train(run, sample_weight=_row_weights(UNEVEN_ROWS)).results()


@case()
def class_weight(run: Run):
    return _train(run, class_weight={0: 0.2, 1: 1.0, 2: 3.0}).results()


@case()
def validation_data(run: Run):
    return run.train(validation_data=tiny_data(BATCH + 1, seed=1)).results()


@case()
def validation_data_with_sample_weight(run: Run):
    data = (*tiny_data(BATCH + 1, seed=1), _row_weights(BATCH + 1))
    return run.train(validation_data=data, validation_batch_size=5).results()


@case()
def validation_split(run: Run):
    return _train(run, rows=2 * UNEVEN_ROWS, validation_split=0.3).results()


@case(core=True)
def steps_per_execution(run: Run):
    """Four batches of 12 and one of 5, three at a time: the last execution has two."""
    return _with_compile(run, steps_per_execution=3, rows=4 * BATCH + 5)


@case()
def steps_per_execution_in_evaluate_and_predict(run: Run):
    training = run.train(compile_options=lambda: _compiled(steps_per_execution=2))
    return {**training.results(), **_evaluate_and_predict(training.model)}


@case()
def steps_per_epoch(run: Run):
    dataset = _dataset(UNEVEN_ROWS).repeat()
    return run.train(data=None, x=dataset, steps_per_epoch=4).results()


@case()
def steps_per_epoch_of_arrays(run: Run):
    return _train(run, rows=2 * BATCH, steps_per_epoch=2).results()


@case(core=True)
def python_generator(run: Run):
    """Every batch of a generator is used once: none is lost by looking at its shape."""
    x, y = tiny_data(4 * BATCH)

    def batches():
        for start in range(0, len(x), 8):
            yield x[start : start + 8], y[start : start + 8]

    return run.train(data=None, x=batches(), steps_per_epoch=3).results()


@case()
def python_generator_of_uneven_batches(run: Run):
    x, y = tiny_data(30)

    def batches():
        for start, stop in [(0, 7), (7, 8), (8, 20), (20, 30)]:
            yield x[start:stop], y[start:stop]

    return _without_iterations(run.train(data=None, x=batches(), epochs=1))


@case()
def unknown_cardinality(run: Run):
    dataset = _dataset(UNEVEN_ROWS).filter(lambda x, y: tf.shape(x)[0] > 0)
    return _without_iterations(run.train(data=None, x=dataset))


@case()
def batches_of_unknown_size(run: Run):
    """A dataset that hides how many rows a batch has, and changes it."""
    return _without_iterations(run.train(data=None, x=_dataset_of_many_sizes("mlp")))


@case(core=True)
def sparse_gradients_of_many_sizes(run: Run):
    """One traced step serves batches of 7, 1, 12 and 10 rows: a gradient has as many."""
    dataset = _dataset_of_many_sizes("embedding").repeat()
    return run.train("embedding", data=None, x=dataset, steps_per_epoch=4).results()


@case()
def sparse_gradients_of_many_sizes_in_a_loop(run: Run):
    dataset = _dataset_of_many_sizes("embedding").repeat()
    options = {**MODELS["embedding"].compile_options(), "steps_per_execution": 2}
    training = run.train(
        "embedding", data=None, x=dataset, steps_per_epoch=4, compile_options=lambda: options
    )
    return training.results()


@case(core=True)
def predict_batches_of_many_sizes(run: Run):
    dataset = _dataset_of_many_sizes("mlp").map(lambda x, y: x)
    return {"predict": _untrained(run).predict(dataset, verbose=0)}


@case(core=True)
def dataset_shuffled_anew_in_each_epoch(run: Run):
    """No order is lost to building the model: also where a second `fit` goes on."""
    keras.utils.set_random_seed(SEED)  # a part of the order, and not the same in every process
    rows = tf.data.Dataset.from_tensor_slices(tiny_data(UNEVEN_ROWS))
    dataset = rows.shuffle(UNEVEN_ROWS, seed=3).batch(BATCH)
    model = run.train(data=None, x=dataset).model
    history = model.fit(dataset, verbose=0).history
    return Training(model, history).results()


@case()
def dataset_for_validation(run: Run):
    return run.train(validation_data=_dataset(BATCH + 1)).results()


@case()
def dataset_sharded_by_the_user(run: Run):
    """Each worker reads its share of every batch of a dataset whose options ask for that."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return run.train(data=None, x=_dataset(UNEVEN_ROWS).with_options(options)).results()


@case()
def dataset_distributed_by_the_user(run: Run):
    strategy = run.strategy or tf.distribute.get_strategy()
    dataset = strategy.experimental_distribute_dataset(_dataset(UNEVEN_ROWS))
    return _without_iterations(run.train(data=None, x=dataset))


@case()
def datasets_from_function(run: Run):
    """Every input pipeline yields one batch for each of its replicas."""

    def pipeline(context) -> tf.data.Dataset:
        batch = context.get_per_replica_batch_size(BATCH)
        rows = tf.data.Dataset.from_tensor_slices(tiny_data(2 * BATCH)).batch(batch)
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id)

    strategy = run.strategy or tf.distribute.get_strategy()
    dataset = strategy.distribute_datasets_from_function(pipeline)
    return _without_iterations(run.train(data=None, x=dataset))


@case()
def sparse_tensors(run: Run):
    x, y = tiny_data(UNEVEN_ROWS)
    rows = tf.sparse.from_dense(np.where(x > 0, x, 0))
    dataset = tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)

    def build():
        layers = [keras.Input((6,), sparse=True), keras.layers.Dense(5), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    return run.train(build=build, data=None, x=dataset).results()


class Sums(keras.layers.Layer):
    """Sums of ragged rows of numbers, and of their squares."""

    def call(self, x):
        return tf.stack([tf.reduce_sum(x, axis=1), tf.reduce_sum(x * x, axis=1)], axis=1)


class OfRaggedRows(keras.Model):
    """A layer of it takes ragged tensors."""

    def __init__(self):
        super().__init__()
        self.sums, self.scores = Sums(), keras.layers.Dense(3)

    def call(self, x):
        return self.scores(self.sums(x))


@case()
def ragged_tensors(run: Run):
    x, y = tiny_data(UNEVEN_ROWS)
    rows = tf.RaggedTensor.from_tensor(x, lengths=1 + np.arange(UNEVEN_ROWS) % 6)
    dataset = tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)
    return run.train(build=OfRaggedRows, data=None, x=dataset).results()


class Batches(keras.utils.PyDataset):
    """Arrays as a PyDataset, with other features in each epoch."""

    def __init__(self, rows: int):
        super().__init__()
        self._x, self._y = tiny_data(rows)

    def on_epoch_begin(self) -> None:
        self._x = self._x[:, ::-1]

    def on_epoch_end(self) -> None:
        self._x = 0.9 * self._x

    def __len__(self) -> int:
        return -(-len(self._x) // BATCH)

    def __getitem__(self, index: int):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[part], self._y[part]


@case()
def py_dataset(run: Run):
    return run.train(data=None, x=Batches(UNEVEN_ROWS)).results()


@case()
def run_eagerly(run: Run):
    return _with_compile(run, run_eagerly=True, epochs=1)


@case()
def run_eagerly_with_batches_of_one_row(run: Run):
    """Without a graph, Keras reduces a loss of no rows to no number."""
    return run.train(
        compile_options=lambda: _compiled(run_eagerly=True), rows=2, batch_size=1, epochs=1
    ).results()


@case(core=True)
def evaluate_and_predict_without_fit(run: Run):
    keras.utils.set_random_seed(1)
    model = _untrained(run)
    return _evaluate_and_predict(model)


@case()
def evaluate_with_sample_weight(run: Run):
    model = _untrained(run)
    x, y = tiny_data(UNEVEN_ROWS)
    evaluated = model.evaluate(x, y, BATCH, verbose=0, sample_weight=_row_weights(UNEVEN_ROWS))
    return numbered("evaluate", evaluated)


@case()
def predict_fewer_rows_than_replicas(run: Run):
    model = _untrained(run)
    return {"predict": model.predict(tiny_data(1)[0], verbose=0)}


@case()
def predict_a_dataset_of_unknown_cardinality(run: Run):
    dataset = _dataset(UNEVEN_ROWS).map(lambda x, y: x).filter(lambda x: True)
    return {"predict": _untrained(run).predict(dataset, verbose=0)}


@case()
def fit_again_with_another_batch_size(run: Run):
    training = _train(run)
    x, y = tiny_data(20, seed=2)
    training.extra = training.model.fit(x, y, batch_size=7, shuffle=False, verbose=0).history
    return training.results()


def _train(run: Run, **options):
    """Train on batches of 12 rows and a last one of 5."""
    return run.train(**{"rows": UNEVEN_ROWS, "batch_size": BATCH, **options})


def _without_iterations(training: Training) -> dict:
    """All but the number of steps, which plain Keras gets wrong where an epoch's end is a surprise.

    The step that finds no batch fails, but has counted itself already: 6 for two epochs of two.
    """
    results = training.results()
    del results["optimizer/0"]
    return results


def _row_weights(rows: int) -> np.ndarray:
    return np.random.default_rng(3).uniform(0, 2, rows).astype("float32")


def _dataset_of_many_sizes(model: str) -> tf.data.Dataset:
    """Batches of 7, 1, 12 and 10 rows; nothing tells beforehand."""
    x, y = MODELS[model].data(30)
    pieces = [(x[a:b], y[a:b]) for a, b in [(0, 7), (7, 8), (8, 20), (20, 30)]]
    specs = [tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in (x, y)]
    return tf.data.Dataset.from_generator(lambda: iter(pieces), output_signature=tuple(specs))


def _dataset(rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tiny_data(rows)).batch(BATCH)


def _compiled(**options) -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"], **options}


def _with_compile(run: Run, rows: int = UNEVEN_ROWS, epochs: int = 2, **options) -> dict:
    compile_options = lambda: _compiled(**options)  # noqa: E731
    return _train(run, compile_options=compile_options, rows=rows, epochs=epochs).results()


def _untrained(run: Run) -> keras.Model:
    keras.utils.set_random_seed(1)
    with run.scope():
        model = MODELS["mlp"].build()
        model.compile(optimizer=momentum_sgd(), **_compiled())
    return model


def _evaluate_and_predict(model: keras.Model) -> dict:
    x, y = tiny_data(UNEVEN_ROWS)
    return {
        **numbered("evaluate", model.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
    }
