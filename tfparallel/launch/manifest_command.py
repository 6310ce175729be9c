"""The command `tfparallel manifest`: prints what a cluster takes to run a script."""

import argparse
import io
import re
from collections.abc import Callable
from typing import Any

from tfparallel.launch.argument_types import non_negative_int, positive_int
from tfparallel.launch.manifests.compose import compose_manifest
from tfparallel.launch.manifests.job_spec import JobSpec, Resources, processes_by_role
from tfparallel.launch.manifests.jobset import jobset_manifest
from tfparallel.launch.manifests.rayjob import rayjob_manifest
from tfparallel.launch.manifests.sbatch import horovod_script, sbatch_script
from tfparallel.launch.manifests.tfjob import tfjob_manifest
from tfparallel.launch.manifests.trainjob import trainjob_manifest

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # a label of DNS, with room for -worker-0-12
_MEMORY = re.compile(r"[1-9][0-9]*[MGT]i")
# What each target takes, and how it is started.
TARGETS: dict[str, tuple[str, Callable[[JobSpec], list[dict[str, Any]]] | None]] = {
    "slurm": ("sbatch FILE", None),
    "tfjob": ("kubectl apply -f FILE, with Kubeflow's training operator", tfjob_manifest),
    "trainjob": ("kubectl apply -f FILE, with Kubeflow's trainer", trainjob_manifest),
    "jobset": ("kubectl apply -f FILE, with the JobSet controller", jobset_manifest),
    "compose": ("docker compose -f FILE up", compose_manifest),
    "ray": ("kubectl apply -f FILE, with KubeRay", None),
}


def add_manifest_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `manifest` to the subcommands of the command line."""
    manifest = add_parser(
        "manifest",
        help="print what Slurm, Kubernetes, Compose or Ray take to run a script",
        usage="tfparallel manifest TARGET [options] [-m] SCRIPT [ARGUMENT ...]",
        description="Print a file for a cluster.",
        epilog="Started by: " + "; ".join(f"{name}: {how}" for name, (how, _) in TARGETS.items()),
        allow_abbrev=False,
    )
    manifest.set_defaults(run=_run, error=manifest.error)
    manifest.add_argument("target", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    _add_options_of_processes(manifest)
    _add_options_of_containers(manifest)
    manifest.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    manifest.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    manifest.add_argument("script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _add_options_of_processes(manifest: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    manifest.add_argument("--workers", default=1, help="how many (default: 1)", **count)
    manifest.add_argument(
        "--ps", help="how many parameter servers; a chief comes with them", **count
    )
    manifest.add_argument("--evaluator", action="store_true", help="one as well; needs --ps")
    manifest.add_argument(
        "--horovod", action="store_true", help="the workers are Horovod's ranks (slurm, compose)"
    )
    manifest.add_argument("--cpus", default=2, help="of each process (default: 2)", **count)
    manifest.add_argument(
        "--gpus", default=0, type=non_negative_int, metavar="N", help="of each worker"
    )
    manifest.add_argument(
        "--memory", default="4Gi", type=_memory, metavar="SIZE", help="of each (default: 4Gi)"
    )
    manifest.add_argument(
        "--max-restarts", default=10, type=non_negative_int, metavar="N", help="(default: 10)"
    )
    manifest.add_argument(
        "--grace-seconds",
        default=120,
        type=positive_int,
        metavar="S",
        help="between SIGTERM and SIGKILL; longer than a step and a backup take (default: 120)",
    )


def _add_options_of_containers(manifest: argparse.ArgumentParser) -> None:
    manifest.add_argument("--name", default="train", type=_name, help="of the job (default: train)")
    manifest.add_argument(
        "--image", help="the container: Python, tfparallel and SCRIPT; all targets but slurm"
    )
    manifest.add_argument(
        "--claim", metavar="NAME", help="a volume that all processes write, at /backups"
    )
    manifest.add_argument(
        "--env",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME=VALUE",
        help="a variable",
    )


def _run(args: argparse.Namespace) -> int:
    _check(args)
    job = JobSpec(
        name=args.name,
        image=args.image or "",
        command=_command(args),
        counts=processes_by_role(args.workers, args.ps or 0, args.evaluator),
        resources=Resources(args.cpus, args.memory, args.gpus),
        claim=args.claim,
        grace_s=args.grace_seconds,
        max_restarts=args.max_restarts,
        env=dict(args.env),
    )
    if args.target == "slurm":
        script = horovod_script(job) if args.horovod else sbatch_script(job, _script(args))
        print(script, end="")
        return 0
    if args.horovod:  # all ranks in one container
        job = _in_one_container(job)
    make = TARGETS[args.target][1]
    documents = make(job) if make else rayjob_manifest(job, _script(args))
    _print_yaml(documents)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Exits with status 2 and a message for what does not go together."""
    if args.target != "slurm" and not args.image:
        args.error(f"{args.target} expects --image, the container. Received: none.")
    if args.target == "slurm" and args.claim:
        args.error("slurm expects no --claim: write backups to a folder that all nodes see.")
    if args.evaluator and not args.ps:
        args.error("--evaluator expects parameter servers. Received: no --ps. Add --ps 1.")
    if args.horovod and args.ps:
        args.error("--horovod expects no --ps: ranks have no servers.")
    if args.horovod and args.target not in ("slurm", "compose"):
        args.error(
            f"--horovod expects slurm or compose. Received: {args.target}, which does not run "
            "horovodrun. MultiWorkerMirroredStrategy needs none, and trains to the same weights."
        )
    if args.target == "ray" and args.is_module:
        args.error("ray expects a file. Received: -m.")


def _script(args: argparse.Namespace) -> list[str]:
    return [*(["-m"] if args.is_module else []), args.script, *args.script_args]


def _command(args: argparse.Namespace) -> list[str]:
    return ["python", *_script(args)]


def _in_one_container(job: JobSpec) -> JobSpec:
    ranks, each = job.counts["worker"], job.resources
    all_of_them = Resources(ranks * each.cpus, each.memory, ranks * each.gpus)
    command = ["horovodrun", "-np", str(ranks), *job.command]
    return JobSpec(
        job.name,
        job.image,
        command,
        {"worker": 1},
        all_of_them,
        job.claim,
        job.grace_s,
        job.max_restarts,
        job.env,
    )


def _print_yaml(documents: list[dict[str, Any]]) -> None:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.representer.ignore_aliases = lambda _: True
    yaml.width = 10_000
    yaml.explicit_start = len(documents) > 1
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump_all(documents, text)
    print(text.getvalue(), end="")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected small letters, digits and -, 40 at the most, as in train-7. Received: "
            f"{text[:80]!r}."
        )
    return text


def _memory(text: str) -> str:
    if not _MEMORY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected 512Mi or 4Gi. Received: {text[:40]!r}.")
    return text


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE. Received: {text[:80]!r}.")
    return name, value
