"""What a mesh made of a model: tables of its axes, and which of these leave a process."""

from dataclasses import dataclass

from tfparallel.pipeline.summary import Summary
from tfparallel.sharded.memory_table import MemoryTable
from tfparallel.tensor_parallel.layout_table import LayoutSummary


@dataclass(frozen=True)
class MeshSummary:
    """Tables of a model on a mesh; `print` it.

    Attributes:
        tables: of its stages, of its weights in parts, of what devices hold where state is in
            parts: those that there are.
        axes: which of the mesh stay inside of a process.
    """

    tables: tuple[Summary | LayoutSummary | MemoryTable, ...]
    axes: str

    def __str__(self) -> str:
        return "\n".join(filter(None, [*map(str, self.tables), self.axes]))
