"""The program of a rank: what a case returns goes to the test; an error is the reply, by rank."""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.conformance.cases.custom_training import StopsAfterThreeSteps
from tests.multi_process.answering import answer_requests
from tests.tensor_parallel.layouts import LayoutOfAnything, layout_map
from tests.tensor_parallel.penalties import PENALISED
from tests.tensor_parallel.test_training import TRANSFORMER, _adamw, _tokens, _transformer
from tfparallel.coordination.timeouts import WorkerTimeouts

PAIR = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
CASES: dict = {}


def _case(function):
    CASES[function.__name__] = function
    return function


TRANSPORT = "horovod" if "HOROVOD_RANK" in os.environ else "ring"
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # lets a case begin one


def _rank() -> int:
    if TRANSPORT == "horovod":
        return int(os.environ["HOROVOD_RANK"])
    return int(os.environ["TF_CONFIG"].rpartition('"index": ')[2].rstrip("}"))


def _num_ranks() -> int:
    if TRANSPORT == "horovod":
        return int(os.environ["HOROVOD_SIZE"])
    return os.environ["TF_CONFIG"].count("127.0.0.1:")


def _strategy(layouts=None, replicas=1, **options) -> tfparallel.TensorParallelStrategy:
    parts = _num_ranks() // replicas
    layout = layouts if isinstance(layouts, str) else layout_map(replicas, parts, layouts or PAIR)
    return _strategy_of(layout, **options)


def _strategy_of(layout, **options) -> tfparallel.TensorParallelStrategy:
    return tfparallel.TensorParallelStrategy(layout, transport=TRANSPORT, **options)


def _pair() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(7, "tanh", name="up")(layers.Dense(6, name="first")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="down")(x))


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


def _compared(strategy, like=None, **options) -> helpers.Training:
    """What ranks have trained, once it is known to be as one device trains it, or a model `like`
    it."""
    options = {"rows": helpers.UNEVEN_ROWS, "batch_size": helpers.BATCH, **options}
    keras.backend.clear_session()
    candidate = helpers.train(strategy, **options)
    keras.backend.clear_session()
    expected = helpers.train(None, **{**options, "build": like or options["build"]})
    helpers.assert_same_training(expected, candidate, atol=1e-10)
    return candidate


@_case
def a_transformer(layout=None, **options) -> dict:
    """Uneven heads, units and tokens; a last batch that is smaller; a norm that clips."""
    strategy = _strategy(layout or TRANSFORMER, **options)
    with helpers.in_float64():
        given = {"build": _transformer, "data": _tokens, "optimizer": _adamw}
        model = _compared(strategy, **given).model
        x, y = _tokens(5)
        predicted, eager = model.predict(x, verbose=0), np.asarray(model(x))
        loss = model.evaluate(x, y, verbose=0)[0]
        whole = model.get_layer("up0").kernel
        folder = f"{os.environ['CASE_FOLDER']}/{_rank()}"
        model.save(f"{folder}.keras")
        loaded = keras.saving.load_model(f"{folder}.keras")
        np.testing.assert_allclose(loaded.predict(x, verbose=0), predicted, atol=1e-12)
        model.export(f"{folder}.served", verbose=False)
        served = tf.saved_model.load(f"{folder}.served")
        np.testing.assert_allclose(served.serve(x), predicted, atol=1e-12)
        np.testing.assert_allclose(eager, predicted, atol=1e-12)
        own = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
        np.testing.assert_allclose(loss, np.mean(own), atol=1e-12)
    return {
        "shown": repr(strategy),
        "whole": list(whole.shape),
        "stored": [part.shape.as_list() for part in whole.value.parts[0]],
        "slot": [p.shape.as_list() for p in _slot(model, whole).value.parts[0]],
    }


def _slot(model, weight):
    name = f"{weight.path.replace('/', '_')}_momentum"
    return next(v for v in model.optimizer.variables if v.path.endswith(name))


