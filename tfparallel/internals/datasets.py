"""What a `tf.data.Dataset` keeps to itself, and the arrays behind one of Keras's."""

import functools
import queue
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# The arrays behind a dataset that Keras made of them, for workers that keep arrays.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# How many rows a `.batch` further up in a pipeline makes; a pipeline on another host.
from tensorflow.python.data.experimental.ops.distribute import compute_batch_size, replicate

# The classes of datasets that keep, interleave, repeat and shuffle: what a resumed training must
# read again.
from tensorflow.python.data.ops.cache_op import CacheDataset

# Whether a dataset is read ahead of the steps anyway.
from tensorflow.python.data.ops.dataset_ops import _OptionsDataset
from tensorflow.python.data.ops.interleave_op import _ParallelInterleaveDataset
from tensorflow.python.data.ops.prefetch_op import _PrefetchDataset
from tensorflow.python.data.ops.repeat_op import _RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset

# Several tensors that a function takes as one argument, traced for what that says of itself.
from tensorflow.python.framework.composite_tensor import CompositeTensor

__all__ = [
    "ArrayDataAdapter",
    "Arrays",
    "CompositeTensor",
    "arrays_of",
    "batch_rows_of",
    "copy_on",
    "dataset_as_graph",
    "ends_in_a_prefetch",
    "fills_a_cache",
    "flat_output",
    "iterator_over",
    "let_go_beside",
    "num_shuffles",
    "repeats_a_shuffle",
    "set_state_of_iterator",
    "slowest_stage",
    "state_of_iterator",
    "unrepeatable_functions",
    "unrepeatable_parts",
]

_STATE = "_STATE"  # the key of an iterator's state in a checkpoint
_A_MOMENT_S = 0.05  # until whoever had an iterator last has no part of it any more
# What iterators leave. They may go while garbage is collected, wherever their thread is then: it
# must not wait there for a lock, as whoever starts a thread does.
_left: queue.SimpleQueue[list] = queue.SimpleQueue()


class Arrays(NamedTuple):
    """What `fit` was given, where that is arrays."""

    arrays: Any  # a nest `(x, y, sample_weight)`
    num_rows: int
    batch_size: int
    is_shuffled: Any  # or "batch"


def arrays_of(adapter: ArrayDataAdapter) -> Arrays:
    """What an adapter of Keras makes batches of. It makes them by itself only."""
    own = adapter
    return Arrays(own._inputs, own._num_samples, own._batch_size, own._shuffle)


def batch_rows_of(dataset: tf.data.Dataset) -> int | None:
    """How many rows the batches of a pipeline have, but for a last one; None if it does not tell.

    The public `element_spec` does not say it where the last batch may be smaller.
    """
    rows = int(compute_batch_size(dataset))
    return rows if rows > 0 else None


