"""The only file that imports private modules of TensorFlow and Keras, each with its reason.

Supported: TensorFlow 2.20 and 2.21, Keras 3.12 to 3.15. When a new version moves a name, this is
the file to change.
"""

import contextlib
import inspect
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

# Keras keeps the name scopes that are open, with the object that opened each, in its global state.
# It is how a variable under creation finds the layer, metric or optimizer that owns it.
from keras.src.backend.common import global_state

# A layer's mask travels as an attribute of its output, which a `tf.function` in between would lose.
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

# Whether Keras has layers compute with values of its own in the place of their variables.
from keras.src.backend.common.stateless_scope import in_stateless_scope

# Whether Keras computes shapes only.
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

# The class of Keras's variables, to recognise one that is created late.
from keras.src.backend.tensorflow import core as keras_core

# The trainer's module and its data iterator, to recognise calls that come from `Model.fit` & co.
from keras.src.backend.tensorflow import trainer as keras_trainer

# The functions that divide losses by the number of replicas.
from keras.src.losses import loss as keras_loss

# `Mean.update_state` and `Sum.update_state`: the metrics a train step feeds with scalar losses; and
# that of metrics of functions, which may be of a whole batch.
from keras.src.metrics import reduction_metrics

# The class of functional models, whose graph of layers a pipeline cuts into stages.
from keras.src.models.functional import Functional

# The class of every optimizer, also of those that are not `keras.optimizers.Optimizer`.
from keras.src.optimizers.base_optimizer import BaseOptimizer

# The seed generator of `keras.random.normal(shape)`, which Keras keeps for each thread.
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

# The arrays behind a dataset that Keras made of them, for workers that keep arrays.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

# Tells a `tf.data.Dataset` of the user from one that Keras made of arrays, with options of its own.
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# The attributes of a function.
from tensorflow.core.framework import attr_value_pb2

# What a gradient tape would do next, to record calls of a pipeline's stages on it; the gradient of
# one graph built in another; functions of graphs; numbers that make their names unique. A stage's
# passes are functions of ours, as those of `tf.function` are inlined once for every microbatch.
from tensorflow.python import pywrap_tfe

# StrategyExtended implementations we build on: the device bookkeeping, custom loops, `tf.data`
# distribution and replica threads of `tf.distribute` are kept as they are.
from tensorflow.python.data.ops.cache_op import CacheDataset
from tensorflow.python.data.ops.repeat_op import _RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    device_util,
    distribute_lib,
    distribute_utils,
    mirrored_strategy,
    numpy_dataset,
    reduce_util,
    tpu_strategy,
    values,
    values_util,
)

# Peer health checks, the key-value store of a cluster and aborting collectives live in the context.
from tensorflow.python.eager import context, record

# Keeps the errors of one thread's remote calls to itself.
from tensorflow.python.eager.executor import new_executor
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import auto_control_deps_utils, ops

# The graph of a `tf.function` that is being traced.
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import gradients_util, handle_data_util

# A variable that no strategy's scope replicates, to order operations by; and how a variable that a
# function reads is told to the gradient tapes around its call.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, variable_accessed

# How a variable that is in parts is saved as one.
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

MirroredExtended = mirrored_strategy.MirroredExtended
CollectiveAllReduceExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
TPUExtended = tpu_strategy.TPUExtended
CollectiveAllReduce = cross_device_ops.CollectiveAllReduce
ReductionToOneDevice = cross_device_ops.ReductionToOneDevice
DistributedValues = values.DistributedValues
DistributedVariable = values.DistributedVariable
Mirrored = values.Mirrored
MirroredVariable = values.MirroredVariable
SyncOnReadVariable = values.SyncOnReadVariable
PerReplica = values.PerReplica
ReduceOp = reduce_util.ReduceOp
ReplicaContext = distribute_lib.ReplicaContext
Mean, Sum = reduction_metrics.Mean, reduction_metrics.Sum
MeanMetricWrapper = reduction_metrics.MeanMetricWrapper

