"""Jobs that several launchers start together."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.launch.jobs import ROOT
from tfparallel.launch.nodes import Place
from tfparallel.launch.ssh import command_on

pytestmark = [pytest.mark.timeout(120), pytest.mark.turns]

SHOW = """
import os, sys
if os.environ["TFPARALLEL_RESTART"] == "0" and "--fail" in sys.argv:
    sys.exit(3)
print(os.environ["TF_CONFIG"])
"""


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Starts launchers in a folder with the script `show.py`; ends them."""
    (tmp_path / "show.py").write_text(SHOW)
    started = []

    def start(*args, prefix=(), **variables):
        known = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CONFIG", "SLURM"))}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tfparallel", "launch", *args],
            cwd=tmp_path,
            env={**known, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def tasks_of(processes):
    """The task of every process by its label, in a cluster that all agree on; and that cluster."""
    tasks, clusters = {}, set()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        for line in out.splitlines():
            label, _, text = line.partition("] ")
            config = json.loads(text)
            tasks[label[1:]] = config["task"]
            clusters.add(json.dumps(config["cluster"]))
    (cluster,) = clusters
    return tasks, json.loads(cluster)


def test_launchers_of_two_hosts_start_one_cluster(start):
    meeting = ("--nnodes", "2", "--rendezvous", f"localhost:{free_port()}")
    second = start(*meeting, "--node-rank", "1", "--workers", "2", "show.py")
    first = start(*meeting, "--node-rank", "0", "--workers", "1", "--ps", "1", "show.py")
    tasks, cluster = tasks_of([first, second])
    assert {role: len(addresses) for role, addresses in cluster.items()} == {
        "chief": 1,
        "worker": 3,
        "ps": 1,
    }
    assert len({address for addresses in cluster.values() for address in addresses}) == 5
    assert tasks == {
        f"{role} {i}": {"type": role, "index": i}
        for role, addresses in cluster.items()
        for i in range(len(addresses))
    }


def test_tasks_of_srun_need_no_options(start):
    step = {
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }
    launchers = [start("show.py", **step, SLURM_PROCID=str(rank)) for rank in range(3)]
    tasks, cluster = tasks_of(launchers)
    assert len(tasks) == len(cluster["worker"]) == 3


def test_they_meet_again_when_the_job_is_started_again(start):
    meeting = ("--nnodes", "2", "--rendezvous", f"localhost:{free_port()}", "--max-restarts", "1")
    launchers = [start(*meeting, "--node-rank", str(i), "show.py", "--fail") for i in (0, 1)]
    tasks, _ = tasks_of(launchers)
    assert len(tasks) == 2


def test_a_launcher_of_another_job_is_refused_and_one_that_is_missing_is_named(start):
    port = free_port()
    meeting = ("--nnodes", "2", "--rendezvous", f"localhost:{port}", "--rendezvous-timeout", "12")
    first = start(*meeting, "--node-rank", "0", "show.py")
    other = start(*meeting, "--node-rank", "1", "show.py", "other", "arguments")
    _, err = other.communicate(timeout=60)
    assert other.returncode == 1
    assert "Received: a refusal: it has closed the connection" in err
    assert "(Node 1 is speaking.)" in err
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "Expected nodes [1] to come to the rendezvous within 12 s" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nnodes", "2", "show.py"], "expects --node-rank"),
        (["--standalone", "--nnodes", "2", "show.py"], "one of --standalone, --nnodes and --hosts"),
        (["--hosts", "a,,b", "show.py"], "expected hosts, as in a,b. Received: 'a,,b'"),
        (["--standalone", "--workers", "1", "--tee", "show.py"], "--tee expects --log-dir"),
    ],
)
def test_mistakes_are_told_before_anything_starts(start, args, says):
    process = start(*args)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert says in err


