"""What sharding saves and costs: bytes held, bytes sent, peak memory and step time of each rank.

    python benchmarks/sharded.py                    # 2 ranks, about 5 minutes on 2 cores
    python benchmarks/sharded.py --ranks 4 --width 512 --rounds 1
    python benchmarks/sharded.py --transport horovod --only "data parallel" parameters

Every contestant trains the same model in fresh processes, and they take turns (A B C A B C ...).
Reported is the median over rounds of the rank that has most.

- held: bytes of weights and slots that the process stores, counted; "ideal" is one device's over N.
- "kept" is `reshard_after_forward=False`, "in no order" gathers where a layer reads a weight.
- sent: bytes that the ring's connection was given in a step, counted, over `2 P (N-1)/N`, what an
  all-reduce of all weights sends.
- wire: bytes that the loopback interface sent in a step, headers and acknowledgements with them, by
  its own counter, for each rank, over the same. In a network of its own (`unshare -rn`), so that
  nothing else is counted; "-" where the system gives none.
- in use: the most that TensorFlow has allocated in a step after the first ones, counted by it;
  "above" is what of it is not held. Arrays of the ring are not in it.
- CPU: time of processors that the process spent in a step; of it a busy machine changes little.
- peak: resident memory of the process above that before the model was built, of the whole run.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.multi_process.pool import cluster_environments, horovod_environments

ROOT = Path(__file__).resolve().parents[1]
OWN_NETWORK = "BENCHMARK_HAS_A_NETWORK_OF_ITS_OWN"
CONTESTANTS = {
    "data parallel": None,
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {},
    "kept": {"reshard_after_forward": False},
    "in no order": {"units": []},
    "slots on host": {"host": "optimizer"},
    "all on host": {"host": "parameters"},
}
WARMUP_STEPS = 2


def main() -> None:
    """Runs all contestants, or is one rank of one of them."""
    options = _parse()
    if options.rank_of:
        print(json.dumps(run_rank(options)), flush=True)
        return
    if OWN_NETWORK not in os.environ:
        _go_on_in_own_network()
    results: dict[str, list[dict]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name in options.only:
            results[name].append(_together(name, options))
    _report(results, options)


def _go_on_in_own_network() -> None:
    """Starts this program anew in a network without other programs, where the system allows it."""
    inside = 'ip link set lo up && exec "$0" "$@"'
    if subprocess.run(
        ["unshare", "-rn", "sh", "-c", inside, "true"], capture_output=True
    ).returncode:
        print("no network of its own here (unshare -rn): bytes on the wire are not counted")
        return
    os.environ[OWN_NETWORK] = "1"
    own = [sys.executable, __file__, *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", inside, *own])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of eight dense layers")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--transport", choices=["ring", "collectives", "horovod"], default="ring")
    parser.add_argument("--rank-of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _together(name: str, options: argparse.Namespace) -> dict:
    """One run of a contestant: for each figure that of the rank that has most."""
    environments = (
        horovod_environments if options.transport == "horovod" else cluster_environments
    )(options.ranks)
    processes = []
    for own in environments:
        environment = {
            **os.environ,
            **own,
            "PYTHONPATH": str(ROOT),
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "1",  # whose allocator counts what a CPU has in use
        }
        command = [sys.executable, __file__, "--rank-of", name, "--ranks", str(options.ranks)]
        command += ["--width", str(options.width), "--steps", str(options.steps)]
        command += ["--transport", options.transport]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"A rank of {name} failed:\n{errors[-3000:]}")
    ranks = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def run_rank(options: argparse.Namespace) -> dict:
    """Trains as one rank of a contestant."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = _strategy(options)
    keras.utils.set_random_seed(0)
    before, in_use_before = _peak_bytes(), _in_use()["current"]
    with strategy.scope():
        layers = [keras.layers.Dense(options.width, activation="tanh") for _ in range(8)]
        model = keras.Sequential([keras.Input((options.width,)), *layers, keras.layers.Dense(8)])
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, options.width)).astype("float32")
    y = rng.normal(size=(32, 8)).astype("float32")
    times, sent, wire, spent = [], [], [], []
    for number in range(WARMUP_STEPS + options.steps):
        if number == WARMUP_STEPS:
            tf.config.experimental.reset_memory_stats("CPU:0")
        bytes_before, wire_before = _bytes_sent(strategy), _bytes_on_wire()
        start = time.perf_counter()
        cpu_start = time.process_time()
        loss = model.train_on_batch(x, y)
        times.append(time.perf_counter() - start)
        spent.append(time.process_time() - cpu_start)
        sent.append(_bytes_sent(strategy) - bytes_before)
        wire.append(wire_before)
    wire.append(_bytes_on_wire())
    weights = sum(v.numpy().nbytes for v in model.trainable_variables)
    return {
        "held": _bytes_held(model),
        "all_reduce": 2 * weights * (options.ranks - 1) / options.ranks,
        "sent": statistics.median(sent[WARMUP_STEPS:]),
        "wire": (wire[-1] - wire[WARMUP_STEPS]) / options.steps / options.ranks,
        "in_use": _in_use()["peak"] - in_use_before,
        "peak": _peak_bytes() - before,
        "step_s": statistics.median(times[WARMUP_STEPS:]),
        "cpu_s": statistics.median(spent[WARMUP_STEPS:]),
        "loss": float(loss),
    }


