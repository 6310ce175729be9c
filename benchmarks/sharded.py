"""What sharding saves and costs: bytes held, bytes sent, peak memory and step time of each rank.

    python benchmarks/sharded.py                    # 2 ranks, about 5 minutes on 2 cores
    python benchmarks/sharded.py --ranks 4 --width 512 --rounds 1
    python benchmarks/sharded.py --transport horovod --only "data parallel" parameters

    python benchmarks/sharded.py --threads 1 --torch-path /tmp/torch \
        --only "data parallel" optimizer parameters kept torch "torch kept" "torch ddp"

Every contestant trains the same model in fresh processes, and they take turns (A B C A B C ...).
Reported is the median over rounds of the rank that has most. "torch" is FSDP2 (`fully_shard`) on
Gloo, which begins with our weights; "torch ddp" is DistributedDataParallel.

- held: bytes of weights and slots that the process stores, counted; "ideal" is one device's over N.
- "kept" is `reshard_after_forward=False`, "in no order" gathers where a layer reads a weight; "two
  copies" is `replicas=2`, of 4 ranks or more.
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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    "two copies": {"replicas": 2},
}
TORCH = ("torch", "torch kept", "torch ddp")
EPSILON = 1e-12  # torch adds it elsewhere
ROWS, WARMUP_STEPS = 32, 2
MEETING_TIMEOUT_S = 120.0


def main() -> None:
    """Runs all contestants, or is one rank of one of them."""
    options = _parse()
    if options.contestant:
        run = run_rank_of_torch if options.contestant in TORCH else run_rank
        print(json.dumps(run(options)), flush=True)
        return
    if OWN_NETWORK not in os.environ:
        _go_on_in_own_network()
    results: dict[str, list[dict]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for name in options.only:
                own = Path(folder) / f"{name}_{number}".replace(" ", "_")
                own.mkdir()
                results[name].append(_together(name, options, own))
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
    names = [*CONTESTANTS, *TORCH]
    parser.add_argument("--only", nargs="+", choices=names, default=list(CONTESTANTS)[:-1])
    parser.add_argument("--torch-path", default="", help="where torch is, if not installed")
    parser.add_argument("--threads", type=int, default=0, help="of an operation; 0: each its own")
    parser.add_argument("--transport", choices=["ring", "collectives", "horovod"], default="ring")
    parser.add_argument("--contestant", choices=names, help="be a rank of it")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.weights = None if options.folder is None else options.folder / "weights.npz"
    return options


def _together(name: str, options: argparse.Namespace, folder: Path) -> dict:
    """One run of a contestant: for each figure that of the rank that has most."""
    processes = []
    for rank, own in enumerate(_environments(name, options)):
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += ["--contestant", name, "--rank", str(rank), "--folder", str(folder)]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"A rank of {name} failed:\n{errors[-3000:]}")
    ranks = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _environments(name: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """What each rank of a contestant finds."""
    if name in TORCH:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        meets |= {"WORLD_SIZE": str(options.ranks), "PYTHONPATH": options.torch_path}
        return [{**meets, "RANK": str(rank)} for rank in range(options.ranks)]
    of = horovod_environments if options.transport == "horovod" else cluster_environments
    common = {
        "PYTHONPATH": str(ROOT),
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "1",  # whose allocator counts what a CPU has in use
    }
    if options.threads:
        common["TF_NUM_INTRAOP_THREADS"] = str(options.threads)
    return [{**common, **own} for own in of(options.ranks)]


def run_rank(options: argparse.Namespace) -> dict:
    """Trains as one rank of a contestant."""
    import keras

    strategy = _strategy(options)
    keras.utils.set_random_seed(0)
    before, in_use_before = _peak_bytes(), _in_use()["current"]
    with strategy.scope():
        model = build(options.width)
        model.compile(keras.optimizers.Adam(1e-3, epsilon=EPSILON), "mse")
    x, y = _data(options)
    found = _measured(lambda: model.train_on_batch(x, y), options, strategy)
    weights = sum(v.numpy().nbytes for v in model.trainable_variables)
    return {
        **found,
        "loss": float(found["loss"]),
        "held": _bytes_held(model),
        "all_reduce": 2 * weights * (options.ranks - 1) / options.ranks,
        "in_use": _in_use()["peak"] - in_use_before,
        "peak": _peak_bytes() - before,
    }


def run_rank_of_torch(options: argparse.Namespace) -> dict:
    """Trains as one rank of torch's, which begins with the weights that ours begin with."""
    if options.rank == 0:
        _save_initial_weights(options)
    _meet("weights", options)
    from benchmarks.torch_sharded_contestant import run_rank as run

    found = run(options, options.rank, _data(options), lambda step: _measured(step, options))
    return {**found, "in_use": 0}