def copy_on(device: str, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """`dataset`, read on the host of `device`."""
    return replicate(dataset, [device])[device]


def state_of_iterator(iterator: tf.data.Iterator) -> tf.Tensor:
    """Where a `tf.data` iterator is, as `tf.train.Checkpoint` saves it: a tensor of strings."""
    return iterator._serialize_to_tensors()[_STATE]


def set_state_of_iterator(iterator: tf.data.Iterator, state: tf.Tensor) -> None:
    """Lets a `tf.data` iterator go on from a `state_of_iterator`."""
    iterator._restore_from_tensors({_STATE: state})


def flat_output(iterator: tf.data.Iterator) -> tuple[list, list]:
    """Types and shapes of the tensors that a `tf.data` iterator's operation gives, in order."""
    return iterator._flat_output_types, iterator._flat_output_shapes


def let_go_beside(iterator: object) -> None:
    """Has another thread let go of what a `tf.data` iterator has, when nobody has it any more.

    Whoever does waits for tf.data's thread that tunes it. That thread is woken, and then asks
    whether it is to end, which may be said just after it has asked. Then it sleeps on: about as
    long as the iterator has been there, up to a minute (`Model::OptimizeLoop` in `model.cc`,
    `CancellationManager` in `cancellation.cc` of TensorFlow).
    """
    if isinstance(iterator, tf.data.Iterator):
        _start_letting_go()
        weakref.finalize(iterator, _leave, [iterator._iterator_resource]).atexit = False


def _leave(resource: list) -> None:
    if threading.main_thread().is_alive():  # nobody would wait for a thread that begins later
        _left.put(resource)


@functools.cache
def _start_letting_go() -> None:
    threading.Thread(target=_let_go, name="tfparallel-iterators", daemon=True).start()


def _let_go() -> None:
    """Has a thread for each, as one may wait for a minute.

    Python waits for these before it ends: one that came back from TensorFlow later would be ended
    in the middle of it, and the process with it.
    """
    while True:
        letting_go = threading.Timer(_A_MOMENT_S, _left.get().clear)
        letting_go.daemon = False  # as the thread that starts it is
        letting_go.start()


def iterator_over(
    iterator: tf.data.Iterator, function: tf.types.experimental.ConcreteFunction, length: int
) -> tf.data.Iterator:
    """An iterator, of the same elements' structure, that calls `function` for each of them.

    Args:
        iterator: of `tf.data`.
        function: a concrete one of a number and the resource of `iterator`, in the graph; it ends
            where it raises OutOfRange, which the public `Dataset.map` takes for an error.
        length: how often it is called at most.
    """
    types, shapes = flat_output(iterator)
    variant = tf.raw_ops.MapDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.range(length)),
        other_arguments=[iterator._iterator_resource, *function.captured_inputs],
        f=function,
        output_types=types,
        output_shapes=shapes,
        preserve_cardinality=False,
        use_inter_op_parallelism=False,  # 100 us for other threads, each time
    )
    options = tf.data.Options()  # none puts a prefetch behind `function`
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    dataset = tf.data.experimental.from_variant(variant, iterator.element_spec)
    return iter(dataset.with_options(options))


_KINDS = (  # of tf.data's nodes, by the beginning of a name
    ("ParallelMap", "parallel map"),
    ("MapAndBatch", "parallel map"),
    ("Map", "map"),
    ("Generator", "generator"),
    ("FlatMap", "generator"),
    ("TFRecord", "files"),
    ("TextLine", "files"),
    ("FixedLength", "files"),
    ("Interleave", "files"),
    ("ParallelInterleave", "files"),
    ("Shuffle", "shuffle"),
    ("Batch", "batch"),
    ("PaddedBatch", "batch"),
    ("ParallelBatch", "batch"),
    ("Filter", "filter"),
    ("Cache", "cache"),
    ("Prefetch", "prefetch"),
)


def slowest_stage(iterator: tf.data.Iterator) -> dict[str, object]:
    """The stage of a pipeline that has computed longest, by tf.data's own model of it.

    Returns:
        `kind`, a word such as "map"; `name`, that of tf.data; `ms`, an element. {} where tf.data
        tells nothing: at the end of the data, its stages are gone.
    """
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except tf.errors.OpError:  # a pipeline without a model
        return {}
    nodes = [node for node in model.nodes.values() if node.num_elements and node.name != "Root"]
    if not nodes:
        return {}
    slowest = max(nodes, key=lambda node: node.processing_time)
    kind = next((kind for start, kind in _KINDS if slowest.name.startswith(start)), "tf.data")
    each_ms = slowest.processing_time / slowest.num_elements / 1e6
    return {"kind": kind, "name": slowest.name, "ms": each_ms}


def dataset_as_graph(dataset: tf.data.Dataset, largest_bytes: int) -> tf.compat.v1.GraphDef | None:
    """A dataset's graph, or None where it holds Python or unseeded randomness, or is too large.

    TensorFlow offers this for its own distribution of datasets only.
    """
    policy = tf.data.experimental.ExternalStatePolicy.FAIL
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    except tf.errors.OpError:  # a generator, `py_function`, random operations, lookup tables
        return None
    return tf.compat.v1.GraphDef.FromString(serialized) if len(serialized) < largest_bytes else None


