"""What is remembered of a tensor, as attributes of it, and must be so of a copy."""

from tfparallel.internals import get_keras_mask, set_keras_mask

PARTS = "_tfparallel_parts"  # of one that was put together of parts: how, and the parts


def carry_notes(tensor: object, copy: object) -> None:
    """Has `copy` know what `tensor` knows: its mask, and the parts that it was made of."""
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(copy, mask)
    if hasattr(tensor, PARTS):
        setattr(copy, PARTS, getattr(tensor, PARTS))
