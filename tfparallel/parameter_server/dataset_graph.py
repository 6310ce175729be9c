"""A dataset's graph, from which other processes read the same batches as this one.

Not every dataset has one: where the order is not fixed by seeds, or Python takes part, two workers
would read different batches by one number.

Note: what an epoch leaves behind
---------------------------------
`shuffle` draws a seed from a generator of the dataset's each time that one of its iterators begins.
Mostly that is once an epoch, when the epoch's iterator is made, and who wants to read epoch 7 makes
seven iterators and leaves six unread. But `shuffle(...).repeat(2)` begins two an epoch, the second
in the middle, and `shuffle(...).cache()` one in all: there, epochs before have to be read.
"""

import re
from dataclasses import dataclass

import tensorflow as tf

from tfparallel.internals import dataset_as_graph

_LARGEST_BYTES = 1 << 30  # a gRPC message ends at 2 GiB; arrays in a dataset are in its graph
# In the names of datasets that draw. None is within a function: functions have no state.
_DRAWS = ("Shuffle", "Random", "Sampl")
# Datasets that begin one iterator of their input, when their own begins.
_BEGIN_INPUT_ONCE = re.compile(
    "(AssertCardinality|Batch|Filter|Finalize|FixedLengthRecord|FlatMap|Interleave|Map|MapAndBatch"
    "|Model|Options|PaddedBatch|ParallelBatch|ParallelInterleave|ParallelMap|Prefetch|Range|Rebatch"
    "|Shard|Shuffle|Skip|SparseTensorSlice|TFRecord|Take|Tensor|TensorSlice|TextLine|Unbatch|Window"
    r"|Zip)Dataset(V\d)?"
)


@dataclass(frozen=True)
class DatasetGraph:
    """What a worker rebuilds a dataset from.

    Attributes:
        serialized: scalar string; every dataset built from it begins with its first epoch.
        num_batches: of an epoch; below zero where it never ends.
        is_left_unread: an epoch that is to be passed over need not be read, see the note above.
    """

    serialized: tf.Tensor
    num_batches: int
    is_left_unread: bool

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> "DatasetGraph | None":
        """The graph of a dataset of batches, or None where workers could not use it."""
        known_specs = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
        specs = tf.nest.flatten(dataset.element_spec)
        num_batches = int(dataset.cardinality())
        may_reorder = dataset.options().deterministic is False
        if may_reorder or num_batches == tf.data.UNKNOWN_CARDINALITY:
            return None
        if not all(isinstance(spec, known_specs) for spec in specs):
            return None
        graph = dataset_as_graph(dataset, _LARGEST_BYTES)
        if graph is None or not _is_order_fixed(graph):
            return None
        _disown_resources(graph)
        serialized = tf.constant(graph.SerializeToString())
        return cls(serialized, num_batches, _is_left_unread(graph))


def _is_order_fixed(graph: tf.compat.v1.GraphDef) -> bool:
    """Whether every shuffle has a seed: without one, both of its seeds are zero."""
    zeros = {
        node.name
        for node in _constants(graph, tf.int64)
        if not tf.make_ndarray(node.attr["value"].tensor).any()
    }
    in_functions = (node for function in graph.library.function for node in function.node_def)
    for node in (*graph.node, *in_functions):
        seeds = {"ShuffleDatasetV3": node.input[2:4], "ShuffleDatasetV2": node.input[2:3]}
        unseeded = seeds.get(node.op)
        if unseeded and all(name.split(":")[0] in zeros for name in unseeded):
            return False
        # Asked for first: an attribute that is not there appears when it is read.
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            return False
    return True


def _disown_resources(graph: object) -> None:
    """Lets each dataset built from the graph have seed generators and caches of its own.

    It would share those of the dataset here, where it finds them, and makes its own where not.
    """
    for node in _constants(graph, tf.resource):
        for handle in node.attr["value"].tensor.resource_handle_val:
            handle.name = "of_nobody"


def _is_left_unread(graph: tf.compat.v1.GraphDef) -> bool:
    datasets = [node.op for node in graph.node if "Dataset" in node.op]
    draws = any(word in name for name in datasets for word in _DRAWS)
    return not draws or all(_BEGIN_INPUT_ONCE.fullmatch(name) for name in datasets)


def _constants(graph: tf.compat.v1.GraphDef, dtype: tf.DType) -> list:
    nodes = [node for node in graph.node if node.op == "Const"]
    return [node for node in nodes if node.attr["dtype"].type == dtype.as_datatype_enum]
