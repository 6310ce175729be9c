"""What goes over networks: a slow link between two hosts of this machine, and bytes counted.

The hosts are network namespaces with a `veth` pair, and half of this machine's CPUs each. They need
root, the tools `ip` and `tc` (Debian: iproute2) and `taskset` (util-linux).
"""

import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfparallel.launch.cpus import share_cpus

_DELAYED_MTU = 9000  # a packet costs `delay_line.py` 20 us, of whatever size


@dataclass(frozen=True)
class Host:
    """One end of the link.

    Attributes:
        name: of the namespace.
        address: its IP address.
        interface: its network interface.
        cpus: those that its processes run on.
    """

    name: str
    address: str
    interface: str
    cpus: tuple[int, ...]

    @property
    def prefix(self) -> list[str]:
        """What runs a command on this host."""
        cpus = ",".join(map(str, self.cpus))
        return ["ip", "netns", "exec", self.name, "taskset", "--cpu-list", cpus]

    def sent_bytes(self) -> int:
        """What has left this host so far, packet headers included."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(_run(*self.prefix, "cat", path))


def missing() -> str | None:
    """What this machine lacks for namespaces, in words, or None."""
    if os.geteuid() != 0:
        return "needs root, for `ip netns`: run it with sudo"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"needs `{tool}`: apt-get install {package}"
    if len(os.sched_getaffinity(0)) < 2:
        return "needs two CPUs, one for each host"
    return None


def sent_by_this_process() -> int:
    """The bytes that this process sent over its TCP connections, each once.

    Of those that are open still: for differences while connections last. What is received need not
    be acknowledged yet: that comes up to 40 ms later. Linux, from 4.19.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, _retrans
                total += sent - again
    return total


@contextlib.contextmanager
def two_hosts(mbit_per_s: int, tcp: str, round_trip_ms: float = 0) -> Iterator[list[Host]]:
    """Two namespaces that reach each other at `mbit_per_s` in each direction; removed on exit.

    Args:
        mbit_per_s: the rate of the link; 0 for no limit.
        tcp: its congestion control, "cubic" or "bbr" for example.
        round_trip_ms: how long the smallest message and its answer are on their way, besides what
            this machine takes; half of it in each direction (`delay_line.py`). Needs a rate.

    Raises:
        ValueError: for a delay without a rate.
        RuntimeError: if a command fails.
    """
    if round_trip_ms and not mbit_per_s:
        raise ValueError("A link with a delay has a rate. Received: 0 Mbit/s.")
    number, interface = os.getpid(), "delayed" if round_trip_ms else "veth"
    hosts = [
        Host(f"tfparallel-{number}-{i}", f"10.77.0.{i + 1}", f"{interface}{i}", tuple(cpus))
        for i, cpus in enumerate(share_cpus(os.sched_getaffinity(0), 2))
    ]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "delete", host.name)
            stack.callback(shutil.rmtree, _write_hosts_file(host))
        if round_trip_ms:
            stack.enter_context(_delay_line(hosts, mbit_per_s, round_trip_ms))
        else:
            ends = [["name", host.interface, "netns", host.name] for host in hosts]
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            for command in (
                f"ip address add {host.address}/24 dev {host.interface}",
                f"ip link set {host.interface} up",
                "ip link set lo up",
            ):
                _run(*host.prefix, *command.split())
            if mbit_per_s and not round_trip_ms:
                set_rate(host, mbit_per_s)
            # Not by sysctl, which containers may not set.
            route = f"ip route replace 10.77.0.0/24 dev {host.interface} congctl {tcp}"
            _run(*host.prefix, *route.split())
        yield hosts


@contextlib.contextmanager
def meshed_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Namespaces with a link between each two of them, as fast as this machine; removed on exit.

    For kernels whose bridges do not forward. A host has one address, whatever the link.

    Raises:
        RuntimeError: if a command fails.
    """
    number = os.getpid()
    cpus = share_cpus(os.sched_getaffinity(0), min(num_hosts, len(os.sched_getaffinity(0))))
    hosts = [
        Host(f"tfparallel-{number}-{i}", f"10.78.0.{i + 1}", "lo", tuple(cpus[i % len(cpus)]))
        for i in range(num_hosts)
    ]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "delete", host.name)
            stack.callback(shutil.rmtree, _write_hosts_file(host))
            _run(*host.prefix, *f"ip address add {host.address}/32 dev lo".split())
            _run(*host.prefix, *["ip", "link", "set", "lo", "up"])
        for i, j in itertools.combinations(range(num_hosts), 2):
            pair = [(hosts[i], hosts[j], f"to{j}"), (hosts[j], hosts[i], f"to{i}")]
            ends = [["name", device, "netns", host.name] for host, _, device in pair]
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for host, _, device in pair:
                _run(*host.prefix, "ip", "link", "set", device, "up")
            for host, other, device in pair:
                route = f"ip route add {other.address}/32 dev {device} src {host.address}"
                _run(*host.prefix, *route.split())
        yield hosts


def set_rate(host: Host, mbit_per_s: int) -> None:
    """Sets what leaves a host of a link without a delay, at the beginning or in the middle."""
    # A burst that the sender's timer can keep up with at 1 Gbit/s.
    limit = f"tbf rate {mbit_per_s}mbit burst {max(256, mbit_per_s)}kbit latency 50ms"
    _run(*host.prefix, *f"tc qdisc replace dev {host.interface} root {limit}".split())


@contextlib.contextmanager
def _delay_line(hosts: list[Host], mbit_per_s: int, round_trip_ms: float) -> Iterator[None]:
    """Runs `delay_line.py` between the hosts, whose devices it makes."""
    device = "delayed%d"  # the kernel counts in each namespace
    names = [host.name for host in hosts]
    arguments = [*names, device, str(mbit_per_s), str(round_trip_ms)]
    program = str(Path(__file__).with_name("delay_line.py"))
    with subprocess.Popen(
        [sys.executable, program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as line:
        try:
            if line.stdout.readline() != b"open\n":
                raise RuntimeError("delay_line.py did not open its devices; its output is above.")
            _run(*hosts[1].prefix, *f"ip link set delayed0 name {hosts[1].interface}".split())
            for host in hosts:
                size = f"ip link set {host.interface} mtu {_DELAYED_MTU} txqueuelen 1000"
                _run(*host.prefix, *size.split())
            yield
        finally:
            line.stdin.close()  # it ends by that


def _write_hosts_file(host: Host) -> Path:
    """`ip netns exec` mounts it: this machine's name is the address of the namespace."""
    folder = Path("/etc/netns") / host.name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
    return folder


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
