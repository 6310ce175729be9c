"""What stock `tf.distribute` does with a Keras 3 model, one function for each row of the table.

    python docs/stock_symptoms.py            list the rows
    python docs/stock_symptoms.py 2          show row 2
    python docs/stock_symptoms.py all        show all of them, one process each

docs/what_stock_does.md explains the rows. Only TensorFlow and Keras are used here, nothing of
tfparallel. Every row runs in a process of its own, killed after 60 seconds, as some symptoms hang.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT_S = 60
WORKERS_TIMEOUT_S = 40
ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "8",
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTHONUNBUFFERED": "1",
}
ROWS = {}


def row(function):
    """Register a function `row_N`: it prints what happens."""
    ROWS[function.__name__.removeprefix("row_")] = function
    return function


# ---- tools: TensorFlow is imported in the process of a row ---------------------------------------


def open_cpus(count=2):
    """Split the CPU into logical devices, so that several replicas exist."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


def mirrored():
    """Two replicas in this process."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def data(rows):
    """`[rows, 4]` features and `[rows, 1]` targets, always the same."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True) + 1


def compiled_model(strategy=None, layers=None, compile_in_scope=True, **options):
    """A small compiled model; the same initial weights on every call."""
    import keras

    keras.utils.set_random_seed(0)
    options = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": "mse", **options}
    options["optimizer"], make_optimizer = None, options["optimizer"]
    with strategy.scope() if strategy else contextlib.nullcontext():
        inner = layers() if layers else []
        model = keras.Sequential([keras.Input((4,)), *inner, keras.layers.Dense(1)])
        if compile_in_scope:
            model.compile(**{**options, "optimizer": make_optimizer()})
    if not compile_in_scope:
        model.compile(**{**options, "optimizer": make_optimizer()})
    return model


def difference(strategy, rows, batch_size=8, **options):
    """Largest difference of any weight after two epochs to training without a strategy."""
    import numpy as np

    x, y = data(rows)
    models = [compiled_model(s, **options) for s in (None, strategy)]
    for model in models:
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    one, other = (model.get_weights() for model in models)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other))


def error_of(function, *args, **kwargs):
    """Call the function; print the error it raises, without stack frames and tensor values."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        text = re.sub(r"numpy=\s*array\(.*?\)>", "numpy=...>", text, flags=re.DOTALL)
        lines = [
            line for line in text.splitlines() if line.strip() and not line.startswith("  File")
        ]
        lines = lines if len(lines) <= 12 else [*lines[:6], "[...]", *lines[-5:]]
        print("\n    ".join([f"{type(error).__name__}:", *lines]), flush=True)
    else:
        print("no error", flush=True)


def in_two_workers(number):
    """Run `worker_NUMBER` in two processes that form a cluster; print what they print."""
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    with tempfile.TemporaryDirectory() as folder:
        outputs, processes = [], []
        for index in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            outputs.append(Path(folder, str(index)))
            with outputs[-1].open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, f"--worker={number}"],
                        env={**os.environ, "TF_CONFIG": json.dumps(task)},
                        stdout=output,
                        stderr=subprocess.DEVNULL,
                    )
                )
        deadline = time.monotonic() + WORKERS_TIMEOUT_S
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.2)
        for index, process in enumerate(processes):
            hangs = process.poll() is None
            process.kill()
            process.wait()
            for line in outputs[index].read_text().splitlines():
                print(f"[worker {index}] {line}")
            if hangs:
                print(f"[worker {index}] killed after {WORKERS_TIMEOUT_S} s")


# ---- the rows ------------------------------------------------------------------------------------


@row
def row_1():
    """`MultiWorkerMirroredStrategy`: fit and evaluate."""
    in_two_workers(1)


def worker_1():
    """One worker of row 1."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = compiled_model(strategy)
    x, y = data(16)
    print("fit: ", end="")
    error_of(model.fit, x, y, batch_size=8, verbose=0)
    print("evaluate: ", end="")
    error_of(model.evaluate, x, y, batch_size=8, verbose=0)
    print("train_on_batch: ", end="")
    error_of(model.train_on_batch, x, y)


@row
def row_2():
    """A last batch that does not divide evenly, and a first one."""
    open_cpus()
    print(f"17 rows, batch size 8, 2 replicas: weights differ by {difference(mirrored(), 17):.3g}")
    print("first batch of 7 rows: ", end="")
    x, y = data(7)
    error_of(compiled_model(mirrored()).fit, x, y, batch_size=7, verbose=0)


