"""What an operation of a step's graph is for, by its type and its place in the graph's names."""

import re
from collections.abc import Collection

from tfparallel.communication.link_journal import COLLECTIVE

REDUCE_SCOPE = "all_reduce"  # around what joins the gradients of replicas and workers
_NUMBER = re.compile(r"_\d+$")
_JOINING = ("Collective", "Horovod", "Nccl")
_UPDATING = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")


def kind_of_operation(name: str, operation: str, optimizers: Collection[str]) -> str:
    """ "send", "receive", "reduce", "update" or "compute".

    Args:
        name: of the node, with the scopes it is in.
        operation: its type.
        optimizers: names of the model's optimizers, which name the scope of their updates.
    """
    if operation in ("_Send", "_HostSend"):
        return "send"
    if operation in ("_Recv", "_HostRecv"):
        return "receive"
    scopes = {_NUMBER.sub("", part) for part in name.split("/")}
    if operation.startswith(_JOINING) or scopes & {REDUCE_SCOPE, COLLECTIVE}:
        return "reduce"
    if operation.startswith(_UPDATING) or scopes & {_NUMBER.sub("", each) for each in optimizers}:
        return "update"
    return "compute"
