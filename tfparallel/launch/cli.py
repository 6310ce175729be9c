"""The command line: `tfparallel launch --standalone --workers 2 train.py`.

Imports no TensorFlow, so that mistakes on the command line show at once.
"""

import argparse
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfparallel.launch.backups import add_backups_command
from tfparallel.launch.cpus import share_cpus
from tfparallel.launch.doctor import add_doctor_command
from tfparallel.launch.ports import REUSE_PORT_ENV, reserved_addresses
from tfparallel.launch.processes import Ending, WorkerCommand, run_job
from tfparallel.launch.restarts import RESTART_VARIABLE, run_with_restarts
from tfparallel.launch.roles import Role, count_roles, plan_processes
from tfparallel.machine.gpu_shares import gpus_of_machine, share_gpus
from tfparallel.version import __version__

_DEFAULT_GRACE_S = 10.0
_LONGEST_GRACE_S = 604_800  # a week
_MOST_PROCESSES = 10_000  # of one kind; a machine has 65,535 ports
_MOST_RESTARTS = 1_000_000

_NOT_STANDALONE = """\
launch starts all workers on this machine and expects --standalone. Received: no --standalone.
  Workers on this machine: tfparallel launch --standalone --workers 2 train.py (options of launch \
stand before the script)
  Workers on several hosts: run `python train.py` on each, with TF_CONFIG set by you or by the \
scheduler (docs/launch.md)."""

