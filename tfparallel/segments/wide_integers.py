"""int32 as int64 where it enters and leaves a function that is called on another device.

A `RemoteCall` on a GPU hands an int32 over in the GPU's memory, while the function that it calls
looks for it in the host's: TensorFlow keeps small integers there. int64 is on the GPU for both.

    caller                     function
    int32 -> int64   ------>   int64 -> int32 -> ...
    int64 -> int32   <------   int32 -> int64
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfparallel.internals.graphs import captures_through


def widened(tensors: Iterable) -> list:
    """The tensors, int32 ones as int64."""
    return [tf.cast(x, tf.int64) if _is_narrow(x) else x for x in tensors]


def narrowed(tensors: Iterable, dtypes: Sequence[tf.DType]) -> list:
    """The tensors in the types that they had before they were widened."""
    pairs = zip(tensors, dtypes, strict=True)
    return [tf.cast(x, tf.int32) if dtype == tf.int32 else x for x, dtype in pairs]


class WideFunction:
    """A function to be traced: what it takes, captures and returns crosses as int64.

    Args:
        function: of tensors of these `dtypes`, returns a list of tensors.
        dtypes: of its arguments.

    Attributes:
        returned: the types of what `function` itself returned, when it was traced last.
    """

    def __init__(self, function: Callable, dtypes: Sequence[tf.DType]):
        self._function, self._dtypes = function, dtypes
        self.returned: list[tf.DType] = []

    def __call__(self, *inputs: tf.Tensor) -> list:
        """What `function` returns, for inputs that are widened, widened."""
        with _captures_wide(tf.compat.v1.get_default_graph()):
            outputs = self._function(*narrowed(inputs, self._dtypes)) or []
            self.returned = [x.dtype for x in outputs]
            return widened(outputs)


@contextlib.contextmanager
def _captures_wide(graph: tf.Graph) -> Iterator[None]:
    """Within it, int32 tensors from outside of `graph` come into it as int64."""
    known: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
    with captures_through(graph, functools.partial(_capture, graph, known)):
        yield


def _capture(
    graph: tf.Graph, known: dict, original: Callable, tensor: tf.Tensor, *args: object, **kw: object
) -> tf.Tensor:
    is_outside = getattr(tensor, "graph", None) is not graph and tf.is_symbolic_tensor(tensor)
    if not is_outside or not _is_narrow(tensor):
        return original(tensor, *args, **kw)
    if id(tensor) not in known:
        around = tensor.graph
        with around.as_default(), tf.control_dependencies(None), tf.device(tensor.device):
            wide = tf.cast(tensor, tf.int64)
        with graph.as_default(), tf.control_dependencies(None):
            known[id(tensor)] = tensor, tf.cast(original(wide, *args, **kw), tf.int32)
    return known[id(tensor)][1]


def _is_narrow(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.int32