def _strategy(options: argparse.Namespace):
    import tensorflow as tf

    import tfparallel

    sharding = CONTESTANTS[options.rank_of]
    if sharding is not None:
        transport = "auto" if options.ranks == 1 else options.transport
        return tfparallel.ShardedStrategy(transport=transport, **sharding)
    if options.transport == "horovod":
        return tfparallel.HorovodStrategy()
    if options.transport == "collectives":
        by = tf.distribute.experimental.CommunicationImplementation.RING
        chosen = tf.distribute.experimental.CommunicationOptions(implementation=by)
        return tfparallel.MultiWorkerMirroredStrategy(communication_options=chosen)
    return tfparallel.MultiWorkerMirroredStrategy()


def _bytes_sent(strategy) -> int:
    """By the ring; 0 where there is none."""
    ring = getattr(strategy.extended, "_parts_ring", None)
    ring = ring or getattr(strategy.extended, "_ring_all_reduce", None)
    return 0 if ring is None else ring._ring.bytes_sent


def _bytes_on_wire() -> int:
    """That the loopback interface has sent; 0 where other programs use it too."""
    if OWN_NETWORK not in os.environ:
        return 0
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # /sys shows another network
    (own,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(own[8])


def _bytes_held(model) -> int:
    variables = [*model.variables, *model.optimizer.variables]
    return sum(v.value.values[0].numpy().nbytes for v in variables)


def _in_use() -> dict[str, int]:
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("CPU:0")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _report(results: dict[str, list[dict]], options: argparse.Namespace) -> None:
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in results.items()
    }
    base = medians[options.only[0]]
    print(
        f"{options.ranks} ranks, 8 x Dense({options.width}), Adam, {options.transport}, "
        f"{options.rounds} rounds"
    )
    print(
        "contestant     held MB  ideal MB     sent     wire  in use MB  above MB  peak MB  peak/DP"
        "  step ms  step/DP  CPU ms  CPU/DP  loss"
    )
    for name, own in medians.items():
        ratios = [
            run["step_s"] / other["step_s"]
            for run, other in zip(results[name], results[options.only[0]], strict=True)
        ]
        print(
            f"{name:14} {own['held'] / 1e6:7.1f} {base['held'] / options.ranks / 1e6:9.1f}"
            f" {_over(own, 'sent'):>8} {_over(own, 'wire'):>8} {own['in_use'] / 1e6:10.0f}"
            f" {(own['in_use'] - own['held']) / 1e6:9.0f} {own['peak'] / 1e6:8.0f}"
            f" {own['peak'] / base['peak']:8.2f}"
            f" {1e3 * own['step_s']:8.1f} {statistics.median(ratios):8.2f}"
            f" {1e3 * own['cpu_s']:7.0f} {own['cpu_s'] / base['cpu_s']:7.2f}  {own['loss']:.7f}"
        )


def _over(own: dict, key: str) -> str:
    """Bytes over those of an all-reduce of the weights."""
    return f"{own[key] / own['all_reduce']:.3f}" if own[key] and own["all_reduce"] else "-"


if __name__ == "__main__":
    main()
