"""How one dim of a tensor is divided over the devices of a group: plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """A tensor in parts along `dim`; part i holds `sizes[i]` indices of it.

    They are consecutive, unless the dim is several blocks of one size, such as the gates of an
    LSTM: then each part holds the same consecutive indices of each block.

    Attributes:
        dim: of the tensor, from 0.
        sizes: of the parts along it, each at least 1, and a multiple of `blocks`.
        blocks: that lie one behind the other along `dim`.
        first: the number of the device of a group that has part 0; the others follow.
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: int = 1
    first: int = field(default=0, compare=False)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first index of each part."""
        return tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def is_cut(self) -> bool:
        """Whether there are several parts, and not one that is on a device of its own."""
        return len(self.sizes) > 1

    def cut(self, count: int) -> "Rows":
        """Each part in `count` of its own, as equal as can be."""
        n = self.blocks
        sizes = tuple(n * x for size in self.sizes for x in even_sizes(size // n, count))
        return Rows(self.dim, sizes, n, self.first)

    def whole_shape(self, part_shape: Sequence) -> list:
        """The shape of the whole of which a part has `part_shape`."""
        return [*part_shape[: self.dim], sum(self.sizes), *part_shape[self.dim + 1 :]]


def even_rows(dim: int, total: int, count: int, blocks: int = 1) -> Rows:
    """`total` indices of `dim` in `count` parts, as equal as can be.

    Raises:
        ValueError: where a part would be empty.
    """
    sizes = tuple(blocks * size for size in even_sizes(total // blocks, count))
    return Rows(dim, sizes, blocks)


def even_sizes(total: int, count: int) -> tuple[int, ...]:
    """`total` as `count` sizes as equal as can be: `even_sizes(7, 3)` is (3, 2, 2).

    Raises:
        ValueError: where a part would be empty.
    """
    if not 0 < count <= total:
        raise ValueError(f"Expected at least one index for each part. Received: {total}, {count}.")
    small, larger = divmod(total, count)
    return (small + 1,) * larger + (small,) * (count - larger)