__all__ = [
    "GLOBAL_SEED_GENERATOR",
    "ArrayDataAdapter",
    "BaseOptimizer",
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "DistributedValues",
    "DistributedVariable",
    "FuncGraph",
    "Functional",
    "Mean",
    "MeanMetricWrapper",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteFunction",
    "ReplicaContext",
    "ResourceVariable",
    "SaveSpec",
    "SaveableObject",
    "Sum",
    "SyncOnReadVariable",
    "TPUExtended",
    "TrainerCall",
    "calling_trainer",
    "changed_variables",
    "context",
    "dataset_as_graph",
    "device_util",
    "distribute_lib",
    "distribute_utils",
    "fills_a_cache",
    "function_of_graph",
    "get_keras_mask",
    "global_seed_generator",
    "global_state",
    "gradients_in_graph",
    "has_one_tape",
    "is_keras_step",
    "is_loss_scaling",
    "layer_of_late_variable",
    "is_predict_step",
    "is_stock_step",
    "is_symbolic_build",
    "in_stateless_scope",
    "in_symbolic_scope",
    "is_called_by_trainer",
    "model_of_predict_step",
    "let_idle_threads_sleep",
    "new_executor",
    "num_shuffles",
    "numpy_dataset",
    "own_eager_seeds",
    "owner_of_new_variable",
    "record",
    "repeats_a_shuffle",
    "run_independently",
    "set_keras_mask",
    "surround_epochs",
    "trainer_that_builds",
    "unique_number",
    "unrepeatable_parts",
    "values_util",
    "variable_accessed",
    "with_body",
]


_SYMBOLIC_BUILD = keras_trainer.TensorFlowTrainer._symbolic_build.__code__
_METHODS_THAT_BUILD = ("fit", "evaluate", "train_on_batch", "test_on_batch")
_DEFERRED_INITIALIZE = keras_core.Variable._deferred_initialize.__code__


def owner_of_new_variable() -> object:
    """The Keras object (layer, metric, optimizer, seed generator) that is creating a variable."""
    stack = global_state.get_global_attribute("name_scope_stack")
    return stack[-1].caller if stack else None


def layer_of_late_variable() -> object:
    """The layer of a variable that Keras creates late; None for any other variable.

    Building a model from its first batch, Keras creates all variables at once, outside of their
    layers, which hold them already:
    `Model._symbolic_build -> ... -> Variable._deferred_initialize -> ... -> the strategy`.
    """
    variable: Any = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SYMBOLIC_BUILD:
        if frame.f_code is _DEFERRED_INITIALIZE:
            variable = frame.f_locals["self"]
        frame = frame.f_back
    if variable is None or frame is None:
        return None
    for layer in frame.f_locals["self"]._flatten_layers():
        own = layer._trainable_variables + layer._non_trainable_variables
        if any(each is variable for each in own):
            return layer
    return None


class TrainerCall(NamedTuple):
    """The call of `Model.fit`, `evaluate` or `predict` that is preparing its data."""

    method: str
    model: keras_trainer.TensorFlowTrainer
    callbacks: object
    is_dataset_of_user: bool  # a `tf.data.Dataset`, with the options its author chose
    num_batches: int | None  # of one epoch: `steps_per_epoch`, or what the data holds
    is_length_known: bool  # of the data itself
    data_adapter: object  # Keras's view of the data
    epoch_iterator: object  # what the call iterates over, made right now


def calling_trainer() -> TrainerCall | None:
    """The call of a Keras trainer that hands its dataset to the strategy, if that is the caller.

    Keras hands over the dataset but not the model. The model's checks and the callbacks' files need
    it before the first step, so it is read from the stack, which is always
    `fit -> TFEpochIterator.__init__ -> strategy.experimental_distribute_dataset -> here`.
    """
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_code is not keras_trainer.TFEpochIterator.__init__.__code__:
        return None
    iterator = frame.f_locals["self"]
    while (frame := frame.f_back) is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, keras_trainer.TensorFlowTrainer):
            return TrainerCall(
                frame.f_code.co_name,
                model,
                frame.f_locals.get("callbacks"),
                isinstance(iterator.data_adapter, TFDatasetAdapter),
                iterator.num_batches,
                iterator.data_adapter.num_batches is not None,
                iterator.data_adapter,
                iterator,
            )
    return None


def surround_epochs(call: TrainerCall, make_context: Callable) -> None:
    """Lets every epoch of a call run within a context of its own."""
    iterator: Any = call.epoch_iterator
    original = type(iterator).catch_stop_iteration  # Keras enters it around the steps of an epoch
    known = weakref.ref(iterator)  # it shall go, with its data, when the call is over

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        with make_context(), original(known()):
            yield

    iterator.catch_stop_iteration = catch_stop_iteration


def is_predict_step(fn: Callable) -> bool:
    """Whether `fn` is the function that `Model.predict` passes to `Strategy.run`."""
    wrapped = inspect.unwrap(fn)
    name = getattr(wrapped, "__qualname__", "")
    return name.startswith("TensorFlowTrainer.make_predict_function")