@row
def row_3():
    """Clipping happens before gradients are summed over replicas."""
    import keras

    open_cpus()
    for option in ("clipnorm", "global_clipnorm", "clipvalue"):
        make = lambda option=option: keras.optimizers.SGD(0.1, **{option: 0.1})  # noqa: E731
        print(f"{option}=0.1: weights differ by {difference(mirrored(), 16, optimizer=make):.3g}")


@row
def row_4():
    """Loss scaling when the gradient of one replica overflows."""
    import keras

    open_cpus()
    x, y = data(16)
    x[6] = 1e36  # a row of the first batch, on the second replica
    for name, strategy in (("one device", None), ("MirroredStrategy", mirrored())):
        make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))  # noqa: E731
        model = compiled_model(strategy, optimizer=make)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        print(f"{name}: the bias after training is {model.get_weights()[1]}")
    in_two_workers(4)


def worker_4():
    """One worker of row 4: a custom loop, as `fit` does not work."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = keras.Variable([1.0, 1.0])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])

    @tf.function
    def step():
        def replica_step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(replica == 1, float("inf"), 1.0) * tf.ones(2)
            optimizer.apply([gradient], [weight])

        strategy.run(replica_step)

    print("a step with an overflow on worker 1 ...", flush=True)
    step()
    print("... is done; this process now sleeps, since its end would end a peer's wait", flush=True)
    time.sleep(TIMEOUT_S)


@row
def row_5():
    """Optimizers that branch: accumulation and the overwriting moving average."""
    import keras

    open_cpus()
    x, y = data(16)
    for options in (
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
    ):
        print(f"{options}: ", end="")
        make = lambda options=options: keras.optimizers.SGD(0.1, **options)  # noqa: E731
        error_of(compiled_model(mirrored(), optimizer=make).fit, x, y, batch_size=8, verbose=0)


@row
def row_6():
    """`steps_per_execution` above 1."""
    open_cpus()
    x, y = data(16)
    model = compiled_model(mirrored(), steps_per_execution=2)
    error_of(model.fit, x, y, batch_size=8, verbose=0)


@row
def row_7():
    """BatchNorm's moving statistics."""
    import keras

    open_cpus()
    x, y = data(8)
    layers = lambda: [keras.layers.BatchNormalization(momentum=0.5)]  # noqa: E731
    model = compiled_model(mirrored(), layers=layers)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    mean = model.layers[0].moving_mean
    for number, copy in enumerate(mean.value.values):
        print(f"moving_mean on replica {number}: {copy.numpy()}")
    print(f"moving_mean of get_weights():  {model.layers[0].get_weights()[2]}")


@row
def row_8():
    """Dropout's masks."""
    import keras
    import tensorflow as tf

    open_cpus()
    strategy = mirrored()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5)
    masks = tf.function(lambda: strategy.run(lambda: dropout(tf.ones((1, 16)), training=True)))()
    for number, mask in enumerate(strategy.experimental_local_results(masks)):
        print(f"replica {number}: {(mask.numpy() != 0).astype(int)[0]}")


@row
def row_9():
    """`CentralStorageStrategy`: metrics and BatchNorm."""
    import keras
    import tensorflow as tf

    open_cpus()
    x, y = data(16)

    def strategy():
        return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])

    for name, chosen in (("one device", None), ("CentralStorageStrategy", strategy())):
        model = compiled_model(chosen, metrics=["mae"])
        loss, mae = model.evaluate(x, y, batch_size=8, verbose=0)
        print(f"{name}: evaluate gives loss {loss:.2f}, mae {mae:.2f}")
    layers = lambda: [keras.layers.BatchNormalization()]  # noqa: E731
    print("fit with BatchNormalization: ", end="")
    error_of(compiled_model(strategy(), layers=layers).fit, x, y, batch_size=8, verbose=0)