@_case
def replicas_of_ranks() -> dict:
    """The last batch has one row, so that one replica has none; an update is of two batches."""
    strategy = _strategy(TRANSFORMER, replicas=2)
    clips = {"global_clipnorm": 0.1, "gradient_accumulation_steps": 2}
    with helpers.in_float64():
        model = _compared(
            strategy,
            build=_without_dropout,
            data=_tokens,
            optimizer=lambda: keras.optimizers.Adam(0.01, **clips),
            rows=helpers.BATCH + 1,
        ).model
        x, y = _tokens(5)
        predicted = model.predict(x, verbose=0)
        loss = model.evaluate(x, y, verbose=0)[0]
        file = f"{os.environ['CASE_FOLDER']}/{_rank()}.keras"
        model.save(file)
        loaded = keras.saving.load_model(file)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), predicted, atol=1e-12)
        np.testing.assert_allclose(loaded.evaluate(x, y, verbose=0)[0], loss, atol=1e-12)
    whole = model.get_layer("up").kernel
    return {
        "shown": repr(strategy),
        "stored": [part.shape.as_list() for part in whole.value.parts[0]],
        "replicas": strategy.num_replicas_in_sync,
    }


def _without_dropout() -> keras.Model:
    """A table whose gradient is sparse, heads, a pair, and moments of all rows of a batch."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(21, 8, name="tokens")(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(3, 4)(x, x)])
    y = layers.Dense(15, "gelu", name="up")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(8, name="down")(y)])
    x = layers.BatchNormalization(synchronized=True)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, layers.Dense(3)(x))


@_case
def gathers_of_replicas() -> dict:
    """What TensorFlow's `strategy_gather_test` asks: of one to three dims, along each of them."""
    strategy, refused = _strategy(replicas=2), {}
    for shape, axis in (((3,), 0), ((2, 3), 0), ((2, 3), 1), *(((2, 1, 3), i) for i in range(3))):
        values = _of_shapes(strategy, lambda number, s=shape, i=axis: _longer(s, i, number))
        expected = np.concatenate([_numbers(_longer(shape, axis, r), r) for r in range(2)], axis)
        for gather in (strategy.gather, tf.function(strategy.gather)):
            np.testing.assert_array_equal(gather(values, axis=axis), expected)
        for run in (strategy.run, tf.function(strategy.run)):
            of_replica = run(lambda x, i=axis: _context().all_gather([x, 2 * x], i), (values,))
            own = [strategy.experimental_local_results(each)[0] for each in of_replica]
            np.testing.assert_array_equal(own, [expected, 2 * expected])
    for name, shapes in {"shape": [(2, 3), (2, 4)], "rank": [(2, 3), (2, 3, 1)]}.items():
        values = _of_shapes(strategy, shapes.__getitem__)
        for gather in (strategy.gather, tf.function(strategy.gather)):
            try:
                gather(values, axis=0)
            except (tf.errors.InvalidArgumentError, ValueError) as error:
                refused.setdefault(name, []).append(str(error))
    return {"refused": refused, "gradient": _gradient_of_gathered(strategy)}


def _context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def _longer(shape: tuple[int, ...], axis: int, replica: int) -> tuple[int, ...]:
    """Each replica has more along `axis` than the one before."""
    return (*shape[:axis], shape[axis] + replica, *shape[axis + 1 :])


def _numbers(shape: tuple[int, ...], replica: int) -> np.ndarray:
    return 100 * replica + np.arange(np.prod(shape)).reshape(shape)


def _of_shapes(strategy, shape_of):
    return strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(
            _numbers(shape_of(c.replica_id_in_sync_group), c.replica_id_in_sync_group)
        )
    )


