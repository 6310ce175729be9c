"""Sharded training (ZeRO, FSDP): what replicas would hold alike, each holds a part of."""
