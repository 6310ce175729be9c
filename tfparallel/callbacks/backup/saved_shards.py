"""What workers have saved in shards, read by others: each takes its own range, file by file.

saved by 2       | a b c d e f | g h i j k |      shards-0, shards-1
restored by 3    | a b c d | e f g h | i j k |

Nobody has more at a time than its own and the file of one worker.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfparallel.callbacks.backup.part import read_part
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage
from tfparallel.callbacks.backup.tensor_file import dtype_of


def read_shards(
    storage: Storage,
    number: int,
    model: Mapping[str, Any],
    range_of: Callable[[int, int], tuple[int, int]],
) -> dict[int, np.ndarray]:
    """Of each variable that backup `number` has in shards, by position, a range of it, flat.

    Args:
        storage: the folder.
        number: of the backup.
        model: of its shared part, checked.
        range_of: where that begins and ends, by a variable's position and size.

    Raises:
        InvalidBackupError: naming what is missing, damaged, or nothing that we write.
    """
    cut = {int(position): each for position, each in model.get("cut", {}).items()}
    pieces: dict[int, list[np.ndarray]] = {position: [] for position in cut}
    wanted = {position: range_of(position, each["bounds"][-1]) for position, each in cut.items()}
    num_files = max((len(each["bounds"]) - 1 for each in cut.values()), default=0)
    for rank in range(num_files):
        ranges = {
            k: _overlap(each["bounds"][rank : rank + 2], wanted[k]) for k, each in cut.items()
        }
        if any(begin < end for begin, end in ranges.values()):
            saved = _saved_by(storage, number, rank, cut)
            for k, (begin, end) in ranges.items():
                first = cut[k]["bounds"][rank]
                pieces[k].append(saved[k][begin - first : end - first].copy())
    return {
        k: np.concatenate(own) if own else np.empty(0, dtype_of(cut[k]["dtype"]))
        for k, own in pieces.items()
    }


def shapes_of(model: Mapping[str, Any]) -> list[tuple[Sequence[int], str]]:
    """Shape and dtype of each variable of the shared part."""
    cut = model.get("cut", {})
    return [
        (array.shape, array.dtype.name)
        if array is not None
        else (cut[str(k)]["shape"], cut[str(k)]["dtype"])
        for k, array in enumerate(model["arrays"])
    ]


def _overlap(saved: list[int], wanted: tuple[int, int]) -> tuple[int, int]:
    begin = min(max(saved[0], wanted[0]), saved[1])
    return begin, max(begin, min(saved[1], wanted[1]))


def _saved_by(storage: Storage, number: int, rank: int, cut: Mapping) -> dict[int, np.ndarray]:
    """What a worker saved, each array of the length and dtype that the shared part says."""
    arrays = read_part(storage, number, f"shards-{rank}")["numbers"]
    saved = {}
    for position, each in cut.items():
        array = arrays.get(str(position))
        length = each["bounds"][rank + 1] - each["bounds"][rank]
        described = array is not None and (array.shape, array.dtype.name)
        if described != ((length,), each["dtype"]):
            raise InvalidBackupError(
                f"shards-{rank} in {storage.path(number)} cannot be restored: variable {position} "
                f"has {length} numbers of {each['dtype']} in it. Received: {described or 'none'}."
            )
        saved[position] = array
    return saved
