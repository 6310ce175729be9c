import json
import os
import subprocess
import sys

import pytest

from tests.launch.jobs import ROOT
from tfparallel.launch.cli import main
from tfparallel.version import __version__

pytestmark = pytest.mark.timeout(60)

SHOW = """
import json, os, sys
names = ["TF_CONFIG", "TFPARALLEL_LOGICAL_CPUS", "TF_NUM_INTEROP_THREADS", "PYTHONUNBUFFERED"]
names += ["CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"]
place = {"argv": sys.argv[1:], "cpus": sorted(os.sched_getaffinity(0))}
print(json.dumps({**place, **{name: os.environ.get(name) for name in names}}))
"""


@pytest.fixture
def tfparallel(tmp_path):
    """Run the command line in a folder with a script, `show.py`."""
    (tmp_path / "show.py").write_text(SHOW)

    def run(*args, **variables):
        env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PYTHONUNBUFFERED")}
        return subprocess.run(
            [sys.executable, "-m", "tfparallel", *args],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
        )

    return run


def shown(result):
    """What each worker's `show.py` printed, by rank."""
    assert result.returncode == 0, result.stderr
    workers = {}
    for line in result.stdout.splitlines():
        label, _, text = line.partition("] ")
        workers[int(label.removeprefix("[worker "))] = json.loads(text)
    return [workers[rank] for rank in sorted(workers)]


# ---- what it starts