def _gradient_of_gathered(strategy) -> list:
    """Of the sum over replicas of the gathered numbers, weighed: d loss / d own numbers."""

    def replica_step():
        number = tf.cast(_context().replica_id_in_sync_group, tf.float32)
        x = tf.ones([2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = _context().all_gather(x, 0)
            loss = (1 + number) * tf.reduce_sum(gathered * tf.range(4.0))
        return tape.gradient(loss, x)

    return [
        strategy.experimental_local_results(run(replica_step))[0].numpy().tolist()
        for run in (strategy.run, tf.function(strategy.run))
    ]


@_case
def what_a_step_exchanges() -> dict:
    """A pair behind a whole layer: one sum forward and one backward; and `predict`.

    Weights are compared in steps that are not counted.
    """
    strategy = _strategy({**PAIR, ".*up/bias": ("model",)}, check_weights_every=3)
    ring, counts = strategy.extended.ranks._collectives._ring, {"sums": 0, "gathers": 0}
    for kind, name in (("sums", "all_reduce"), ("gathers", "all_gather")):
        setattr(ring, name, _counting(getattr(ring, name), counts, kind))
    with strategy.scope():
        model = _pair()
        model.compile("sgd", "mse")
    x, y = np.ones((4, 6), "float32"), np.ones((4, 3), "float32")
    seen = {}
    for what, call in {
        "train": lambda: model.train_on_batch(x, y),
        "predict": lambda: model.predict_on_batch(x),
    }.items():
        call()
        counts.update(sums=0, gathers=0)
        call()
        seen[what] = dict(counts)
    return seen


@_case
def what_horovod_exchanges_in_a_step() -> dict:
    """The same, by Horovod's own timeline, which the first rank writes."""
    from tfparallel.communication.horovod_start import hvd

    strategy = _strategy({**PAIR, ".*up/bias": ("model",)}, check_weights_every=3)
    with strategy.scope():
        model = _pair()
        model.compile("sgd", "mse")
    x, y = np.ones((4, 6), "float32"), np.ones((4, 3), "float32")
    model.train_on_batch(x, y)
    file = f"{os.environ['CASE_FOLDER']}/timeline.json"
    hvd.start_timeline(file)
    model.train_on_batch(x, y)
    hvd.stop_timeline()
    text, deadline = "", time.monotonic() + 20
    while _rank() == 0 and not text.endswith("]"):  # a thread of Horovod's writes it
        assert time.monotonic() < deadline, text
        text = Path(file).read_text()
    return {kind: text.count(f'"ph": "B", "name": "{kind}"') for kind in ("ALLREDUCE", "ALLGATHER")}


def _counting(function, counts, kind):
    def counted(array):
        counts[kind] += 1
        return function(array)

    return counted


@_case
def layers_and_optimizers() -> dict:
    """What computes in parts, reads wholes, or exchanges beside layers."""
    strategy = _strategy_of(LayoutOfAnything(layout_map(1, _num_ranks(), {}).device_mesh))
    compiled = helpers.tiny_compile_options
    with helpers.in_float64():
        for options in (
            {"build": _recurrent, "data": _sequences},
            {"build": _images, "data": _pictures},
            {"build": _rematerialized, "like": _normalized},
            {"build": _normalized, "optimizer": lambda: keras.optimizers.Adam(clipnorm=0.05)},
            {"build": _normalized, "optimizer": lambda: keras.optimizers.Adafactor(0.01)},
            {
                "build": _normalized,
                "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                    helpers.momentum_sgd(), initial_scale=8.0
                ),
            },
            {
                "build": _normalized,
                "optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
            },
            {
                "build": _normalized,
                "compile_options": lambda: {**compiled(), "steps_per_execution": 2},
            },
            {
                "build": _normalized,
                "compile_options": lambda: {**compiled(), "run_eagerly": True},
                "optimizer": _adam,
            },
        ):
            _compared(strategy, **options)
    return {}


_EVERY_SECOND = {"gradient_accumulation_steps": 2}
_CLIPPING: dict = {
    "at the end of an accumulation": lambda of: of.Adam(
        0.01, global_clipnorm=0.05, **_EVERY_SECOND
    ),
    "each at the end of an accumulation": lambda of: of.SGD(0.1, clipnorm=0.02, **_EVERY_SECOND),
    "where all is finite": lambda of: of.LossScaleOptimizer(of.Adam(0.01, clipnorm=0.02)),
    "whole where all is finite": lambda of: of.LossScaleOptimizer(of.Lamb(global_clipnorm=0.05)),
    "both": lambda of: of.LossScaleOptimizer(
        of.Adam(0.01, global_clipnorm=0.05, **_EVERY_SECOND), initial_scale=8.0
    ),
}


@_case
def a_norm_in_a_branch(clips: str) -> dict:
    """A norm that clips in the branch that ends an accumulation, or where a loss scale finds all
    gradients finite; a batch of which that is not so is left out."""
    layout = LayoutOfAnything(layout_map(1, _num_ranks(), {}).device_mesh)
    strategy = _strategy_of(layout)
    has_scale = "finite" in clips or clips == "both"
    given = {
        "build": _embedded,
        "optimizer": lambda: _CLIPPING[clips](keras.optimizers),
        "data": _one_infinite if has_scale else helpers.tiny_data,
        "rows": 5 * helpers.BATCH,
    }
    with helpers.in_float64():
        trained = _compared(strategy, **given)
    return {"finite": all(np.isfinite(x).all() for x in trained.model.get_weights())}


@_case
def an_optimizer_in_a_branch(name: str) -> dict:
    """Of the step: it takes all parts of the gradients, and a rank has its own ones."""
    makes = {
        "clips": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
        "whole": lambda: keras.optimizers.Adafactor(0.01),
    }
    layout = LayoutOfAnything(layout_map(1, _num_ranks(), {}).device_mesh)
    strategy = _strategy_of(layout)
    loss = helpers.tiny_compile_options()["loss"]
    with helpers.in_float64():
        _compared(
            strategy,
            build=lambda: StopsAfterThreeSteps(helpers.tiny_model().layers),
            optimizer=makes[name],
            compile_options=lambda: {"loss": loss},
        )
    return {}


def _one_infinite(rows: int) -> tuple:
    x, y = helpers.tiny_data(rows)
    x[helpers.BATCH + 1, 0] = np.inf
    return x, y


def _embedded() -> keras.Model:
    """Its table's gradient is sparse."""
    inputs = keras.Input((6,))
    tokens = layers.Lambda(lambda x: tf.cast(tf.abs(x[:, 1:]) * 3, tf.int32) % 7)(inputs)
    vectors = layers.Flatten()(layers.Embedding(7, 4, name="embedding")(tokens))
    x = layers.Concatenate()([vectors, layers.Dense(5, name="dense_0")(inputs)])
    return keras.Model(inputs, layers.Dense(3, name="dense_1")(x))


def _recurrent() -> keras.Model:
    x = keras.Input((5, 3))
    return keras.Model(x, layers.Dense(3, name="dense_2")(layers.LSTM(4, name="lstm")(x)))


def _sequences(rows: int) -> tuple:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5, 3)), rng.integers(0, 3, rows)


