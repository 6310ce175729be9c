"""Tensor parallelism: layers are computed in parts, by the devices of a group.

A user's own layers get a rule by `layer_rule`, attention layers by `attention_by_heads`; see
docs/strategies/tensor_parallel.md.
"""

from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.layer_rules import layer_rule
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.rules.declared_attention import HeadsOf, attention_by_heads

__all__ = ["Group", "HeadsOf", "Rows", "attention_by_heads", "layer_rule"]
