"""A process that trains one model under TensorFlow, as told by `contestants.py`.

`fit` is what a Keras user writes; `loop` is TensorFlow's multi-worker guide: `strategy.run` of a
replica step in a `tf.function`. Source: https://www.tensorflow.org/tutorials/distribute/custom_training
"""

import contextlib
import time

import keras
import numpy as np
import protocol
import tensorflow as tf
from problems import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_CLASSES,
    PROBLEMS,
    Problem,
    joined,
    rows_of_worker,
)


def build_model(problem: Problem) -> keras.Model:
    """The model of a problem; its outputs are logits."""
    inputs = keras.Input(problem.input_shape)
    x = inputs
    for i, width in enumerate(problem.dense_widths):
        x = keras.layers.Dense(width, activation="relu", name=f"dense_{i}")(x)
    if problem.block_filters:
        x = _residual_blocks(x, problem.block_filters)
        x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, name="logits")(x))


def _residual_blocks(x, block_filters):
    x = _conv(x, block_filters[0], 3, 1, "stem")
    x = keras.layers.ReLU()(x)
    for i, filters in enumerate(block_filters):
        halves = filters != x.shape[-1]
        shortcut = _conv(x, filters, 1, 2, f"block_{i}_project") if halves else x
        x = keras.layers.ReLU()(_conv(x, filters, 3, 2 if halves else 1, f"block_{i}_first"))
        x = _conv(x, filters, 3, 1, f"block_{i}_second")
        x = keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))
    return x


def _conv(x, filters: int, size: int, strides: int, name: str):
    # Padded by hand: "same" with strides pads one side only, torch both.
    x = keras.layers.ZeroPadding2D(size // 2)(x) if size > 1 else x
    x = keras.layers.Conv2D(filters, size, strides, use_bias=False, name=name)(x)
    return keras.layers.BatchNormalization(epsilon=1e-5, name=f"{name}_norm")(x)


def make_optimizer(name: str) -> keras.Optimizer:
    """The optimizer under its command line name."""
    if name == "adam":
        return keras.optimizers.Adam(LEARNING_RATE / 10, epsilon=1e-8)
    return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)


def make_strategy(strategy: str, stock: bool, compression: str | None, bucket_bytes: int | None):
    """The strategy under test, or None.

    Args:
        strategy: "none", "mirrored", "multi_worker" or "horovod".
        stock: TensorFlow's own.
        compression: a name, or an expression such as "PowerSGD(4)"; ours only.
        bucket_bytes: of gradients that are reduced together; our Horovod only.
    """
    if strategy == "none":
        return None
    if stock:
        package = tf.distribute
    else:
        import tfparallel as package
    if strategy == "mirrored":
        return package.MirroredStrategy(["CPU:0", "CPU:1"])
    options = {} if stock else {"compression": _as_compression(compression)}
    if strategy == "horovod":
        if bucket_bytes is not None:
            options["bucket_bytes"] = bucket_bytes
        return package.HorovodStrategy(**options)
    return package.MultiWorkerMirroredStrategy(**options)


def _as_compression(text: str | None):
    from tfparallel import compression

    is_expression = text is not None and text.endswith(")")
    return eval(text, vars(compression)) if is_expression else text


class StepClock(keras.callbacks.Callback):
    """Notes when each batch ends; reads no logs, so it adds no synchronisation.

    Args:
        warmup: batches before the first that is noted.
    """

    def __init__(self, warmup: int):
        super().__init__()
        self._warmup = warmup
        self.times_s: list[float] = []
        self.cpu_times_s: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        if batch + 1 >= self._warmup:
            self.times_s.append(time.perf_counter())
            self.cpu_times_s.append(time.process_time())


class Fit:
    """Training by `model.fit`, which is given global batches."""

    def __init__(self, strategy, model, problem: Problem, rank: int, num_workers: int):
        del rank, num_workers
        self._model = model
        x, y = joined(problem.batches())
        data = tf.data.Dataset.from_tensor_slices((x, y))
        self._data = data.batch(problem.global_batch, drop_remainder=True).repeat().prefetch(2)

    def losses(self, steps: int) -> list[float]:
        """Trains; returns the loss of every step."""
        # Epochs of one step: an epoch's loss is a mean over it.
        return self._fit(epochs=steps, steps_per_epoch=1).history["loss"]

    def timed_steps(self, steps: int, warmup: int) -> dict:
        """Trains `warmup + steps` steps; as `protocol.timed_steps`, inside of one call of `fit`."""
        clock = StepClock(warmup)
        self._fit(epochs=1, steps_per_epoch=warmup + steps, callbacks=[clock])
        cpu_s = (clock.cpu_times_s[-1] - clock.cpu_times_s[0]) / steps
        return {"wall_s": np.diff(clock.times_s).tolist(), "cpu_s": cpu_s}

    def _fit(self, **options):
        return self._model.fit(self._data, verbose=0, shuffle=False, **options)


