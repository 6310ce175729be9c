"""A job of `tfparallel launch`: what its options say is started here, alone or with other hosts."""

import argparse
import contextlib
import itertools
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfparallel.coordination.proof import SECRET_VARIABLE
from tfparallel.launch.cpus import share_cpus
from tfparallel.launch.job_life import Ending
from tfparallel.launch.nodes import Place, place_over_ssh
from tfparallel.launch.ports import REUSE_PORT_ENV, reserved_addresses
from tfparallel.launch.processes import WorkerCommand, run_job
from tfparallel.launch.rendezvous import Rendezvous, cluster_of, first_indices
from tfparallel.launch.restarts import RESTART_VARIABLE
from tfparallel.launch.roles import PlannedProcess, Role, count_roles, plan_processes
from tfparallel.launch.ssh import command_on
from tfparallel.machine.gpu_shares import gpus_of_machine, share_gpus

_SHOWN_IN_A_DRY_RUN = ("TF_CONFIG", "TFPARALLEL_", "CUDA_VISIBLE_DEVICES", "TF_NUM_INTEROP")


def run_attempt(args: argparse.Namespace, restart: int, rendezvous: Rendezvous | None) -> Ending:
    """Starts the processes of this host, and waits for their end."""
    if args.hosts:
        return run_job(_commands_over_ssh(args), grace_s=args.grace_seconds)
    with _planned(args, restart, rendezvous) as commands:
        return run_job(commands, grace_s=args.grace_seconds)


def print_plan(args: argparse.Namespace, place: Place | None) -> None:
    """Prints what would be started, each process as a line for a shell; starts nothing."""
    if args.hosts:
        commands = _commands_over_ssh(args)
    else:
        with _planned(args, 0, None) as planned:
            commands = planned
    if place is not None:  # the others are not asked
        meeting = f"{place.host}:{place.port}"
        print(f"# node {place.rank} of {place.num_nodes}; the cluster is known at {meeting} only")
    for command in commands:
        print(f"# {command.label}")
        print(shlex.join(["env", *_told(command.env), *command.argv]))


def _told(env: Mapping[str, str]) -> list[str]:
    """All but the job's secret, which the shell that runs the line has, too."""
    shown = {k: v for k, v in env.items() if k.startswith(_SHOWN_IN_A_DRY_RUN)}
    return [f"{k}={v}" for k, v in sorted(shown.items()) if k != SECRET_VARIABLE]


@contextlib.contextmanager
def _planned(
    args: argparse.Namespace, restart: int, rendezvous: Rendezvous | None
) -> Iterator[list[WorkerCommand]]:
    """The commands of this host, whose ports are kept for them until the context ends."""
    counts, cpus = counts_of(args), cpus_of_processes(args)
    with reserved_addresses(sum(counts.values())) as addresses:
        if rendezvous is not None:
            host = _bracketed(rendezvous.own_host())
            addresses = [f"{host}:{each.rpartition(':')[2]}" for each in addresses]
        remaining = iter(addresses)
        own = {role: list(itertools.islice(remaining, count)) for role, count in counts.items()}
        plan = plan_processes(
            own,
            {**os.environ, **REUSE_PORT_ENV, RESTART_VARIABLE: str(restart)},
            num_cores=min(map(len, cpus)),
            devices_per_worker=args.devices_per_worker,
            gpus=gpus_of_workers(args),
            **_of_all_nodes(rendezvous, restart, own),
        )
        yield [
            _command(args, process, tuple(its_cpus), rank)
            for rank, (process, its_cpus) in enumerate(zip(plan, cpus, strict=True))
        ]


def _of_all_nodes(
    rendezvous: Rendezvous | None, restart: int, own: Mapping[Role, list[str]]
) -> dict:
    if rendezvous is None:
        return {}
    offers = rendezvous.exchange(restart, {role.name: each for role, each in own.items()})
    indices = first_indices(offers, rendezvous.place.rank)
    return {"cluster": cluster_of(offers), "first_indices": indices}


def _command(
    args: argparse.Namespace, process: PlannedProcess, cpus: tuple[int, ...], rank: int
) -> WorkerCommand:
    what = ["-m", args.script] if args.is_module else [args.script]
    argv = (sys.executable, *what, *args.script_args)
    if args.log_dir is None:
        is_shown = args.ranks is None or rank in args.ranks
        return WorkerCommand(process.label, argv, process.env, cpus, None, is_shown)
    args.log_dir.mkdir(parents=True, exist_ok=True)
    log = args.log_dir / f"{process.label.replace(' ', '-')}.log"
    is_shown = args.tee and (args.ranks is None or rank in args.ranks)
    return WorkerCommand(process.label, argv, process.env, cpus, log, is_shown)


def counts_of(args: argparse.Namespace) -> dict[Role, int]:
    """How many processes of each role start here; node 0 has those that a job has once."""
    if args.node_rank:
        return count_roles(args.workers)
    return count_roles(args.workers, args.ps or 0, args.evaluator)


def gpus_of_workers(args: argparse.Namespace) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of each worker of this host; none where it has no GPU.

    Raises:
        ValueError: for more workers than GPUs.
    """
    gpus = [] if args.hosts else gpus_of_machine()
    return share_gpus(gpus, args.workers, args.share_gpus) if gpus else []


def cpus_of_processes(args: argparse.Namespace) -> list[list[int]]:
    """The CPUs that each process of this host may use, in the plan's order."""
    usable, num_processes = sorted(os.sched_getaffinity(0)), sum(counts_of(args).values())
    return share_cpus(usable, num_processes) if args.bind_cpus else [usable] * num_processes


def _commands_over_ssh(args: argparse.Namespace) -> list[WorkerCommand]:
    token = secrets.randbelow(1 << 30)
    return [
        command_on(
            host,
            place_over_ssh(args.hosts, rank, token),
            _arguments_for_hosts(args),
            os.environ,
            args.ssh_port,
        )
        for rank, host in enumerate(args.hosts)
    ]


def _arguments_for_hosts(args: argparse.Namespace) -> list[str]:
    """The options of `launch` that hold on every host, and the script."""
    options = ["--workers", str(args.workers), "--grace-seconds", str(args.grace_seconds)]
    for name in ("ps", "devices_per_worker", "log_dir"):
        if (value := getattr(args, name)) is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("evaluator", "bind_cpus", "share_gpus", "tee"):
        options += [f"--{name.replace('_', '-')}"] * getattr(args, name)
    if args.ranks is not None:
        options += ["--ranks", ",".join(map(str, args.ranks))]
    script = str(args.script) if args.is_module else str(Path(args.script))
    return [*options, *(["-m"] if args.is_module else []), script, *args.script_args]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