def model_of_predict_step(fn: Callable) -> keras_trainer.TensorFlowTrainer:
    """The model whose `predict` made `fn`, which `is_predict_step`."""
    return inspect.getclosurevars(inspect.unwrap(fn)).nonlocals["self"]


def is_keras_step(fn: Callable) -> bool:
    """Whether `fn` is the bound `train_step` or `test_step` of a Keras model."""
    if getattr(fn, "__name__", "") not in ("train_step", "test_step"):
        return False
    return isinstance(getattr(fn, "__self__", None), keras_trainer.TensorFlowTrainer)


def is_stock_step(fn: Any) -> bool:
    """Whether `fn`, a bound step of a Keras model, is Keras's own.

    Such a step takes a batch `(x, y, sample_weight)`; to train, it calls `optimizer.scale_loss`.
    """
    return fn.__func__ is getattr(keras_trainer.TensorFlowTrainer, fn.__name__)


def is_symbolic_build(frame: FrameType | None) -> bool:
    """Whether `frame` is Keras building a model from the shapes of its first batch."""
    build = keras_trainer.TensorFlowTrainer._maybe_symbolic_build
    return frame is not None and frame.f_code is build.__code__


def trainer_that_builds(frame: FrameType | None) -> tuple[Any, str] | None:
    """The model that enters its strategy's scope to be built, and the method that was called.

    `frame` is that of the caller of `scope`: `fit -> ... -> _maybe_symbolic_build -> scope`.
    """
    while frame is not None and frame.f_code.co_name == "scope":  # of a class that extends it
        frame = frame.f_back
    if not is_symbolic_build(frame):
        return None
    model = frame.f_locals["self"]  # type: ignore[union-attr]
    while frame is not None and frame.f_code.co_name not in _METHODS_THAT_BUILD:
        frame = frame.f_back
    return None if frame is None else (model, frame.f_code.co_name)


def is_loss_scaling(frame: FrameType | None) -> bool:
    """Whether `frame` is Keras dividing a loss by the number of replicas, or undoing that."""
    scaling = (keras_loss.scale_loss_for_distribution, keras_loss.unscale_loss_for_distribution)
    return frame is not None and frame.f_code in {each.__code__ for each in scaling}


def is_called_by_trainer(frame: FrameType | None) -> bool:
    """Whether `frame` is code of Keras's trainer."""
    return frame is not None and frame.f_globals is vars(keras_trainer)


def with_body(function: Any, body: Callable) -> Any:
    """`function`, a `tf.function`, with all its options, around the Python function `body`."""
    return function._clone(python_function=body)