def test_a_dry_run_prints_commands_that_run(start, tmp_path):
    process = start("--standalone", "--workers", "2", "--dry-run", "show.py", "a b")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    assert lines[1].endswith("show.py 'a b'")
    ran = subprocess.run(lines[1], shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(ran.stdout)["task"] == {"type": "worker", "index": 1}


def test_logs_of_each_process_and_the_ranks_that_are_shown(start, tmp_path):
    options = ("--log-dir", "logs", "--tee", "--ranks", "1")
    process = start("--standalone", "--workers", "2", *options, "show.py")
    out, _ = process.communicate(timeout=60)
    assert [line.partition("]")[0] for line in out.splitlines()] == ["[worker 1"]
    for index in (0, 1):
        config = json.loads((tmp_path / "logs" / f"worker-{index}.log").read_text())
        assert config["task"]["index"] == index


def running_in(folder):
    """The scripts that run in a folder, in any namespace."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(folder) and "show.py" in (process.info["cmdline"] or ()):
            found.append(process.info["cmdline"])
    return found


def test_a_host_whose_sshd_does_not_take_the_secret_starts_nothing():
    environ = {"PATH": os.environ["PATH"], "TFPARALLEL_SECRET": "s3cret"}
    command = command_on("b", Place(2, 1, "a", 29400), ["show.py"], environ, None)
    assert "s3cret" not in shlex.join(command.argv)
    ran = subprocess.run(["sh", "-c", command.argv[-1]], capture_output=True, text=True, env={})
    assert ran.returncode == 2
    assert "Add 'AcceptEnv TFPARALLEL_SECRET' to its configuration" in ran.stderr


# ---- ssh -----------------------------------------------------------------------------------------


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def two_hosts(tmp_path):
    """Two network namespaces, joined by a cable, with sshd in each; how to run in the first."""
    for tool in ("/usr/sbin/sshd", "/usr/sbin/ip", "/usr/bin/ssh-keygen"):
        if not (os.path.exists(tool) or shutil.which(os.path.basename(tool))):
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names, key = [f"tfp{os.getpid()}a", f"tfp{os.getpid()}b"], tmp_path / "key"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    (tmp_path / "authorized").write_text((tmp_path / "key.pub").read_text())
    os.makedirs("/run/sshd", exist_ok=True)
    servers = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        ends = [f"v{os.getpid()}a", f"v{os.getpid()}b"]
        cable = ("link", "add", ends[0], "netns", names[0], "type", "veth")
        run("ip", *cable, "peer", "name", ends[1], "netns", names[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            run("ip", "-n", name, "addr", "add", f"10.99.7.{i + 1}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
            sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", str(key), "-p", "2222"]
            options = [f"AuthorizedKeysFile={tmp_path / 'authorized'}", "StrictModes=no"]
            options += ["AcceptEnv=TFPARALLEL_SECRET"]
            sshd += [x for option in options for x in ("-o", option)]
            enter = ["ip", "netns", "exec", name]
            with open(tmp_path / f"sshd{i}.log", "wb") as log:
                servers.append(subprocess.Popen([*enter, *sshd], stderr=log))
        (tmp_path / "bin").mkdir()
        ssh = tmp_path / "bin" / "ssh"
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -i {key} {known} "$@"\n')
        ssh.chmod(0o755)
        yield ["ip", "netns", "exec", names[0]]
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_hosts_are_started_over_ssh_and_end_with_the_launcher(start, two_hosts, tmp_path):
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    hosts = ("--hosts", "10.99.7.1,10.99.7.2", "--ssh-port", "2222", "--workers", "2")
    # A launcher that is not sent the secret ends.
    secret = {"TFPARALLEL_SECRET": "as long as it is random"}
    process = start(*hosts, "show.py", prefix=two_hosts, PATH=path, **secret)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    configs = [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]
    assert sorted(config["task"]["index"] for config in configs) == [0, 1, 2, 3]
    addresses = configs[0]["cluster"]["worker"]
    assert [a.partition(":")[0] for a in addresses] == 2 * ["10.99.7.1"] + 2 * ["10.99.7.2"]

    (tmp_path / "show.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    process = start(*hosts, "show.py", prefix=two_hosts, PATH=path)
    for _ in range(4):
        assert "up" in process.stdout.readline()
    process.terminate()
    assert process.wait(timeout=60) == 143
    deadline = time.monotonic() + 30  # the terminals are closed; who is there notices by itself
    while running_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running_in(tmp_path) == []