def _images() -> keras.Model:
    inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", name="conv2d_0")(inputs)
    x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    x = layers.Conv2D(6, 3, name="conv2d_1")(x)
    return keras.Model(inputs, layers.Dense(3, name="dense_2")(layers.GlobalAveragePooling2D()(x)))


def _pictures(rows: int) -> tuple:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 8, 8, 2)), rng.integers(0, 3, rows)


def _normalized() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.LayerNormalization()(layers.Dense(8, name="dense_0")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="dense_1")(layers.Dropout(0.3, seed=1)(x)))


def _rematerialized() -> keras.Model:
    with keras.RematScope("full"):
        return _normalized()


@_case
def goes_on_from_a_backup() -> dict:
    """Interrupted on all ranks after the first epoch."""

    class Killed(Exception):
        pass

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise Killed

    begun = []

    def fit(*callbacks):
        backup = tfparallel.callbacks.BackupAndRestore(f"{os.environ['CASE_FOLDER']}/backup")
        counts = keras.callbacks.LambdaCallback(on_epoch_begin=lambda n, logs: begun.append(n))
        given = {"build": _pair, "optimizer": _adam, "callbacks": [backup, counts, *callbacks]}
        return helpers.train(_strategy(), epochs=2, **given)

    try:
        fit(Kill())
    except Killed:
        pass
    else:
        raise AssertionError("it was not interrupted")
    resumed = fit()
    expected = helpers.train(None, build=_pair, optimizer=_adam)
    for one, other in zip(expected.model.get_weights(), resumed.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    return {"begun": begun}


class Summed(keras.layers.Layer):
    """A layer whose rule adds up the parts itself, past the group."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, inputs):
        return inputs * tf.reduce_sum(self.scale)


class SummedInABranch(Summed):
    """The same, in a branch."""


def _past_the_group(group, layer, original, inputs):
    if group.rows(layer.scale) is None:
        return NotImplemented
    parts = group.read(layer.scale)
    return inputs * tf.add_n([tf.reduce_sum(part) for part in parts])


def _past_the_group_in_a_branch(group, layer, original, inputs):
    if group.rows(layer.scale) is None:
        return NotImplemented
    parts = group.read(layer.scale)
    add_up = lambda: tf.add_n([tf.reduce_sum(part) for part in parts])  # noqa: E731
    return inputs * tf.cond(tf.reduce_sum(inputs) > 0, add_up, lambda: tf.ones([]))


@_case
def refusals() -> dict:
    """What each says that cannot be done, on this rank."""
    tfparallel.tensor_parallel.layer_rule(Summed)(_past_the_group)
    tfparallel.tensor_parallel.layer_rule(SummedInABranch)(_past_the_group_in_a_branch)
    in_function = {"build": lambda: UpdatesInAFunction(_pair()), "optimizer": _adam}
    compiles = {**helpers.tiny_compile_options(), "jit_compile": True}
    tries = {
        "function": lambda: helpers.train(_strategy(), **in_function),
        "assigns": lambda: helpers.train(_strategy(), build=lambda: AssignsInAFunction(_pair())),
        "jit": lambda: helpers.train(_strategy(), build=_pair, compile_options=lambda: compiles),
        "rule": lambda: helpers.train(
            _strategy({".*scale": ("model",)}), build=lambda: _summed(Summed)
        ),
        "rule in a branch": lambda: helpers.train(
            _strategy({".*scale": ("model",)}), build=lambda: _summed(SummedInABranch)
        ),
        "branches": lambda: _strategy_of("branches"),
        "steps": lambda: _strategy(check_weights_every=0),
        "memory": lambda: _strategy("auto", memory=tfparallel.MemoryPolicy()),
        "mesh": lambda: _strategy(PAIR, replicas=2),
        "dict": lambda: _strategy_of({".*up": 0, ".*down": 1}),
        "transport": lambda: tfparallel.TensorParallelStrategy("auto", transport="pigeons"),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (NotImplementedError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


class UpdatesInAFunction(keras.Model):
    """Its optimizer is called in a function within the step."""

    def __init__(self, inner: keras.Model):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        tf.function(lambda: self.optimizer.apply(gradients, self.trainable_weights))()
        return {"loss": loss}


class AssignsInAFunction(UpdatesInAFunction):
    """A weight in parts is assigned in a function within the step."""

    def train_step(self, data):
        kernel = self.inner.get_layer("up").kernel
        tf.function(lambda: kernel.assign(kernel * 0.5))()
        return {"loss": tf.reduce_sum(kernel)}


def _summed(layer: type) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layer(), layers.Dense(3)])


@_case
def a_weight_goes_wrong(wrong: int, what: str, replicas: int = 1, eagerly: bool = False) -> dict:
    """In the memory of one rank, after the third step: gives what the training says, and when."""
    strategy = _strategy({**PAIR, ".*up/bias": ("model",)}, replicas, check_weights_every=2)
    done = []

    def end(batch, logs=None):
        done.append(batch + 1)
        if batch == 2 and _rank() == wrong:
            variable = model.get_layer("up" if what == "part" else "first").kernel.value
            copy = variable.own_parts()[0] if what == "part" else variable.values[0]
            value = copy.numpy()
            value.view(np.uint32)[2, 1] ^= 1  # the last of the mantissa
            with tf.init_scope():
                copy.assign(value)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _pair()
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    told = ""
    try:
        fails = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        model.fit(x, x[:, :3], batch_size=5, shuffle=False, verbose=0, callbacks=[fails])
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "done": done}


@_case
def gradients_of_gradients(model: str) -> dict:
    strategy = _strategy_of(LayoutOfAnything(layout_map(1, _num_ranks(), {}).device_mesh))
    with helpers.in_float64():
        _compared(strategy, **PENALISED[model])
    return {}


@_case
def different_layouts() -> dict:
    """Rank 1 has another layout, of the same variables."""
    turned = {".*up/kernel": ("model", None), ".*down/kernel": (None, "model")}
    helpers.train(_strategy(PAIR if _rank() == 0 else turned), build=_pair)
    return {}


@_case
def a_rank_is_killed() -> dict:
    """Rank 1, in the middle of an epoch."""
    strategy = _strategy(timeouts=WorkerTimeouts(silent_s=5.0, stall_s=20.0))

    def end(batch, logs=None):
        if batch == 2 and _rank() == 1:
            os._exit(1)

    kill = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    helpers.train(strategy, build=_pair, rows=200, callbacks=[kill])
    return {}


def answer(case: str, folder: str, options: dict | None = None) -> dict:
    """What a rank replies to a request."""
    os.environ["CASE_FOLDER"] = folder
    keras.backend.clear_session()
    return CASES[case](**(options or {}))


if __name__ == "__main__":
    answer_requests(answer, lambda: helpers.open_logical_cpus(1))
