"""Addresses that other machines can reach need the user's word for it.

TensorFlow's gRPC servers listen on all interfaces, whatever address they are given, and ask nobody
who they are: whoever reaches the port runs operations in the process, `ReadFile` and `WriteFile`
among them.
"""

import ipaddress
import os
import warnings
from collections.abc import Mapping, Sequence

INSECURE_NETWORK_VARIABLE = "TFPARALLEL_INSECURE_NETWORK"

_DANGER = (
    "TensorFlow's servers listen on all interfaces, without any authentication: whoever can reach "
    "them reads and writes files as this user. Put a firewall, a network namespace or a private "
    "network around all tasks"
)


def check_network(
    cluster: Mapping[str, Sequence[str]],
    insecure_network: bool,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Refuses addresses beyond loopback, or warns where the user has allowed them.

    Args:
        cluster: "host:port" of the tasks of each type.
        insecure_network: the user says that strangers cannot reach this network.
        environ: where `TFPARALLEL_INSECURE_NETWORK=1` says the same.

    Raises:
        ValueError: naming the first such address.
    """
    exposed = [
        address
        for addresses in cluster.values()
        for address in addresses
        if not is_loopback(address)
    ]
    if not exposed:
        return
    if insecure_network or environ.get(INSECURE_NETWORK_VARIABLE) == "1":
        warnings.warn(
            f"This cluster uses addresses that other machines can reach ({exposed[0]}). {_DANGER}.",
            stacklevel=3,
        )
        return
    raise ValueError(
        f"Expected loopback addresses (127.0.0.1:PORT). Received: {exposed[0]!r}. {_DANGER}, then "
        f"pass insecure_network=True or set {INSECURE_NETWORK_VARIABLE}=1."
    )


def is_loopback(address: str) -> bool:
    """Whether "host:port" names this machine only; no name but localhost is looked up."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