def unrepeatable_parts(dataset: object) -> list[str]:
    """What of a `tf.data.Dataset` gives another order in each process; nothing of what is no such.

    Datasets keep what they were made with to themselves.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return []
    names = [name for each in dataset._inputs() for name in unrepeatable_parts(each)]
    if not any(int(vars(dataset).get(seed, 1)) for seed in ("_seed", "_seed2")):
        names.append("shuffle without a seed")
    if _may_change_its_order(dataset) or dataset.options().deterministic is False:
        names.append("deterministic=False")
    return list(dict.fromkeys(names))


def _may_change_its_order(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset, not those before it, was made with `deterministic=False`.

    An interleave says so in its graph only, which holds the arrays before it: behind very large
    ones it is taken for one in order.
    """
    if not isinstance(dataset, _ParallelInterleaveDataset):
        return vars(dataset).get("_deterministic") == "false"
    if dataset not in _orders:
        if _bytes_in_graph(dataset) > _LARGEST_GRAPH_BYTES:
            return False
        policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        serialized = dataset._as_serialized_graph(external_state_policy=policy).numpy()
        nodes = tf.compat.v1.GraphDef.FromString(serialized).node
        own = [node for node in nodes if node.op.startswith("ParallelInterleaveDataset")][-1]
        _orders[dataset] = own.attr["deterministic"].s == b"false"
    return _orders[dataset]


def _bytes_in_graph(dataset: tf.data.Dataset) -> int:
    """How large what a dataset holds in memory is, with those before it."""
    captured = [x for each in dataset._functions() for x in each.function.captured_inputs]
    arrays = [*vars(dataset).get("_tensors", ()), *captured]
    sizes = [np.prod(each.shape, dtype=np.int64) * each.dtype.size for each in arrays]
    return int(sum(sizes)) + sum(map(_bytes_in_graph, dataset._inputs()))


_LARGEST_GRAPH_BYTES = 100_000_000
_orders: weakref.WeakKeyDictionary[tf.data.Dataset, bool] = weakref.WeakKeyDictionary()


_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}
_SEEDS = ("seed", "seed2")  # 0 and 0 is none, of all operations that have them


def unrepeatable_functions(dataset: object) -> list[str]:
    """What functions of a `tf.data.Dataset` may do otherwise each time that it is read.

    That is Python, generators too, and what is drawn or shuffled in them without a seed. Datasets
    keep their functions to themselves.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return []
    names = [name for each in dataset._inputs() for name in unrepeatable_functions(each)]
    for wrapper in dataset._functions():
        names += _unrepeatable_operations(wrapper.function.graph)
    return list(dict.fromkeys(names))


def _unrepeatable_operations(graph: tf.Graph) -> list[str]:
    names = []
    for operation in graph.get_operations():
        if operation.type in _PYTHON:
            names.append("a generator or another function of Python")
        elif _seeds_of(operation) == [0, 0]:
            names.append(f"{operation.type} without a seed")
        elif operation.node_def.attr["deterministic"].s == b"false":
            names.append("deterministic=False")
    for called in graph._functions.values():
        names += _unrepeatable_operations(called.graph)
    return names


def _seeds_of(operation: tf.Operation) -> list[int | None]:
    """Of a random operation or a dataset that shuffles; None where they are known when it runs."""
    definition = operation.op_def
    attributes = {each.name for each in definition.attr}
    inputs = {each.name: i for i, each in enumerate(definition.input_arg)}
    if attributes.issuperset(_SEEDS):
        return [operation.get_attr(name) for name in _SEEDS]
    if inputs.keys() >= set(_SEEDS) and len(inputs) == len(operation.inputs):
        return [tf.get_static_value(operation.inputs[inputs[name]]) for name in _SEEDS]
    return []


def fills_a_cache(dataset: object) -> bool:
    """Whether a `tf.data.Dataset` reads its input in the first pass only."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return isinstance(dataset, CacheDataset) or any(map(fills_a_cache, dataset._inputs()))


def ends_in_a_prefetch(dataset: object) -> bool:
    """Whether the batches of a `tf.data.Dataset` are made before they are asked for."""
    while isinstance(dataset, _OptionsDataset):
        (dataset,) = dataset._inputs()
    return isinstance(dataset, _PrefetchDataset)


def num_shuffles(dataset: object) -> int:
    """How many shuffles a `tf.data.Dataset` goes through; those in functions of it do not count."""
    if not isinstance(dataset, tf.data.Dataset):
        return 0
    return isinstance(dataset, _ShuffleDataset) + sum(map(num_shuffles, dataset._inputs()))


def repeats_a_shuffle(dataset: object) -> bool:
    """Whether a `tf.data.Dataset` shuffles several times in a pass."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    if isinstance(dataset, _RepeatDataset) and num_shuffles(dataset):
        return True
    return any(map(repeats_a_shuffle, dataset._inputs()))
