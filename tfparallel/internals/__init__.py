"""Every private name of TensorFlow and Keras, behind functions that say what they give.

All other code uses what is public, and this. When a new version moves a name, this is the folder to
change: a file for each subject, with the reason beside each import and function.

    supported              which versions, and `check`: what the installed ones lack
    keras_state            who creates a variable, masks, scopes, the global seed
    keras_initializers     what initialisers draw
    keras_layers           models, layers, losses, metrics, optimizers
    keras_trainer          `fit` & co.: who calls, with what
    distribute             classes and numbers of `tf.distribute`
    eager                  the eager context, gradient tapes
    graphs                 functions, order and devices in graphs
    shared_constants       equal constants of a graph, made once
    datasets               `tf.data`, and arrays
    hooks                  methods of instances replaced, and put back
    new_operations         who constructs which layer
    gradients_asked_for    who asks which tape for gradients
"""

# ruff: noqa: E402  - `check` comes before the imports that would fail one by one
from tfparallel.internals.supported import check

check()

from tfparallel.internals.datasets import (
    ArrayDataAdapter,
    dataset_as_graph,
    unrepeatable_parts,
)
from tfparallel.internals.distribute import (
    CollectiveAllReduce,
    CollectiveAllReduceExtended,
    CollectiveKeys,
    DistributedValues,
    DistributedVariable,
    Mirrored,
    MirroredExtended,
    MirroredVariable,
    PerReplica,
    PerReplicaSpec,
    ReduceOp,
    ReductionToOneDevice,
    ReplicaContext,
    SaveSpec,
    SyncOnReadVariable,
    TPUExtended,
    device_util,
    distribute_lib,
    distribute_utils,
    numpy_dataset,
    values_util,
)
from tfparallel.internals.eager import (
    ResourceVariable,
    UninitializedVariable,
    context,
    has_one_tape,
    keep_traced_functions,
    let_idle_threads_sleep,
    new_executor,
    own_eager_seeds,
    record,
    variable_accessed,
    variables_alive,
)
from tfparallel.internals.graph_functions import (
    RemoteFunction,
    function_of_graph,
    unique_number,
)
from tfparallel.internals.graphs import (
    FuncGraph,
    UnconvertedError,
    changed_variables,
    gradients_in_graph,
    run_independently,
    with_body,
)
from tfparallel.internals.keras_epochs import surround_epochs
from tfparallel.internals.keras_layers import (
    BaseOptimizer,
    Functional,
    Mean,
    MeanMetricWrapper,
    Sum,
)
from tfparallel.internals.keras_state import (
    GLOBAL_SEED_GENERATOR,
    get_keras_mask,
    global_seed_generator,
    global_state,
    in_stateless_scope,
    in_symbolic_scope,
    layer_of_late_variable,
    owner_of_new_variable,
    set_keras_mask,
)
from tfparallel.internals.keras_trainer import (
    TrainerCall,
    calling_trainer,
    is_called_by_trainer,
    is_compiled_step,
    is_keras_step,
    is_loss_scaling,
    is_predict_step,
    is_stock_step,
    is_symbolic_build,
    is_train_step,
    model_of_predict_step,
    trainer_that_builds,
)

__all__ = [
    "ArrayDataAdapter",
    "BaseOptimizer",
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveKeys",
    "DistributedValues",
    "DistributedVariable",
    "FuncGraph",
    "Functional",
    "GLOBAL_SEED_GENERATOR",
    "Mean",
    "MeanMetricWrapper",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "RemoteFunction",
    "ReplicaContext",
    "ResourceVariable",
    "UninitializedVariable",
    "SaveSpec",
    "Sum",
    "SyncOnReadVariable",
    "TPUExtended",
    "TrainerCall",
    "UnconvertedError",
    "calling_trainer",
    "changed_variables",
    "context",
    "dataset_as_graph",
    "device_util",
    "distribute_lib",
    "distribute_utils",
    "function_of_graph",
    "get_keras_mask",
    "global_seed_generator",
    "global_state",
    "gradients_in_graph",
    "has_one_tape",
    "in_stateless_scope",
    "in_symbolic_scope",
    "is_called_by_trainer",
    "is_compiled_step",
    "is_keras_step",
    "is_loss_scaling",
    "is_predict_step",
    "is_stock_step",
    "is_symbolic_build",
    "is_train_step",
    "layer_of_late_variable",
    "keep_traced_functions",
    "let_idle_threads_sleep",
    "model_of_predict_step",
    "new_executor",
    "numpy_dataset",
    "own_eager_seeds",
    "owner_of_new_variable",
    "record",
    "run_independently",
    "set_keras_mask",
    "surround_epochs",
    "trainer_that_builds",
    "unique_number",
    "unrepeatable_parts",
    "values_util",
    "variable_accessed",
    "variables_alive",
    "with_body",
]