def _save_initial_weights(options: argparse.Namespace) -> None:
    """In a process of its own: TensorFlow is none of torch's memory."""
    program = (
        "import sys, keras, numpy\n"
        "from benchmarks.sharded import build\n"
        "keras.utils.set_random_seed(0)\n"
        "numpy.savez(sys.argv[2], *build(int(sys.argv[1])).get_weights())"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(options.width), str(options.weights)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"},
        check=True,
        capture_output=True,
    )


def build(width: int):
    """The model of all contestants."""
    import keras

    layers = [keras.layers.Dense(width, activation="tanh") for _ in range(8)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(8)])


def _data(options: argparse.Namespace) -> tuple:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, options.width)).astype("float32")
    return x, rng.normal(size=(ROWS, 8)).astype("float32")


def _measured(step: Callable, options: argparse.Namespace, strategy=None) -> dict:
    """What steps take; of the wire what all ranks have sent from one meeting to the next."""
    times, spent, sent, wire = [], [], [], 0
    for number in range(WARMUP_STEPS + options.steps):
        if number == WARMUP_STEPS:
            wire = _wire_between_steps("begin", options)
            if strategy is not None:
                import tensorflow as tf

                tf.config.experimental.reset_memory_stats("CPU:0")
        bytes_before = _bytes_sent(strategy)
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = step()
        times.append(time.perf_counter() - start)
        spent.append(time.process_time() - cpu_start)
        sent.append(_bytes_sent(strategy) - bytes_before)
    wire = _wire_between_steps("end", options) - wire
    return {
        "loss": loss,
        "sent": statistics.median(sent[WARMUP_STEPS:]),
        "wire": wire / options.steps / options.ranks,
        "step_s": statistics.median(times[WARMUP_STEPS:]),
        "cpu_s": statistics.median(spent[WARMUP_STEPS:]),
    }


def _wire_between_steps(name: str, options: argparse.Namespace) -> int:
    """Bytes on the wire while no rank is in a step: one may be ahead, and have begun to gather."""
    _meet(f"before_{name}", options)
    wire = _bytes_on_wire()
    _meet(f"after_{name}", options)
    return wire


def _meet(name: str, options: argparse.Namespace) -> None:
    """Waits until all ranks are here."""
    (options.folder / f"{name}_{options.rank}").touch()
    deadline = time.monotonic() + MEETING_TIMEOUT_S
    while not all((options.folder / f"{name}_{i}").exists() for i in range(options.ranks)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Not all ranks have come to '{name}'. (Rank {options.rank}.)")
        time.sleep(0.001)


def _strategy(options: argparse.Namespace):
    import tensorflow as tf

    import tfparallel

    sharding = CONTESTANTS[options.contestant]
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
    if strategy is None:
        return 0
    of_all = getattr(strategy.extended, "_ring_all_reduce", None)
    own = [getattr(strategy.extended, name, None) for name in ("_in_copy", "_across")]
    of_groups = [getattr(each, "_reduction", None) for each in own]
    rings = {id(each): each for each in (of_all, *of_groups) if each is not None}
    return sum(each._ring.bytes_sent for each in rings.values())


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
            f" {_over(own, 'sent'):>8} {_over(own, 'wire'):>8}"
            f" {_in_use_and_above(own)} {own['peak'] / 1e6:8.0f}"
            f" {own['peak'] / base['peak']:8.2f}"
            f" {1e3 * own['step_s']:8.1f} {statistics.median(ratios):8.2f}"
            f" {1e3 * own['cpu_s']:7.0f} {own['cpu_s'] / base['cpu_s']:7.2f}  {own['loss']:.7f}"
        )

    _report_over_torch(results)


def _report_over_torch(results: dict[str, list[dict]]) -> None:
    """The median over rounds of each step time over that of torch's of the same kind."""
    for name, other in (("parameters", "torch"), ("kept", "torch kept"), ("optimizer", "torch")):
        if name in results and other in results:
            pairs = zip(results[name], results[other], strict=True)
            ratio = statistics.median(own["step_s"] / run["step_s"] for own, run in pairs)
            print(f"step of {name} over {other}: {ratio:.2f}")


def _in_use_and_above(own: dict) -> str:
    if not own["in_use"]:  # torch's allocator does not count
        return f"{'-':>10} {'-':>9}"
    return f"{own['in_use'] / 1e6:10.0f} {(own['in_use'] - own['held']) / 1e6:9.0f}"


def _over(own: dict, key: str) -> str:
    """Bytes over those of an all-reduce of the weights."""
    return f"{own[key] / own['all_reduce']:.3f}" if own[key] and own["all_reduce"] else "-"


if __name__ == "__main__":
    main()