_TF_CONFIG_IS_SET = """\
--standalone starts a cluster of its own and expects no TF_CONFIG. Received: TF_CONFIG={}
  To join the cluster that TF_CONFIG describes: python train.py
  To start another one: env --unset=TF_CONFIG tfparallel launch --standalone ..."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; those of this process by default.

    Returns:
        The exit status of the command, which its own function describes. Mistakes in `argv` exit
        with 2.
    """
    args = _make_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _run_launch(args: argparse.Namespace) -> int:
    """Run a job.

    Returns:
        The exit status: of the first worker that failed (128 + n if killed by signal n), 128 + n
        if signal n stopped the launcher, 0 otherwise. With restarts, that of the last attempt.
    """
    _check_launch(args)
    try:
        return run_with_restarts(lambda restart: _launch(args, restart), args.max_restarts, _note)
    except KeyboardInterrupt:  # all workers are gone, but the reader of our output is stuck
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfparallel", description="Distribution strategies for Keras 3 on TensorFlow."
    )
    parser.add_argument("--version", action="version", version=f"tfparallel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    launch = commands.add_parser(
        "launch",
        help="start the workers of a training script",
        usage="tfparallel launch --standalone --workers N [options] [-m] SCRIPT [ARGUMENT ...]",
        description="Start N workers of a training script on this machine, as one cluster.",
        epilog="Everything after SCRIPT belongs to the script.",
        allow_abbrev=False,
    )
    launch.set_defaults(run=_run_launch, error=launch.error)
    launch.add_argument(
        "--standalone", action="store_true", help="all workers on this machine, TF_CONFIG made here"
    )
    launch.add_argument("--workers", type=_positive_int, metavar="N", help="how many workers")
    launch.add_argument(
        "--ps",
        type=_positive_int,
        metavar="N",
        help="how many parameter servers; the job then has one chief too (ParameterServerStrategy)",
    )
    launch.add_argument(
        "--evaluator",
        action="store_true",
        help="one more process that evaluates the chief's checkpoints; needs --ps",
    )
    launch.add_argument(
        "--devices-per-worker",
        type=_positive_int,
        metavar="D",
        help="logical CPU devices in each worker (default: left to the script)",
    )
    launch.add_argument(
        "--bind-cpus",
        action="store_true",
        help="each process runs on CPUs of its own, an equal share of this machine's",
    )
    launch.add_argument(
        "--share-gpus",
        action="store_true",
        help="more workers than GPUs: several on one, each takes memory as it needs it",
    )
    launch.add_argument(
        "--grace-seconds",
        type=_grace_s,
        metavar="S",
        default=_DEFAULT_GRACE_S,
        help="time between SIGTERM and SIGKILL when workers are stopped (default: %(default)g)",
    )
    launch.add_argument(
        "--max-restarts",
        type=_non_negative_int,
        metavar="N",
        default=0,
        help="how often the job is started again when a process fails (default: %(default)s)",
    )
    launch.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    launch.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    launch.add_argument("script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add_backups_command(commands)
    add_doctor_command(commands)
    return parser


def _check_launch(args: argparse.Namespace) -> None:
    """Exit with status 2 and a message if the job cannot start."""
    if not args.standalone:
        args.error(_NOT_STANDALONE)
    if args.workers is None:
        args.error("--standalone expects the number of workers. Received: none. Add --workers 2.")
    if args.evaluator and args.ps is None:
        args.error(
            "--evaluator expects parameter servers. Received: no --ps. Add --ps 1, or leave "
            "--evaluator out: other strategies evaluate with validation_data of fit."
        )
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        args.error(_TF_CONFIG_IS_SET.format(os.environ["TF_CONFIG"]))
    if sys.platform != "linux":
        args.error(
            "launch expects Linux, whose kernel ends the workers of a launcher that dies. "
            f"Received: {sys.platform}. Set TF_CONFIG and run the script once per worker."
        )
    try:
        _cpus_of_processes(args)
    except ValueError as error:
        args.error(f"{error} Leave --bind-cpus out, and they share the CPUs.")
    try:
        _gpus_of_workers(args)
    except ValueError as error:
        args.error(str(error))
    if args.is_module and not _module_exists(args.script):
        args.error(
            f"-m expects a module that can be imported. Received: {args.script!r}. "
            "For a file, leave -m out."
        )
    if not args.is_module and not Path(args.script).is_file():
        args.error(
            f"SCRIPT must be a file. Received: {args.script!r}, which is not one in {os.getcwd()}. "
            "For a module, put -m before it."
        )


def _launch(args: argparse.Namespace, restart: int) -> Ending:
    what = ["-m", args.script] if args.is_module else [args.script]
    argv = (sys.executable, *what, *args.script_args)
    counts = _counts(args)
    cpus = _cpus_of_processes(args)
    with reserved_addresses(sum(counts.values())) as addresses:
        remaining = iter(addresses)
        plan = plan_processes(
            {role: list(itertools.islice(remaining, count)) for role, count in counts.items()},
            {**os.environ, **REUSE_PORT_ENV, RESTART_VARIABLE: str(restart)},
            num_cores=min(map(len, cpus)),
            devices_per_worker=args.devices_per_worker,
            gpus=_gpus_of_workers(args),
        )
        commands = [
            WorkerCommand(process.label, argv, process.env, tuple(own))
            for process, own in zip(plan, cpus, strict=True)
        ]
        return run_job(commands, grace_s=args.grace_seconds)


def _counts(args: argparse.Namespace) -> dict[Role, int]:
    return count_roles(args.workers, args.ps or 0, args.evaluator)


def _gpus_of_workers(args: argparse.Namespace) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` of each worker; none where the machine has no GPU."""
    gpus = gpus_of_machine()
    return share_gpus(gpus, args.workers, args.share_gpus) if gpus else []


def _cpus_of_processes(args: argparse.Namespace) -> list[list[int]]:
    """The CPUs that each process of the job may use, in the plan's order."""
    usable, num_processes = sorted(os.sched_getaffinity(0)), sum(_counts(args).values())
    return share_cpus(usable, num_processes) if args.bind_cpus else [usable] * num_processes


def _note(text: str) -> None:
    print(f"[launcher] {text}", file=sys.stderr, flush=True)


def _module_exists(name: str) -> bool:
    """Whether the top level of `name` can be found; deeper, looking would import it."""
    if Path(name).is_file() or not all(part.isidentifier() for part in name.split(".")):
        return False
    top_level = name.partition(".")[0]
    # python -m looks in the current directory first, whatever sys.path is here.
    if importlib.machinery.PathFinder.find_spec(top_level, [os.getcwd()]) is not None:
        return True
    return any(finder.find_spec(top_level, None) is not None for finder in sys.meta_path)


def _positive_int(text: str) -> int:
    return _int_between(1, _MOST_PROCESSES, text)


def _non_negative_int(text: str) -> int:
    return _int_between(0, _MOST_RESTARTS, text)


def _int_between(least: int, most: int, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected an integer from {least} to {most}. Received: {text[:40]!r}."
    )


def _grace_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_GRACE_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds, from 0 to {_LONGEST_GRACE_S}. Received: {text[:40]!r}."
        )
    return value
