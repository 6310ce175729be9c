"""Each look at a machine finds the one thing that is wrong, and nothing on a sound one."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tfparallel.internals.supported import SUPPORTED
from tfparallel.machine import disks, gpus, network, packages, processors
from tfparallel.machine.finding import Finding, worst

SOUND = {"tensorflow-cpu": "2.21.0", "keras": "3.12.0", "numpy": "2.0.0"}


def statuses(findings):
    return [each.status for each in findings]


def test_the_worst_counts():
    found = [Finding("a", status, "") for status in ("ok", "problem", "warning")]
    assert worst(found) == "problem"
    assert worst([]) == "ok"


def test_wheels_that_overwrite_one_another():
    assert statuses(packages.check_clashes(SOUND)) == ["ok", "ok"]
    (clash, _) = packages.check_clashes({**SOUND, "tensorflow": "2.21.0"})
    assert clash.status == "problem"
    assert "tensorflow 2.21.0 and tensorflow-cpu 2.21.0" in clash.found
    assert clash.cure.startswith("pip uninstall tensorflow tensorflow-cpu")
    assert "problem" in statuses(packages.check_clashes({"keras": "3.12.0"}))


@pytest.mark.parametrize(
    ("wheels", "found", "cure"),
    [
        ({"tensorflow-tpu": "2.20.0"}, None, ""),
        (
            {"tensorflow-cpu": "2.21.0"},
            "tensorflow-cpu 2.21.0, which knows no TPU",
            "pip uninstall tensorflow-cpu; pip install 'tfparallel[tpu]'",
        ),
        (
            {"tensorflow": "2.21.0", "tensorflow-tpu": "2.20.0"},
            "tensorflow 2.21.0 and tensorflow-tpu 2.20.0, whose files overwrite one another",
            "pip uninstall tensorflow tensorflow-tpu; pip install 'tfparallel[tpu]'",
        ),
        ({}, "no TensorFlow", "pip install 'tfparallel[tpu]'"),
    ],
)
def test_a_tpu_needs_the_wheel_for_it_alone(wheels, found, cure):
    (finding,) = packages.check_tpu_packages({"keras": "3.12.0", **wheels})
    assert finding.status == ("ok" if found is None else "problem")
    assert (found is None or finding.found == found) and finding.cure == cure


@pytest.mark.parametrize(
    ("name", "version", "bad"),
    [
        ("keras", "2.15.0", True),
        ("keras", "3.11.9", True),
        ("keras", "3.15.1", False),
        ("keras", "3.16.0", True),
        ("tensorflow-cpu", "2.19.1", True),
        ("tensorflow-cpu", "2.22.0rc1", True),
        ("tensorflow", "2.20.0", False),
        ("horovod", "0.27.0", True),
    ],
)
def test_versions_known_to_be_bad(name, version, bad):
    assert ("problem" in statuses(packages.check_versions({name: version}))) == bad


def test_versions_that_are_supported_are_not_known_to_be_bad():
    for name, text in SUPPORTED.items():
        for version in text.replace(" and ", " to ").split(" to "):
            assert statuses(packages.check_versions({name: f"{version}.0"})) == ["ok"]


def test_requirements_that_are_not_met():
    versions = packages.installed()
    assert statuses(packages.check_requirements(versions)) == ["ok"]
    old = list(packages.check_requirements({**versions, "numpy": "1.0.0"}))
    assert any("numpy" in each.found and "1.0.0 is installed" in each.found for each in old)


def test_an_import_that_fails_is_told_by_its_error():
    trace = 'Traceback (most recent call last):\n  File "x"\nImportError: libfoo.so: no such file\n'
    assert packages.last_error(trace) == "ImportError: libfoo.so: no such file"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_cgroup(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert processors.cores_of_cgroup(tmp_path) == cores
    is_less = cores is not None and cores < processors.usable_cores(tmp_path / "none")
    assert statuses(processors.check_cores(tmp_path)) == ["warning" if is_less else "ok"]


def test_memory_of_a_cgroup(tmp_path):
    assert processors.memory_of_cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text(str(2**29))
    assert processors.memory_of_cgroup(tmp_path) == 2**29
    assert statuses(processors.check_memory(tmp_path)) == ["warning"]


@pytest.mark.parametrize(
    ("told", "cores", "status"),
    [
        ({}, 8, "ok"),
        ({"OMP_NUM_THREADS": "8"}, 8, "ok"),
        ({"OMP_NUM_THREADS": "1"}, 8, "warning"),
        ({"TF_NUM_INTRAOP_THREADS": "64"}, 8, "warning"),
        ({"TF_NUM_INTRAOP_THREADS": "0"}, 8, "ok"),
        ({"TF_NUM_INTRAOP_THREADS": "many"}, 8, "problem"),
    ],
)
def test_numbers_of_threads(told, cores, status):
    assert statuses(processors.check_threads(told, cores)) == [status]


@pytest.mark.parametrize(
    ("told", "threads"),
    [
        ({}, 0),
        ({"TF_NUM_INTRAOP_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "0"}, 2),
        ({"OMP_NUM_THREADS": "many"}, 0),
    ],
)
def test_threads_that_the_environment_tells(told, threads):
    assert processors.threads_told(told) == threads


def test_gpus_that_would_be_idle():
    def driver():
        return ["H200, 143771 MiB, 570.1"]

    def broken():
        raise RuntimeError("nvidia-smi gives no answer in 20 s")

    gpu = {"tensorflow": "2.21.0"}
    assert statuses(gpus.check_gpus(gpu, {}, driver)) == ["ok"]
    assert statuses(gpus.check_gpus(SOUND, {}, driver)) == ["problem"]
    assert statuses(gpus.check_gpus(gpu, {"CUDA_VISIBLE_DEVICES": "-1"}, driver)) == ["warning"]
    assert statuses(gpus.check_gpus(gpu, {}, list)) == ["ok"]
    assert statuses(gpus.check_gpus(gpu, {}, broken)) == ["problem"]


def tf_config(*workers, index=0):
    cluster = {"worker": list(workers)}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
    }


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def by_check(findings):
    return {each.check: each for each in findings}


def test_a_sound_cluster():
    found = by_check(
        network.check_tf_config(tf_config(*(f"127.0.0.1:{free_port()}" for _ in "ab")))
    )
    assert {each.status for each in found.values()} == {"ok"}
    assert "no job listens yet" in found["reach"].found


def test_mistakes_in_tf_config():
    (found,) = network.check_tf_config({"TF_CONFIG": "{"})
    assert found.status == "problem"


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = by_check(network.check_tf_config(tf_config(f"127.0.0.1:{port}")))
    assert found["port"].status == "problem"
    assert str(port) in found["port"].cure


def test_an_address_of_another_host():
    found = by_check(network.check_tf_config(tf_config(f"192.0.2.1:{free_port()}")))
    assert found["address"].status == "problem"


def test_a_name_that_nobody_knows():
    addresses = (f"127.0.0.1:{free_port()}", "no-such-host.invalid:2222")
    found = by_check(network.check_tf_config(tf_config(*addresses)))
    assert found["names"].status == "problem"
    assert "no-such-host.invalid" in found["names"].found


def test_congestion_control(tmp_path):
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    (found,) = network.check_congestion_control(tmp_path)
    assert found.found.startswith("cubic") and "modprobe tcp_bbr" in found.found


def test_a_folder(tmp_path):
    assert "problem" not in statuses(disks.check_folder(tmp_path / "new"))
    (tmp_path / "file").write_text("")
    assert statuses(disks.check_folder(tmp_path / "file")) == ["problem"]
    assert disks.file_system_of(tmp_path) != "unknown"


@pytest.mark.timeout(120)
def test_the_command_tells_scripts(tmp_path):
    """With an exit status, and JSON; a taken port is the problem here."""
    with socket.create_server(("", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "tfparallel", "doctor", "--json", "--folder", str(tmp_path)],
            env={
                **os.environ,
                **tf_config(f"127.0.0.1:{taken.getsockname()[1]}"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert told["status"] == "problem"
    assert [each["check"] for each in told["findings"] if each["status"] == "problem"] == ["port"]
    assert {"wheels", "versions", "import", "cores", "folder"} <= {
        each["check"] for each in told["findings"]
    }
