"""The network between the hosts of a job, as one host alone sees it: names, ports, TCP."""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfparallel.coordination.cluster import ClusterConfig, ClusterConfigError, read_tf_config
from tfparallel.coordination.probe import ask
from tfparallel.machine.finding import Finding

_TCP = Path("/proc/sys/net/ipv4")
_MOST_TASKS = 64  # that are asked


def check_congestion_control(folder: Path = _TCP) -> Iterator[Finding]:
    """How TCP finds its speed: on a link that loses packets, cubic gives up most of it."""
    try:
        used = (folder / "tcp_congestion_control").read_text().strip()
        known = (folder / "tcp_available_congestion_control").read_text().split()
    except OSError:
        yield Finding("tcp", "ok", "congestion control is not told by this kernel")
        return
    if used == "bbr":
        yield Finding("tcp", "ok", used)
        return
    cure = "for hosts far from one another, or links that lose packets: sysctl -w "
    cure += "net.ipv4.tcp_congestion_control=bbr"
    if "bbr" not in known:
        cure += " after modprobe tcp_bbr"
    yield Finding("tcp", "ok", f"{used}; {cure}")


def check_tf_config(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """`TF_CONFIG`, and each host and port that it names."""
    try:
        config = read_tf_config(environ)
    except ClusterConfigError as error:
        yield Finding("TF_CONFIG", "problem", str(error), "correct TF_CONFIG")
        return
    if config is None:
        yield Finding("TF_CONFIG", "ok", "not set: this process trains alone")
        return
    yield Finding(
        "TF_CONFIG", "ok", f"{config.task_type} {config.task_index}, {config.num_workers} train"
    )
    yield from check_own_port(config)
    yield from check_names(config)


def check_own_port(config: ClusterConfig) -> Iterator[Finding]:
    """Whether this task's own port is free, and its address this host's."""
    if config.address is None:
        return
    host, port = split_address(config.address)
    try:
        with socket.create_server(("", port), reuse_port=_is_shared()):
            yield Finding("port", "ok", f"{port} is free")
    except OSError as error:
        yield Finding(
            "port",
            "problem",
            f"port {port} of {config.address} is in use: {error.strerror}",
            f"ss -ltnp 'sport = :{port}' shows whose it is: end that process, or take another",
        )
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(place)
    except socket.gaierror:
        return  # `check_names` says so
    except OSError:
        yield Finding(
            "address",
            "problem",
            f"{host}, this task's address, is not one of this host",
            "correct TF_CONFIG: its task.index, or the address that stands there",
        )


def check_names(config: ClusterConfig) -> Iterator[Finding]:
    """Whether the other tasks' names are known, and their hosts reached.

    That nothing listens yet is no fault: jobs start when they start.
    """
    others = [a for tasks in config.cluster.values() for a in tasks if a != config.address]
    for address in others[:_MOST_TASKS]:
        host, port = split_address(address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except socket.gaierror as error:
            yield Finding(
                "names",
                "problem",
                f"{host} ({address}) has no address: {error.strerror}",
                "correct the name in TF_CONFIG, /etc/hosts or DNS",
            )
            continue
        yield _reached(address, str(found))


def _reached(address: str, found: str) -> Finding:
    answer = ask(address, timeout_s=2.0)
    if answer == "nothing listens":
        return Finding("reach", "ok", f"{address} ({found}): its host answers, no job listens yet")
    if isinstance(answer, str):
        return Finding(
            "reach",
            "problem",
            f"{address} ({found}): {answer}",
            "is the host up, and does a firewall let this port through?",
        )
    return Finding("reach", "ok", f"{address} ({found}): something listens")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port", an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_shared() -> bool:
    return os.environ.get("TF_GRPC_REUSE_PORT") == "1"
