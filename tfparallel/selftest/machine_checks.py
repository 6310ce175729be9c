"""What the machine is, before anything trains on it: packages, driver, how GPUs are joined."""

import os
import re
import shutil
import subprocess

from tfparallel.machine.examination import examine
from tfparallel.machine.finding import worst
from tfparallel.machine.gpus import gpus_of_driver
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.verdicts import CheckFailedError, CheckSkippedError, Passed

_LIMIT_S = 20.0


def look_at_machine(bench: Bench) -> Passed:
    """What `tfparallel doctor` finds: a problem of its is a failure."""
    environ = {k: v for k, v in os.environ.items() if bench.gpus or k != "CUDA_VISIBLE_DEVICES"}
    findings = list(examine(environ))
    problems = [each for each in findings if each.status == "problem"]
    if problems:
        raise CheckFailedError("; ".join(f"{each.check}: {each.found}" for each in problems))
    figures: dict[str, object] = {}
    for each in findings:
        figures.setdefault(each.check, each.found)
    warnings = [each.check for each in findings if each.status == "warning"]
    text = str(figures.get("versions", ""))
    text += f"; warnings: {', '.join(warnings)}" if warnings else ""
    assert worst(findings) != "problem"
    return Passed(text, figures)


def look_at_topology(bench: Bench) -> Passed:
    """How GPUs are joined, whether they reach one another's memory, and which are parts of one."""
    if shutil.which("nvidia-smi") is None:
        raise CheckSkippedError("nvidia-smi is missing: the driver's tools are not here")
    links, peers = _said("topo", "-m"), _said("topo", "-p2p", "r")
    parts = len(re.findall(r"^\s+MIG ", _said("-L"), re.MULTILINE))
    apart = re.findall(r"\b(?:CNS|GNS|TNS|NS)\b", peers.partition("Legend")[0])
    text = f"{', '.join(gpus_of_driver())}; " + (
        f"{len(apart) // 2} pairs without peer access" if apart else "peer access between all"
    )
    text += f"; {parts} MIG instances, between which NCCL does not run" if parts else ""
    return Passed(text, {"topology": links, "peer_access": peers, "mig_instances": parts})


def has_nvlink() -> bool:
    """Whether NVLink joins each pair of GPUs of this machine."""
    return is_all_nvlink(_said("topo", "-m"))


def is_all_nvlink(links: str) -> bool:
    """Whether a table of `nvidia-smi topo -m` says so.

    A row of a GPU is its name, then its link to each GPU ("X" to itself, "NV12", "PIX", "SYS").
    """
    rows = re.findall(r"^GPU\d+\t(.*)$", links, re.MULTILINE)
    links_of = [row.split()[: len(rows)] for row in rows]
    return all(link == "X" or link.startswith("NV") for own in links_of for link in own)


def _said(*arguments: str) -> str:
    """What `nvidia-smi` writes.

    Raises:
        CheckFailedError: if it fails, or is silent for too long.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailedError(f"nvidia-smi gives no answer in {_LIMIT_S:g} s") from error
    if done.returncode != 0:
        raise CheckFailedError((done.stderr or done.stdout).strip()[:200])
    return done.stdout
