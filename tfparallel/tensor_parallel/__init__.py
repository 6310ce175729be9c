"""Tensor parallelism: layers are computed in parts, by the devices of a group.

A user's own layers get a rule by `layer_rule`; see docs/strategies/tensor_parallel.md.
"""

from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import layer_rule
from tfparallel.tensor_parallel.rows import Rows

__all__ = ["Group", "Rows", "layer_rule"]
