"""Free ports on this machine, kept free for a job while it runs."""

import contextlib
import socket
from collections.abc import Iterator

# Tells TensorFlow's gRPC server to share a port that another process holds with SO_REUSEPORT.
REUSE_PORT_ENV = {"TF_GRPC_REUSE_PORT": "1"}


@contextlib.contextmanager
def reserved_addresses(count: int) -> Iterator[list[str]]:
    """Yield `count` addresses "127.0.0.1:port" that nobody else is given until exit.

    A port that is found free, released and used later can go to another process in between: to a
    second launcher, or to any outgoing connection. Therefore the ports stay bound for as long as
    the job runs. They do not listen, so they take no connections; the kernel hands them to
    nobody by itself; and a server that sets SO_REUSEPORT, as TensorFlow's does under
    `REUSE_PORT_ENV`, can bind and listen on them. So can other programs of the same user that set
    it and name the port.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # After the bind: with the option set, the kernel may choose a port that is shared.
            holder.bind(("", 0))  # all interfaces, because TensorFlow's server binds all
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ports.append(holder.getsockname()[1])
        yield [f"127.0.0.1:{port}" for port in ports]
