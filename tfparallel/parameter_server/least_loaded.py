"""Which parameter server holds a variable: the one that holds the fewest bytes so far.

Variables arrive one by one, as layers are built. Giving each to the least loaded server keeps the
largest load below the mean plus the largest variable (Graham, 1966, "Bounds for certain
multiprocessing anomalies"), which no placement that is decided online beats by much; round robin by
count puts every kernel on one server and every bias on the other.
"""


class BalancedBytes:
    """Places variables on servers, by size.

    Args:
        num_servers: how many there are.

    Attributes:
        loads: the bytes on each server so far.
    """

    def __init__(self, num_servers: int):
        self.loads = [0] * num_servers

    def place(self, size_bytes: int) -> int:
        """The index of the server that takes the next variable."""
        server = self.loads.index(min(self.loads))
        self.loads[server] += size_bytes
        return server

    def add(self, server: int, size_bytes: int) -> None:
        """Counts a variable whose server is given, such as an optimizer's slot by its weight."""
        self.loads[server] += size_bytes