@row
def row_10():
    """A custom `train_step`, as in Keras's guide, that reports what `compute_loss` returned."""
    import keras
    import tensorflow as tf

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            for metric in self.metrics:
                metric.update_state(loss)
            return {metric.name: metric.result() for metric in self.metrics}

    open_cpus()
    x, y = data(8)
    for name, strategy in (("one device", None), ("MirroredStrategy", mirrored())):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Model([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        history = model.fit(x, y, batch_size=8, verbose=0).history
        print(f"{name}: loss {history['loss'][0]:.4f}")


@row
def row_11():
    """A second strategy in one process."""
    import tensorflow as tf

    open_cpus(3)
    x, y = data(12)
    for devices in (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]):
        print(f"{devices}: ", end="")
        model = compiled_model(tf.distribute.MirroredStrategy(devices))
        error_of(model.fit, x, y, batch_size=6, verbose=0)


@row
def row_12():
    """A model built or compiled outside the scope."""
    open_cpus()
    x, y = data(16)
    model = compiled_model()
    print("built outside, fitted inside: ", end="")
    with mirrored().scope():
        error_of(model.fit, x, y, batch_size=8, verbose=0)
    model = compiled_model(mirrored(), compile_in_scope=False)
    print("compiled outside: ", end="")
    error_of(model.fit, x, y, batch_size=8, verbose=0)
    print(f"    optimizer.iterations after 2 batches: {model.optimizer.iterations.numpy()}")


@row
def row_13():
    """`predict_on_batch` and `train_on_batch`."""
    open_cpus()
    x, y = data(8)
    model = compiled_model(mirrored())
    print(f"predict_on_batch of 8 rows gives {len(model.predict_on_batch(x))} rows")
    seen = []

    def recorded(y_true, y_pred):
        import keras

        seen.append(y_true.shape)
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)

    compiled_model(mirrored(), loss=recorded).train_on_batch(x, y)
    print(f"train_on_batch of 8 rows: the replicas get {[tuple(s) for s in seen[-2:]]}")


@row
def row_14():
    """`ParameterServerStrategy`: fit, and lost updates in a custom loop."""
    import keras
    import tensorflow as tf

    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    spec = tf.train.ClusterSpec(
        {"worker": [f"127.0.0.1:{p}" for p in ports[:2]], "ps": [f"127.0.0.1:{ports[2]}"]}
    )
    servers = [tf.distribute.Server(spec, "worker", i, protocol="grpc") for i in range(2)]
    servers.append(tf.distribute.Server(spec, "ps", 0, protocol="grpc"))
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    )
    x, y = data(16)
    print("fit: ", end="")
    with strategy.scope():
        error_of(lambda: compiled_model(strategy).fit(x, y, batch_size=8, verbose=0))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(1)], [weight]))

    for _ in range(200):
        coordinator.schedule(step)
    coordinator.join()
    print(
        f"200 steps scheduled on 2 workers: optimizer.iterations = {optimizer.iterations.numpy()}"
    )
    sys.stdout.flush()
    os._exit(0)  # in-process servers do not end by themselves


@row
def row_15():
    """`jit_compile=True` with two replicas."""
    open_cpus()
    x, y = data(16)
    model = compiled_model(mirrored(), jit_compile=True)
    error_of(model.fit, x, y, batch_size=8, verbose=0)


@row
def row_16():
    """Data that differs from epoch to epoch, and generators."""
    import keras
    import numpy as np
    import tensorflow as tf

    open_cpus()
    x, y = data(64)

    class Epochs(keras.utils.PyDataset):
        epoch = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            part = slice(8 * (index + self.epoch), 8 * (index + self.epoch + 1))
            return x[part], y[part]

        def on_epoch_begin(self):
            self.epoch += 1

    def generator():
        for number in range(100):
            part = slice(number % 60, number % 60 + 4)
            yield x[part], y[part]

    def shuffled():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=1).batch(8)

    for name, make, steps in (
        ("tf.data, shuffled anew in each epoch", shuffled, None),
        ("PyDataset with other rows in each epoch", Epochs, None),
        ("generator", generator, 8),
    ):
        models = [compiled_model(strategy) for strategy in (None, mirrored())]
        for model in models:
            model.fit(make(), epochs=2, steps_per_epoch=steps, verbose=0)
        one, other = (model.get_weights()[0] for model in models)
        print(f"{name}: weights differ by {np.max(np.abs(one - other)):.4f}")


# ---- the command line ----------------------------------------------------------------------------


def main(arguments):
    """List the rows, or run one of them or all, each in a process of its own."""
    if arguments and arguments[0].startswith("--worker="):
        return globals()[f"worker_{arguments[0].partition('=')[2]}"]()
    if arguments[:1] == ["--in-process"]:
        return ROWS[arguments[1]]()
    if not arguments:
        for number, function in ROWS.items():
            print(f"{number:>2}  {function.__doc__}")
        return None
    for number in ROWS if arguments == ["all"] else arguments:
        print(f"---- row {number}: {ROWS[number].__doc__}", flush=True)
        command = [sys.executable, __file__, "--in-process", number]
        try:
            status = subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT},
                timeout=TIMEOUT_S,
                stderr=subprocess.DEVNULL,
            ).returncode
            if status:
                print(f"ended with status {status}")
        except subprocess.TimeoutExpired:
            print(f"no end after {TIMEOUT_S} s")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
