"""Which of several hosts' launchers this is, and where all of them meet: told by options or Slurm.

Pure: reads what is passed in.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections


class Place(NamedTuple):
    """A launcher among those that start one job together; a "node" as torchrun counts them."""

    num_nodes: int
    rank: int
    host: str  # of node 0, where all meet
    port: int


def place_of_options(num_nodes: int, rank: int | None, rendezvous: str | None) -> Place:
    """What `--nnodes`, `--node-rank` and `--rendezvous` say.

    Raises:
        ValueError: saying which is missing or wrong.
    """
    if rank is None or not 0 <= rank < num_nodes:
        raise ValueError(
            f"--nnodes {num_nodes} expects --node-rank, from 0 to {num_nodes - 1}, another one on "
            f"each host. Received: {rank}."
        )
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            "--nnodes expects --rendezvous HOST:PORT, a free port of node 0, the same on each "
            f"host. Received: {rendezvous!r}."
        )
    return Place(num_nodes, rank, host.strip("[]"), int(port))


def place_of_slurm(environ: Mapping[str, str]) -> Place | None:
    """The place of a task of `srun`, of which there are several; None outside of one."""
    count, rank = environ.get("SLURM_STEP_NUM_TASKS", "1"), environ.get("SLURM_PROCID", "")
    if int(count) < 2 or not rank.isdigit():
        return None
    job = 64 * int(environ["SLURM_JOB_ID"]) + int(environ["SLURM_STEP_ID"])
    host = first_host(environ["SLURM_STEP_NODELIST"])
    return Place(int(count), int(rank), host, _FIRST_PORT + job % _PORTS)


def place_over_ssh(hosts: Sequence[str], rank: int, token: int) -> Place:
    """The place of one of several hosts that are reached by ssh; the first has the rendezvous."""
    return Place(len(hosts), rank, hosts[0].rpartition("@")[2], _FIRST_PORT + token % _PORTS)


def first_host(nodelist: str) -> str:
    """The first host of a list as Slurm writes it: `gpu[03-05,9],cpu1` begins with `gpu03`."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if found is None:
        raise ValueError(f"Expected a list of hosts as Slurm writes it. Received: {nodelist!r}.")
    return "".join(part or "" for part in found.groups())
