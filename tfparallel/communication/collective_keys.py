"""Keys by which the collectives of different workers find one another.

TensorFlow numbers collectives in the order in which a worker traces them. A worker that traces a
step once more than the others, for a batch of another shape, would be out of step with them for
ever. Ours are numbered by their position in the function that holds them.
"""

import collections
import weakref

from tfparallel.tf_internals import CollectiveKeys, outermost_function_graph

_FIRST_KEY = 1 << 30  # far above the keys that TensorFlow counts up for eager collectives

_positions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class PositionalCollectiveKeys(CollectiveKeys):
    """Instance keys that are the same in every trace of the same step, and so on every worker.

    Steps run one after the other, so that different functions may share keys.
    """

    def get_instance_key(self, group_key: int, device: str) -> int:
        """The key of the next collective of a group on `device`."""
        graph = outermost_function_graph()
        if graph is None:  # eager: every worker runs the same sequence of calls
            return super().get_instance_key(group_key, device)
        counter = _positions.setdefault(graph, collections.Counter())
        counter[group_key, device] += 1
        return _FIRST_KEY + counter[group_key, device]
