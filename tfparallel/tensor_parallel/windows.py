"""What a window slides over, as plain numbers: which inputs each device needs for its outputs.

kernel 3, stride 1, "same"      input    . a b c d e f .        . is padding
                                device 0 [ . a b c d ]          outputs a b c, halo d
                                device 1       [ c d e f . ]    outputs d e f, halo c
"""

from dataclasses import dataclass

from tfparallel.tensor_parallel.rows import even_sizes


@dataclass(frozen=True)
class Window:
    """Along one dim.

    Attributes:
        size: of the inputs that one output sees, dilation included.
        stride: between two outputs, in inputs.
        padding: "valid", "same" or "causal".
    """

    size: int
    stride: int
    padding: str

    def outputs(self, count: int) -> int:
        """How many outputs `count` inputs have."""
        if self.padding == "valid":
            return max(0, (count - self.size) // self.stride + 1)
        return -(-count // self.stride)

    def before(self, count: int) -> int:
        """Padding before the first of `count` inputs."""
        if self.padding == "valid":
            return 0
        if self.padding == "causal":
            return self.size - 1
        return max(0, (self.outputs(count) - 1) * self.stride + self.size - count) // 2

    def span(self, count: int, first: int, last: int) -> "Span":
        """What the outputs `first` to `last`, which counts, see of `count` inputs."""
        start = first * self.stride - self.before(count)
        end = last * self.stride - self.before(count) + self.size
        within = min(max(start, 0), count), max(min(end, count), 0)
        begin, stop = within[0], max(within)
        return Span(begin, stop, min(max(0, -start), end - start), max(0, end - max(stop, start)))


@dataclass(frozen=True)
class Span:
    """Consecutive inputs, with the padding around them.

    Attributes:
        start, end: the first, and that behind the last; equal where all is padding.
        before, after: padding at both ends.
    """

    start: int
    end: int
    before: int
    after: int


def spans(window: Window, count: int, parts: int) -> list[Span]:
    """What each of `parts` devices needs of `count` inputs, for outputs shared out evenly.

    Raises:
        ValueError: for fewer outputs than devices.
    """
    result, first = [], 0
    for size in even_sizes(window.outputs(count), parts):
        result.append(window.span(count, first, first + size - 1))
        first += size
    return result