def run_independently(graph: FuncGraph, operations: Iterable) -> None:
    """Lets stateful `operations` of a function under construction run in any order.

    TensorFlow would make operations without a resource follow one another as they were traced. Who
    builds a function's control dependencies is known only to the frame that traces it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        manager = frame.f_locals.get("deps_control_manager")
        if frame.f_locals.get("func_graph") is graph and manager is not None:
            for operation in operations:
                manager.run_independently(operation)
            return
        frame = frame.f_back


def changed_variables(graph: FuncGraph) -> list[tuple[tf.Tensor, tf.DType]]:
    """Handle and type of each variable that a function takes from outside and may assign."""
    outside = {id(inner): outer for outer, inner in graph.captures if inner.dtype == tf.resource}
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    inputs = [x for i, x in enumerate(graph.inputs) if id(x) in outside and i not in read_only]
    handles = [outside[id(x)] for x in inputs]
    kinds = [handle._handle_data.shape_and_type for handle in handles]
    pairs = zip(handles, kinds, strict=True)
    return [(x, tf.as_dtype(kind[0].dtype)) for x, kind in pairs if kind]  # a table has none


@contextlib.contextmanager
def own_eager_seeds() -> Iterator[None]:
    """Within it, eager random operations draw other seeds than they would, and use up none.

    Seeds put back would be drawn again, and find TensorFlow's kernels for them somewhere on.
    """
    eager = context.context()
    seeds = getattr(eager, "_rng", None)
    eager._rng = random.Random()
    try:
        yield
    finally:
        eager._rng = seeds


def has_one_tape(tensors: Sequence) -> bool:
    """Whether gradients of `tensors` are of the first order: one tape, which is not persistent."""
    first = gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER
    return pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(tensors) == first


def gradients_in_graph(ys: Sequence, xs: Sequence, dys: Sequence, source: FuncGraph) -> list:
    """Gradients of `ys` with respect to `xs`, both of `source`, in the graph under construction."""
    with tf.device(None):
        return gradients_util._GradientsHelper(ys, xs, grad_ys=dys, src_graph=source)


def function_of_graph(name: str, graph: FuncGraph) -> atomic_function.AtomicFunction:
    """`graph` as a function; no call of it is inlined."""
    attributes = {"_noinline": attr_value_pb2.AttrValue(b=True)}
    return atomic_function.from_func_graph(name, graph, attributes)


class RemoteFunction:
    """A function, to be called on devices by their names.

    `RemoteCall` and not `PartitionedCall`: a function called by the latter shares its caller's
    cancellation, so that an error in it cancels the caller before the caller has heard of it, and
    the caller reports "RecvAsync is cancelled" instead of the error.

    A pipeline calls a function for every microbatch: what its calls share is worked out once.
    """

    def __init__(self, function: atomic_function.AtomicFunction):
        self._function = function
        self._dtypes = [output.dtype for output in function.function_type.flat_outputs]
        self._name = function.name.decode()
        graph = function.graph
        # As TensorFlow does for its own calls: those that only read a variable need no order.
        indices = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
        read_only = [1 + index for index in indices]  # behind the name of the device
        name = attr_value_pb2.NameAttrList(name=function.name)
        integers = attr_value_pb2.AttrValue.ListValue(i=read_only)
        self._attributes = {
            "f": attr_value_pb2.AttrValue(func=name),
            "Tin": _type_list([tensor.dtype for tensor in graph.inputs]),
            "Tout": _type_list(self._dtypes),
            auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR: attr_value_pb2.AttrValue(
                list=integers
            ),
        }

    def __call__(self, device: str, arguments: Sequence) -> list:
        """Adds a call on `device`, a full name, to the graph under construction."""
        graph = ops.get_default_graph()
        graph._add_function_recursive(self._function)
        arguments = [x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x) for x in arguments]
        with tf.device(device):
            operation = graph._create_op_internal(
                "RemoteCall",
                [_device_name_in(graph, device), *arguments],
                self._dtypes,
                name=self._name,
                attrs=self._attributes,
            )
        for output, like in zip(operation.outputs, self._function.graph.outputs, strict=True):
            if like.shape.rank is not None:
                output.set_shape(like.shape)
            if like.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(like, output)
        return list(operation.outputs)


def _device_name_in(graph: ops.Graph, device: str) -> tf.Tensor:
    """A constant of `graph` on the device that it names."""
    names = getattr(graph, "_tfparallel_device_names", None)
    if names is None:
        names = graph._tfparallel_device_names = {}
    if device not in names:
        with graph.as_default(), tf.device(device), tf.control_dependencies(None):
            names[device] = tf.constant(device)
    return names[device]


def _type_list(dtypes: Iterable) -> attr_value_pb2.AttrValue:
    types = [dtype.as_datatype_enum for dtype in dtypes]
    return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(type=types))


def let_idle_threads_sleep() -> None:
    """Has TensorFlow's threads sleep as soon as they find no work, where none has started yet.

    Here, and in servers that this process connects to later. TensorFlow offers this to sessions
    only.
    """
    config = context.context()._config or tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = True
    context.context()._config = config


def unique_number() -> int:
    """A number that no other function's name ends with."""
    return ops.uid()


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


def fills_a_cache(dataset: Any) -> bool:
    """Whether a `tf.data.Dataset` reads its input in the first pass only."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return isinstance(dataset, CacheDataset) or any(map(fills_a_cache, dataset._inputs()))


def num_shuffles(dataset: Any) -> int:
    """How many shuffles a `tf.data.Dataset` goes through; those in functions of it do not count."""
    if not isinstance(dataset, tf.data.Dataset):
        return 0
    return isinstance(dataset, _ShuffleDataset) + sum(map(num_shuffles, dataset._inputs()))


def repeats_a_shuffle(dataset: Any) -> bool:
    """Whether a `tf.data.Dataset` shuffles several times in a pass."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    if isinstance(dataset, _RepeatDataset) and num_shuffles(dataset):
        return True
    return any(map(repeats_a_shuffle, dataset._inputs()))


def unrepeatable_parts(dataset: Any) -> list[str]:
    """What of a `tf.data.Dataset` gives another order in each process; nothing of what is no such.

    Datasets keep what they were made with to themselves.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return []
    names = [name for each in dataset._inputs() for name in unrepeatable_parts(each)]
    if not any(int(vars(dataset).get(seed, 1)) for seed in ("_seed", "_seed2")):
        names.append("shuffle without a seed")
    is_deterministic = vars(dataset).get("_deterministic")
    if is_deterministic == "false" or dataset.options().deterministic is False:
        names.append("deterministic=False")
    return list(dict.fromkeys(names))
