"""Pieces that are in the host's memory, or are there while an optimizer updates them.

    Sharding(host=)     weights      slots      an update
    ------------------  -----------  ---------  --------------------------------------------------
    None                device       device     on the device
    "optimizer"         device       host       a gradient goes to the host, the weight there and
                                                back
    "parameters"        host         host       a gradient goes to the host; a weight goes to
                                                devices where it is put together

Source: Ren et al., ZeRO-Offload, https://arxiv.org/abs/2101.06840
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.replicas.device_names import hosts_of
from tfparallel.sharded.part_of_copy import PartOfCopy
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


class StoredInPieces(SplitVariable):
    """As `SplitVariable`; its pieces may be on hosts, always or during an update.

    Args:
        strategy, values, aggregation, var_policy, rows, shards: as `SplitVariable`.
        is_on_host: whether pieces are in the memory of their devices' hosts.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence,
        aggregation: object,
        var_policy: object = None,
        *,
        rows: Rows,
        shards: int = 1,
        is_on_host: bool = False,
    ):
        super().__init__(strategy, values, aggregation, var_policy, rows=rows, shards=shards)
        self.is_on_host = is_on_host
        self._on_hosts: dict[int, tuple[tuple, tuple]] = {}  # by copy, its pieces and theirs there
        self._lent: set[int] = set()  # copies that are updated there just now

    def lend(self) -> None:
        """Begins an update of the caller's copy on hosts: its pieces are there until `put_back`."""
        copy = self._copy() or 0
        pieces = self.parts[copy]
        if copy not in self._on_hosts or self._on_hosts[copy][0] is not pieces:
            hosts = hosts_of(piece.device for piece in pieces)
            there = zip(pieces, hosts, strict=True)
            on_hosts = tuple(PartOfCopy(x, self, tf.identity, x.shape, host) for x, host in there)
            self._on_hosts[copy] = pieces, on_hosts
        for each in self._on_hosts[copy][1]:
            each.take()
        self._lent.add(copy)

    def put_back(self) -> None:
        """Ends it: devices have what hosts have made of the pieces."""
        copy = self._copy() or 0
        self._lent.remove(copy)
        for piece, on_host in zip(*self._on_hosts[copy], strict=True):
            with tf.device(piece.device):
                piece.assign(tf.identity(on_host.read_value()))
            on_host.leave()

    def own_parts(self) -> tuple:
        """What is stored of the caller's copy, or is on hosts meanwhile."""
        copy = self._copy() or 0
        return self._on_hosts[copy][1] if copy in self._lent else super().own_parts()