class Loop:
    """Training by a loop of one's own; every worker's input holds its rows only."""

    def __init__(self, strategy, model, problem: Problem, rank: int, num_workers: int):
        def worker_batches(context):
            x, y = joined(_rows(problem, rank, num_workers))
            data = tf.data.Dataset.from_tensor_slices((x, y))
            return data.batch(len(x) // len(problem.batches()), drop_remainder=True).repeat()

        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        optimizer = model.optimizer

        def replica_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                losses = loss_of_rows(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(losses, global_batch_size=problem.global_batch)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        @tf.function
        def step(iterator):
            losses = strategy.run(replica_step, args=(next(iterator),))
            return strategy.reduce("SUM", losses, axis=None)

        with strategy.scope():
            self._iterator = iter(strategy.distribute_datasets_from_function(worker_batches))
        self._step = step

    def losses(self, steps: int) -> list[float]:
        """Trains; returns the loss of every step."""
        return [float(self._step(self._iterator)) for _ in range(steps)]

    def timed_steps(self, steps: int, warmup: int) -> dict:
        """Trains `warmup + steps` steps; see `protocol.timed_steps`."""
        return protocol.timed_steps(lambda: self._step(self._iterator), steps, warmup)


class HorovodTape:
    """Horovod's own guide for TensorFlow 2: a tape that all-reduces, in a `tf.function`.

    Source: https://horovod.readthedocs.io/en/stable/tensorflow.html
    """

    def __init__(self, strategy, model, problem: Problem, rank: int, num_workers: int):
        import horovod.tensorflow as hvd

        x, y = joined(_rows(problem, rank, num_workers))
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.batch(len(x) // len(problem.batches()), drop_remainder=True).repeat()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            tape = hvd.DistributedGradientTape(tape)
            # TensorFlow's variables: Horovod's tape knows none of Keras 3.
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        self._batches, self._step, self._hvd = iter(data.prefetch(2)), step, hvd

    def losses(self, steps: int) -> list[float]:
        """Trains; returns the loss of every step, over all rows."""
        losses = tf.stack([self._step(*next(self._batches)) for _ in range(steps)])
        return self._hvd.allreduce(losses, name="losses").numpy().tolist()

    def timed_steps(self, steps: int, warmup: int) -> dict:
        """Trains `warmup + steps` steps; see `protocol.timed_steps`."""
        return protocol.timed_steps(lambda: self._step(*next(self._batches)), steps, warmup)


def _rows(problem: Problem, rank: int, num_workers: int):
    return [
        tuple(rows_of_worker(part, rank, num_workers) for part in batch)
        for batch in problem.batches()
    ]


class TensorFlowContestant:
    """What `contestants.py` asks of a process."""

    def __init__(
        self,
        *,
        problem,
        optimizer,
        threads,
        rank,
        num_workers,
        strategy,
        loop,
        stock=False,
        compression=None,
        bucket_bytes=None,
    ):
        del threads  # in the environment
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * (2 if strategy == "mirrored" else 1),
        )
        keras.utils.set_random_seed(1)
        self._strategy = make_strategy(strategy, stock, compression, bucket_bytes)
        with self._scope():
            self.model = build_model(PROBLEMS[problem])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(make_optimizer(optimizer), loss=loss)
            self.model.optimizer.build(self.model.trainable_variables)
        if loop == "tape":
            import horovod.tensorflow as hvd

            hvd.init()
        kind = {"fit": Fit, "loop": Loop, "tape": HorovodTape}[loop]
        self.training = kind(self._strategy, self.model, PROBLEMS[problem], rank, num_workers)

    def save_weights(self, path: str) -> None:
        """Writes the trainable weights to an `.npz` file, by path."""
        np.savez(path, **{w.path: w.numpy() for w in self.model.trainable_weights})

    def load_weights(self, path: str) -> None:
        """Reads what `save_weights` wrote."""
        weights = np.load(path)
        with self._scope():
            for weight in self.model.trainable_weights:
                weight.assign(weights[weight.path])

    def losses(self, steps: int) -> list[float]:
        """Trains; returns the loss of every step."""
        return self.training.losses(steps)

    def timed_steps(self, steps: int, warmup: int) -> dict:
        """Trains `warmup + steps` steps; see `protocol.timed_steps`."""
        return self.training.timed_steps(steps, warmup)

    def decisions(self) -> list[str]:
        """What adaptive compression has decided, in words."""
        reports = self._strategy.compression_report()
        return [line for report in reports for line in report.decisions]

    def _scope(self):
        return self._strategy.scope() if self._strategy else contextlib.nullcontext()


if __name__ == "__main__":
    protocol.serve(TensorFlowContestant)
