"""How one dim of a tensor is divided over the devices of a group: plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """A tensor in parts along `dim`; part i holds `sizes[i]` consecutive indices of it.

    Attributes:
        dim: of the tensor, from 0.
        sizes: of the parts along it, each at least 1.
    """

    dim: int
    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first index of each part."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    def cut(self, count: int) -> "Rows":
        """Each part in `count` of its own, as equal as can be."""
        return Rows(self.dim, tuple(x for size in self.sizes for x in even_sizes(size, count)))

    def whole_shape(self, part_shape: Sequence) -> list:
        """The shape of the whole of which a part has `part_shape`."""
        return [*part_shape[: self.dim], sum(self.sizes), *part_shape[self.dim + 1 :]]


def even_sizes(total: int, count: int) -> tuple[int, ...]:
    """`total` as `count` sizes as equal as can be: `even_sizes(7, 3)` is (3, 2, 2).

    Raises:
        ValueError: where a part would be empty.
    """
    if not 0 < count <= total:
        raise ValueError(f"Expected at least one index for each part. Received: {total}, {count}.")
    small, larger = divmod(total, count)
    return (small + 1,) * larger + (small,) * (count - larger)