def test_workers_form_one_cluster_on_loopback(tfparallel):
    workers = shown(tfparallel("launch", "--standalone", "--workers", "3", "show.py"))
    configs = [json.loads(worker["TF_CONFIG"]) for worker in workers]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
    (cluster,) = {json.dumps(c["cluster"]) for c in configs}
    addresses = json.loads(cluster)["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_workers_have_equal_shares_of_the_gpus_that_the_user_shows(tfparallel):
    job = ["launch", "--standalone", "--workers", "2"]
    shares = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,MIG-c,MIG-d"}
    workers = shown(tfparallel(*job, "show.py", **shares))
    assert [w["CUDA_VISIBLE_DEVICES"] for w in workers] == ["GPU-a,GPU-b", "MIG-c,MIG-d"]
    assert not any(w["TF_FORCE_GPU_ALLOW_GROWTH"] for w in workers)
    refused = tfparallel(*job, "show.py", CUDA_VISIBLE_DEVICES="GPU-a")
    assert refused.returncode != 0 and "2 workers, 1 GPU" in refused.stderr
    workers = shown(tfparallel(*job, "--share-gpus", "show.py", CUDA_VISIBLE_DEVICES="GPU-a"))
    expected = {"CUDA_VISIBLE_DEVICES": "GPU-a", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert all(expected.items() <= worker.items() for worker in workers)


def test_everything_after_the_script_belongs_to_the_script(tfparallel):
    args = ["--workers", "5", "-m", "--", "--help", "x y"]
    (worker,) = shown(tfparallel("launch", "--standalone", "--workers", "1", "show.py", *args))
    assert worker["argv"] == args


def test_runs_a_module(tfparallel):
    result = tfparallel("launch", "--standalone", "--workers", "2", "-m", "show", "--x")
    assert [worker["argv"] for worker in shown(result)] == [["--x"], ["--x"]]


def test_sets_the_environment_of_workers(tfparallel):
    options = ["--workers", "1", "--devices-per-worker", "4"]
    (worker,) = shown(tfparallel("launch", "--standalone", *options, "show.py"))
    assert worker["TFPARALLEL_LOGICAL_CPUS"] == "4"
    assert worker["PYTHONUNBUFFERED"] == "1"
    assert worker["TF_NUM_INTEROP_THREADS"] is not None or os.cpu_count() >= 8


def test_binds_each_process_to_cpus_of_its_own(tfparallel):
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("two processes need two CPUs")
    job = ["launch", "--standalone", "--workers", "2"]
    bound = [set(worker["cpus"]) for worker in shown(tfparallel(*job, "--bind-cpus", "show.py"))]
    assert bound[0] | bound[1] == usable and not bound[0] & bound[1] and all(bound)
    assert [set(worker["cpus"]) for worker in shown(tfparallel(*job, "show.py"))] == [usable] * 2


def test_keeps_what_the_user_has_set(tfparallel):
    variables = {"TF_NUM_INTEROP_THREADS": "3", "PYTHONUNBUFFERED": ""}
    (worker,) = shown(tfparallel("launch", "--standalone", "--workers", "1", "show.py",
                                 **variables))  # fmt: skip
    assert {name: worker[name] for name in variables} == variables
    assert worker["TFPARALLEL_LOGICAL_CPUS"] is None


@pytest.mark.parametrize("status", [0, 3])
def test_returns_the_workers_status(tfparallel, tmp_path, status):
    (tmp_path / "end.py").write_text(f"raise SystemExit({status})")
    result = tfparallel("launch", "--standalone", "--workers", "2", "end.py")
    assert result.returncode == status


def test_repeats_a_traceback_at_the_end(tfparallel, tmp_path):
    (tmp_path / "fail.py").write_text("def f():\n    raise RuntimeError('the reason')\nf()\n")
    result = tfparallel("launch", "--standalone", "--workers", "1", "fail.py")
    report = result.stderr.split("======== worker 0 failed first: exit status 1 ========\n")[1]
    assert report.startswith("Traceback (most recent call last):\n")
    assert report.endswith("RuntimeError: the reason\n")


@pytest.mark.timeout(120)
def test_tensorflow_workers_reduce_together(tfparallel, tmp_path):
    (tmp_path / "train.py").write_text("""
import tensorflow as tf
from tfparallel.coordination.cluster import read_tf_config

theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
config = read_tf_config()
assert theirs.cluster_spec() == config.cluster_resolver().cluster_spec()
assert (theirs.task_type, theirs.task_id) == (config.task_type, config.task_index)

strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=config.cluster_resolver())

@tf.function
def step():
    context = tf.distribute.get_replica_context()
    return context.all_reduce("sum", tf.constant(10.0 ** config.rank))

print("sum", float(strategy.run(step)))
""")
    result = tfparallel("launch", "--standalone", "--workers", "2", "train.py",
                        TF_CPP_MIN_LOG_LEVEL="2")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[worker 0] sum 11.0", "[worker 1] sum 11.0"]


# ---- what it refuses


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "the following arguments are required: COMMAND"),
        (["lunch"], "invalid choice: 'lunch'"),
        (["launch"], "the following arguments are required: SCRIPT"),
        (["launch", "show.py"], "Received: neither --standalone nor --nnodes"),
        (["launch", "show.py", "--standalone", "--workers", "2"], "options of launch stand before"),
        (["launch", "--workers", "2", "show.py"], "tfparallel launch --hosts a,b train.py"),
        (["launch", "--standalone", "show.py"], "Received: none. Add --workers 2."),
        (["launch", "--standalone", "--workers", "0", "show.py"], "from 1 to 10000. Received: '0'"),
        (["launch", "--standalone", "--workers=-1", "show.py"], "from 1 to 10000. Received: '-1'"),
        (["launch", "--standalone", "--workers", "two", "show.py"], "Received: 'two'"),
        (["launch", "--standalone", "--workers", "1e20", "show.py"], "10000. Received: '1e20'"),
        (["launch", "--standalone", "--workers", "1" + "0" * 20, "show.py"], "from 1 to 10000"),
        (["launch", "--standalone", "--workers", "9" * 5000, "show.py"], "from 1 to 10000"),
        (["launch", "--standalone", "--workers", "1", "--grace-seconds=1e308", "show.py"],
         "expected seconds, from 0 to 604800. Received: '1e308'"),
        (["launch", "--standalone", "--workers", "1", "--devices-per-worker", "0", "show.py"],
         "argument --devices-per-worker: expected an integer from 1 to 10000. Received: '0'"),
        (["launch", "--standalone", "--workers", "1", "--grace-seconds=-1", "show.py"],
         "expected seconds, from 0 to 604800. Received: '-1'"),
        (["launch", "--standalone", "--workers", "1", "--grace-seconds=nan", "show.py"],
         "expected seconds, from 0 to 604800. Received: 'nan'"),
        (["launch", "--standalone", "--workers", "1", "nowhere.py"],
         "SCRIPT must be a file. Received: 'nowhere.py'"),
        (["launch", "--standalone", "--workers", "1", "."], "SCRIPT must be a file. Received: '.'"),
        (["launch", "--standalone", "--workers", "1", "-m", "nowhere.train"],
         "-m expects a module that can be imported. Received: 'nowhere.train'"),
        (["launch", "--standalone", "--workers", "1", "-m", "show.py"],
         "Received: 'show.py'. For a file, leave -m out."),
        (["launch", "--standalone", "--workers", "1", "-m", "./show"], "Received: './show'"),
        (["launch", "--standalone", "--workers", "9999", "--bind-cpus", "show.py"],
         "a CPU for each process. Received: 9999 processes"),
        (["launch", "--stand", "--workers", "1", "show.py"],
         "unrecognized arguments: --stand"),
    ],
)  # fmt: skip
def test_refuses_at_once(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "show.py").write_text(SHOW)
    with pytest.raises(SystemExit) as info:
        main(args)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_refuses_standalone_inside_a_cluster(tfparallel):
    config = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    args = ["launch", "--standalone", "--workers", "2", "show.py"]
    result = tfparallel(*args, TF_CONFIG=config)
    assert result.returncode == 2
    assert f"Received: TF_CONFIG={config}" in result.stderr
    assert "env --unset=TF_CONFIG" in result.stderr
    assert tfparallel(*args, TF_CONFIG="{}").returncode == 0


def test_version(tfparallel):
    result = tfparallel("--version")
    assert (result.returncode, result.stdout) == (0, f"tfparallel {__version__}\n")


def test_does_not_import_tensorflow(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    source = """
import sys
from tfparallel.launch.cli import main
assert main(["launch", "--standalone", "--workers", "1", "show.py"]) == 0
assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
"""
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True,
                   env={**env, "PYTHONPATH": str(ROOT)})  # fmt: skip
