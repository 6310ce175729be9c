"""The launchers of several hosts, started from one of them over ssh."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from tfparallel.coordination.proof import SECRET_VARIABLE
from tfparallel.launch.nodes import Place
from tfparallel.launch.processes import WorkerCommand

# Variables that a job is told things by; ssh itself passes none of them.
_PASSED = ("TF_", "KERAS_", "XLA_", "NCCL_", "CUDA_", "TFPARALLEL_")
_NOT_PASSED = (
    "TFPARALLEL_JOB",  # marks processes of this machine
    SECRET_VARIABLE,  # everybody on a host can read command lines: ssh sends it
)
_PASSED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "VIRTUAL_ENV")


_REFUSED = (
    f"Expected sshd to take {SECRET_VARIABLE}, which this job is started with. Received: none. Add "
    f"'AcceptEnv {SECRET_VARIABLE}' to its configuration on every host, or unset the variable."
)
_REQUIRES_SECRET = (
    f'[ -n "${SECRET_VARIABLE}" ] || {{ echo {shlex.quote(_REFUSED)} >&2; exit 2; }}; '
)


def command_on(
    host: str, place: Place, arguments: Sequence[str], environ: Mapping[str, str], port: int | None
) -> WorkerCommand:
    """A launcher on another host, in the same folder, with the same Python.

    It has a terminal there (`-tt`), so that it is told, and ends its workers, when ssh ends.

    Args:
        host: as ssh takes it.
        place: of that launcher.
        arguments: of `launch`, without those about hosts.
        environ: of this process.
        port: where ssh listens there; None leaves it to ssh's own configuration.
    """
    meeting = f"[{place.host}]" if ":" in place.host else place.host
    about_nodes = (
        *("--nnodes", str(place.num_nodes), "--node-rank", str(place.rank)),
        *("--rendezvous", f"{meeting}:{place.port}"),
    )
    told = [f"{k}={v}" for k, v in environ.items() if _is_passed(k)]
    has_secret = bool(environ.get(SECRET_VARIABLE))
    launch = [sys.executable, "-m", "tfparallel", "launch", *about_nodes, *arguments]
    line = (  # without the terminal's carriage returns
        f"stty -opost 2>/dev/null; {_REQUIRES_SECRET if has_secret else ''}"
        f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*told, *launch])}"
    )
    options = ["-tt", "-o", "BatchMode=yes", *(["-p", str(port)] if port else [])]
    if has_secret:
        options += ["-o", f"SendEnv={SECRET_VARIABLE}"]
    return WorkerCommand(host, ("ssh", *options, host, line), dict(environ))


def _is_passed(name: str) -> bool:
    return name in _PASSED_NAMES or (name.startswith(_PASSED) and name not in _NOT_PASSED)
