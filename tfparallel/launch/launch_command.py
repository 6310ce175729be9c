"""The command `tfparallel launch`: its options, what it refuses at once, and the job it runs."""

import argparse
import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tfparallel.launch.argument_types import (
    grace_s,
    names,
    non_negative_int,
    numbers,
    positive_int,
)
from tfparallel.launch.jobs import cpus_of_processes, gpus_of_workers, print_plan, run_attempt
from tfparallel.launch.nodes import Place, place_of_options, place_of_slurm
from tfparallel.launch.rendezvous import Rendezvous
from tfparallel.launch.restarts import run_with_restarts

_DEFAULT_GRACE_S = 10.0
_RENDEZVOUS_TIMEOUT_S = 600

_NOT_STANDALONE = """\
launch expects to be told where the workers are. Received: neither --standalone nor --nnodes nor \
--hosts, and no srun that has started several tasks.
  Workers on this machine: tfparallel launch --standalone --workers 2 train.py (options of launch \
stand before the script)
  Workers on several hosts: tfparallel launch --hosts a,b train.py, or on each of them tfparallel \
launch --nnodes 2 --node-rank 0 --rendezvous a:29400 train.py
  Under Slurm: srun tfparallel launch train.py (docs/launch.md)"""

_TF_CONFIG_IS_SET = """\
--standalone starts a cluster of its own and expects no TF_CONFIG. Received: TF_CONFIG={}
  To join the cluster that TF_CONFIG describes: python train.py
  To start another one: env --unset=TF_CONFIG tfparallel launch --standalone ..."""


def add_launch_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `launch` to the subcommands of the command line."""
    launch = add_parser(
        "launch",
        help="start the workers of a training script",
        usage="tfparallel launch --standalone --workers N [options] [-m] SCRIPT [ARGUMENT ...]",
        description="Start the workers of a training script, on this machine or with other hosts, "
        "as one cluster.",
        epilog="Everything after SCRIPT belongs to the script.",
        allow_abbrev=False,
    )
    launch.set_defaults(run=_run_launch, error=launch.error)
    launch.add_argument(
        "--standalone", action="store_true", help="all workers on this machine, TF_CONFIG made here"
    )
    launch.add_argument(
        "--workers", type=positive_int, metavar="N", help="how many workers, on each host"
    )
    _add_options_of_hosts(launch)
    _add_options_of_servers(launch)
    _add_options_of_devices(launch)
    _add_options_of_endings(launch)
    _add_options_of_output(launch)
    launch.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    launch.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    launch.add_argument("script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_options_of_hosts(launch: argparse.ArgumentParser) -> None:
    launch.add_argument("--hosts", type=names, metavar="A,B", help="start on these hosts, by ssh")
    launch.add_argument(
        "--ssh-port", type=positive_int, metavar="PORT", help="of --hosts (default: ssh's own)"
    )
    launch.add_argument(
        "--nnodes", type=positive_int, metavar="N", help="how many hosts run this command"
    )
    launch.add_argument(
        "--node-rank", type=non_negative_int, metavar="R", help="which of them this is, from 0"
    )
    launch.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="a free port of node 0, where all of them meet"
    )
    launch.add_argument(
        "--rendezvous-timeout",
        type=positive_int,
        metavar="S",
        default=_RENDEZVOUS_TIMEOUT_S,
        help="how long hosts wait for one another there (default: %(default)s)",
    )


def _add_options_of_output(launch: argparse.ArgumentParser) -> None:
    launch.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and start nothing"
    )
    launch.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="a file for each process, instead of output"
    )
    launch.add_argument("--tee", action="store_true", help="output as well, beside --log-dir")
    launch.add_argument(
        "--ranks",
        type=numbers,
        metavar="0,2",
        help="show the output of these processes of each host only, counted from 0",
    )


def _add_options_of_servers(launch: argparse.ArgumentParser) -> None:
    launch.add_argument(
        "--ps",
        type=positive_int,
        metavar="N",
        help="how many parameter servers; the job then has one chief too (ParameterServerStrategy)",
    )
    launch.add_argument(
        "--evaluator",
        action="store_true",
        help="one more process that evaluates the chief's checkpoints; needs --ps",
    )


def _add_options_of_devices(launch: argparse.ArgumentParser) -> None:
    launch.add_argument(
        "--devices-per-worker",
        type=positive_int,
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


def _add_options_of_endings(launch: argparse.ArgumentParser) -> None:
    launch.add_argument(
        "--grace-seconds",
        type=grace_s,
        metavar="S",
        default=_DEFAULT_GRACE_S,
        help="time between SIGTERM and SIGKILL when workers are stopped (default: %(default)g)",
    )
    launch.add_argument(
        "--max-restarts",
        type=non_negative_int,
        metavar="N",
        default=0,
        help="how often the job is started again when a process fails (default: %(default)s)",
    )


def _run_launch(args: argparse.Namespace) -> int:
    """Run a job.

    Returns:
        The exit status: of the first worker that failed (128 + n if killed by signal n), 128 + n
        if signal n stopped the launcher, 0 otherwise. With restarts, that of the last attempt.
    """
    place = _check_launch(args)
    if args.dry_run:
        print_plan(args, place)
        return 0
    try:
        with contextlib.ExitStack() as stack:
            rendezvous = None if place is None else stack.enter_context(_rendezvous(args, place))
            return run_with_restarts(
                lambda restart: run_attempt(args, restart, rendezvous), args.max_restarts, _note
            )
    except KeyboardInterrupt:  # all workers are gone, but the reader of our output is stuck
        return 130
    except (OSError, ValueError) as error:
        _note(str(error))
        return 1


def _rendezvous(args: argparse.Namespace, place: Place) -> Rendezvous:
    what = f"{args.script} {args.script_args}"
    return Rendezvous(place, what, args.rendezvous_timeout, _note)


def _check_launch(args: argparse.Namespace) -> Place | None:
    """Exit with status 2 and a message if the job cannot start.

    Returns:
        Which of several launchers this is; None for the only one.
    """
    place = _place(args)
    if args.standalone and args.workers is None:
        args.error("--standalone expects the number of workers. Received: none. Add --workers 2.")
    args.workers = args.workers or 1
    args.node_rank = 0 if place is None else place.rank
    if args.tee and args.log_dir is None:
        args.error("--tee expects --log-dir. Received: none. Without it, all output is shown.")
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
        cpus_of_processes(args)
    except ValueError as error:
        args.error(f"{error} Leave --bind-cpus out, and they share the CPUs.")
    try:
        gpus_of_workers(args)
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
    return place


def _place(args: argparse.Namespace) -> Place | None:
    """Which of several launchers this is, as exactly one of options and Slurm says."""
    ways = [args.standalone, args.nnodes is not None, args.hosts is not None]
    if sum(ways) > 1:
        args.error("launch expects one of --standalone, --nnodes and --hosts. Received: several.")
    try:
        if args.nnodes is not None:
            return place_of_options(args.nnodes, args.node_rank, args.rendezvous)
        place = None if any(ways) else place_of_slurm(os.environ)
    except (ValueError, KeyError) as error:
        args.error(str(error))
    if place is None and not any(ways):
        args.error(_NOT_STANDALONE)
    return place


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
