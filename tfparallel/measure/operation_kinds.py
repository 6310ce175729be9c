"""What an operation of a step is for, by its type and its place in the graph's names."""

import re
from collections.abc import Collection

from tfparallel.communication.link_journal import COLLECTIVE

REDUCE_SCOPE = "all_reduce"  # around what joins the gradients of replicas and workers
_NUMBER = re.compile(r"_\d+$")
_JOINING = ("Collective", "Horovod", "Nccl")
# Of XLA's instructions; what an `all-gather-done` waits for has started as an `all-gather-start`.
_JOINING_IN_XLA = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "async-collective",
)
_RECEIVING_IN_XLA = ("recv", "host recv", "infeed", "collective-permute-done")
_SENDING_IN_XLA = ("send", "host send", "outfeed", "collective-permute")
_UPDATING = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")


def kind_of_operation(name: str, operation: str, optimizers: Collection[str]) -> str:
    """ "send", "receive", "reduce", "update" or "compute".

    Args:
        name: of the node, with the scopes it is in.
        operation: its type; of an instruction of an XLA program its category.
        optimizers: names of the model's optimizers, which name the scope of their updates.
    """
    if operation in ("_Recv", "_HostRecv") or operation.startswith(_RECEIVING_IN_XLA):
        return "receive"
    if operation in ("_Send", "_HostSend") or operation.startswith(_SENDING_IN_XLA):
        return "send"
    scopes = {_NUMBER.sub("", part) for part in name.split("/")}
    if operation.startswith((*_JOINING, *_JOINING_IN_XLA)) or scopes & {REDUCE_SCOPE, COLLECTIVE}:
        return "reduce"
    if operation.startswith(_UPDATING) or scopes & {_NUMBER.sub("", each) for each in optimizers}:
        return "update"
    return "compute"
