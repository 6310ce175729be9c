"""Which versions of TensorFlow and Keras are supported, and what the installed ones lack.

The names that this folder takes from them are listed here once more, so that a version that moved
some is refused when a strategy is imported, in one error that names all that is missing.
"""

import importlib
from collections.abc import Iterator, Mapping

from tfparallel.internals.read_code import found_at, has, names_in

SUPPORTED = {"tensorflow": "2.20 and 2.21", "keras": "3.12 to 3.15"}

_KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"

# What is imported, by module.
MODULES: Mapping[str, tuple[str, ...]] = {
    "keras.src.backend.common.global_state": ("get_global_attribute", "set_global_attribute"),
    "keras.src.backend.common.masking": ("get_keras_mask", "set_keras_mask"),
    "keras.src.backend.common.remat": ("get_current_remat_mode",),
    "keras.src.backend.common.stateless_scope": ("in_stateless_scope",),
    "keras.src.backend.common.symbolic_scope": ("in_symbolic_scope",),
    "keras.src.backend.common.variables": ("get_autocast_scope",),
    "keras.src.backend.tensorflow.core": ("Variable",),
    "keras.src.backend.tensorflow.distribution_lib": ("list_devices",),
    "keras.src.backend.tensorflow.numpy": ("not_equal", "signbit", "take"),
    "keras.src.backend.tensorflow.random": ("_cast_seed",),
    _KERAS_TRAINER: ("TensorFlowTrainer", "TFEpochIterator"),
    "keras.src.distribution.distribution_lib": ("GLOBAL_ATTRIBUTE_NAME", "global_state"),
    "keras.src.layers.layer": ("Layer",),
    "keras.src.layers.rnn.dropout_rnn_cell": ("DropoutRNNCell",),
    "keras.src.losses.loss": ("scale_loss_for_distribution", "unscale_loss_for_distribution"),
    "keras.src.metrics.reduction_metrics": ("Mean", "MeanMetricWrapper", "Sum"),
    "keras.src.models.functional": ("Functional",),
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer",),
    "keras.src.random.seed_generator": ("draw_seed", "global_seed_generator"),
    "keras.src.trainers.data_adapters": ("distribution_lib",),
    "keras.src.trainers.data_adapters.array_data_adapter": ("ArrayDataAdapter",),
    "keras.src.trainers.data_adapters.tf_dataset_adapter": ("TFDatasetAdapter",),
    "tensorflow.core.framework.attr_value_pb2": ("AttrValue", "NameAttrList"),
    "tensorflow.core.framework.node_def_pb2": ("NodeDef",),
    "tensorflow.python.data.experimental.ops.distribute": (
        "compute_batch_size",
        "replicate",
    ),
    "tensorflow.python.data.ops.cache_op": ("CacheDataset",),
    "tensorflow.python.data.ops.dataset_ops": ("_OptionsDataset",),
    "tensorflow.python.data.ops.interleave_op": ("_ParallelInterleaveDataset",),
    "tensorflow.python.data.ops.prefetch_op": ("_PrefetchDataset",),
    "tensorflow.python.data.ops.repeat_op": ("_RepeatDataset",),
    "tensorflow.python.data.ops.shuffle_op": ("_ShuffleDataset",),
    "tensorflow.python.distribute.collective_all_reduce_strategy": ("CollectiveAllReduceExtended",),
    "tensorflow.python.distribute.cross_device_ops": (
        "CollectiveAllReduce",
        "ReductionToOneDevice",
    ),
    "tensorflow.python.distribute.cross_device_utils": ("CollectiveKeys",),
    "tensorflow.python.distribute.device_util": ("canonicalize",),
    "tensorflow.python.distribute.distribute_lib": ("ReplicaContext", "get_replica_context"),
    "tensorflow.python.distribute.distribute_utils": (
        "create_mirrored_variable",
        "is_mirrored",
        "select_replica",
    ),
    "tensorflow.python.distribute.mirrored_strategy": ("MirroredExtended",),
    "tensorflow.python.distribute.numpy_dataset": ("SingleDevice",),
    "tensorflow.python.distribute.reduce_util": ("ReduceOp",),
    "tensorflow.python.distribute.tpu_strategy": ("TPUExtended",),
    "tensorflow.python.distribute.values": (
        "DistributedValues",
        "DistributedVariable",
        "Mirrored",
        "MirroredVariable",
        "PerReplica",
        "PerReplicaSpec",
        "SyncOnReadVariable",
    ),
    "tensorflow.python.distribute.values_util": (
        "get_current_replica_id_as_int",
        "is_saving_non_distributed",
    ),
    "tensorflow.python.eager.backprop": ("GradientTape", "_handle_or_self"),
    "tensorflow.python.eager.context": ("context",),
    "tensorflow.python.eager.executor": ("new_executor",),
    "tensorflow.python.eager.forwardprop": ("ForwardAccumulator",),
    "tensorflow.python.eager.forwardprop_util": ("pack_tangents",),
    "tensorflow.python.eager.polymorphic_function.atomic_function": (
        "RUNTIME_FUNCTION_REFS",
        "AtomicFunction",
        "from_func_graph",
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": ("Function",),
    "tensorflow.python.eager.polymorphic_function.tf_method_target": ("TfMethodTarget",),
    "tensorflow.python.eager.record": (
        "could_possibly_record",
        "record_operation",
        "should_record_backprop",
        "stop_recording",
    ),
    "tensorflow.python.framework.auto_control_deps_utils": (
        "READ_ONLY_RESOURCE_INPUTS_ATTR",
        "get_read_only_resource_input_indices_graph",
    ),
    "tensorflow.python.framework.composite_tensor": ("CompositeTensor",),
    "tensorflow.python.framework.config": ("is_op_determinism_enabled",),
    "tensorflow.python.framework.func_graph": ("FuncGraph",),
    "tensorflow.python.framework.op_def_library": ("_ExtractInputsAndAttrs",),
    "tensorflow.python.framework.op_def_registry": ("get",),
    "tensorflow.python.framework.ops": (
        "EagerTensor",
        "Graph",
        "get_default_graph",
        "gradient_registry",
        "tensor_id",
        "uid",
    ),
    "tensorflow.python.framework.override_binary_operator": ("maybe_promote_tensors",),
    "tensorflow.python.ops.control_flow_util": ("GraphOrParentsInXlaContext",),
    "tensorflow.python.ops.control_flow_v2_func_graphs": ("CondBranchFuncGraph",),
    "tensorflow.python.ops.gradients_util": (
        "POSSIBLE_GRADIENT_TYPES_FIRST_ORDER",
        "_GradientsHelper",
    ),
    "tensorflow.python.ops.handle_data_util": ("copy_handle_data",),
    "tensorflow.python.ops.math_ops": ("_add_dispatch",),
    "tensorflow.python.ops.random_ops_util": ("get_key_counter_alg",),
    "tensorflow.python.ops.resource_variable_ops": (
        "ResourceVariable",
        "UninitializedVariable",
        "variable_accessed",
    ),
    "tensorflow.python.ops.while_v2": ("_grad_fn", "_is_loop_invariant"),
    "tensorflow.python.pywrap_tfe": ("TFE_Py_TapeSetPossibleGradientTypes",),
    "tensorflow.tsl.profiler.protobuf.xplane_pb2": ("XSpace",),
    "tensorflow.python.training.saving.saveable_object": ("SaveSpec", "SaveableObject"),
}

# What is used of objects, by their class: methods, and attributes that methods of it name.
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "keras.src.backend.tensorflow.core.Variable": (
        "_autocast",
        "_deferred_initialize",
        "_initialize",
        "_initialize_with_initializer",
        "_shape",
        "_value",
        "handle",
    ),
    _KERAS_TRAINER + ".TensorFlowTrainer": (
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_distribute_strategy",
        "_get_metrics_result_or_logs",
        "_initial_epoch",
        "_loss_tracker",
        "_maybe_symbolic_build",
        "_symbolic_build",
        "make_predict_function",
        "test_step",
        "train_step",
    ),
    _KERAS_TRAINER + ".TFEpochIterator": (
        "_current_iterator",
        "_distributed_dataset",
        "_enumerate_iterator",
        "_num_batches",
        "_steps_seen",
        "catch_stop_iteration",
        "data_adapter",
        "num_batches",
        "steps_per_epoch",
    ),
    "keras.src.distribution.distribution_lib.ModelParallel": ("_layout_map",),
    "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention": (
        "_dropout_layer",
        "_key_dense",
        "_output_dense",
        "_query_dense",
        "_value_dense",
    ),
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": (
        "_dropout_layer",
        "_key_dense",
        "_output_dense",
        "_query_dense",
        "_value_dense",
    ),
    "keras.src.layers.core.embedding.Embedding": ("_embeddings",),
    "keras.src.layers.layer.Layer": (
        "_call_has_training_arg",
        "_clear_losses",
        "_flatten_layers",
        "_get_own_losses",
        "_loss_ids",
        "_losses",
        "_non_trainable_variables",
        "_remat_mode",
        "_seed_generators",
        "_trainable_variables",
    ),
    "keras.src.layers.normalization.batch_normalization.BatchNormalization": (
        "_moments",
        "_reduction_axes",
    ),
    "keras.src.layers.rnn.dropout_rnn_cell.DropoutRNNCell": ("_create_dropout_mask",),
    "keras.src.losses.losses.LossFunctionWrapper": ("_fn_kwargs", "fn"),
    "keras.src.metrics.reduction_metrics.MeanMetricWrapper": ("_fn", "_fn_kwargs"),
    "keras.src.models.functional.Functional": (
        "_get_operation_for_node",
        "_inputs_struct",
        "_nodes_by_depth",
        "_outputs_struct",
        "_run_through_graph",
    ),
    "keras.src.models.sequential.Sequential": ("_functional",),
    "keras.src.optimizers.base_optimizer.BaseOptimizer": (
        "_accumulated_gradients",
        "_backend_reset_gradient_accumulators",
        "_clip_gradients",
        "_get_variable_index",
        "_iterations",
        "_model_variables_moving_average",
        "_trainable_variables",
        "_update_model_variables_moving_average",
        "apply",
        "scale_loss",
    ),
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer": (
        "_common_apply",
        "_stateful_handle_finite_grads",
        "check_finite",
    ),
    "keras.src.optimizers.optimizer.Optimizer": ("_all_reduce_sum_gradients",),
    "keras.src.trainers.compile_utils.CompileLoss": ("_flat_losses", "_user_loss"),
    "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter": (
        "_batch_size",
        "_inputs",
        "_num_samples",
        "_shuffle",
    ),
    "tensorflow.python.data.ops.dataset_ops.DatasetV2": ("_as_serialized_graph", "_inputs"),
    "tensorflow.python.data.ops.iterator_ops.OwnedIterator": (
        "_flat_output_shapes",
        "_flat_output_types",
        "_iterator_resource",
        "_restore_from_tensors",
        "_serialize_to_tensors",
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended": (
        "_cluster_spec",
        "_collective_keys",
        "_communication_options",
        "_cross_device_ops",
        "_host_cross_device_ops",
        "_id_in_cluster",
        "_initialize_local_devices",
        "_local_device_type",
        "_num_workers",
        "_task_id",
        "_task_type",
        "_worker_device",
    ),
    "tensorflow.python.distribute.cross_device_ops.CollectiveAllReduce": (
        "_all_reduce_per_replica_values",
        "_group_size",
        "_launchers",
    ),
    "tensorflow.python.distribute.cross_device_ops.ReductionToOneDevice": ("_gather",),
    "tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher": (
        "_all_gather",
        "_collective_keys",
        "_device",
        "_get_ordering_token",
        "_group_key",
        "_group_size",
        "_next_instance_key",
        "_options",
        "_ordering_token",
        "_use_unique_instance_key",
        "all_gather",
        "all_reduce",
    ),
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended": (
        "_batch_reduce_to",
        "_call_for_each_replica",
        "_collective_ops",
        "_container_strategy",
        "_container_strategy_weakref",
        "_create_variable",
        "_default_device",
        "_devices",
        "_distribute_datasets_from_function",
        "_experimental_distribute_dataset",
        "_gather_to_implementation",
        "_get_local_replica_id",
        "_get_replica_id_in_sync_group",
        "_get_variable_creator_initial_value",
        "_in_multi_worker_mode",
        "_local_results",
        "_num_replicas_in_sync",
        "_reduce_to",
        "_replica_ctx_all_reduce",
        "_replica_ctx_update",
        "_update",
        "_use_merge_call",
    ),
    "tensorflow.python.distribute.tpu_strategy.TPUExtended": (
        "_create_variable",
        "_num_replicas_in_sync",
    ),
    "tensorflow.python.distribute.values.DistributedVariable": (
        "_dense_var_to_tensor",
        "_distribute_strategy",
        "_distributed_container",
        "_get",
        "_get_cross_replica",
        "_get_on_device_or_primary",
        "_get_replica",
        "_primary",
        "_update_replica",
        "_values",
        "handle",
    ),
    "tensorflow.python.eager.backprop.GradientTape": ("_ensure_recording", "gradient"),
    "tensorflow.python.eager.context.Context": (
        "_config",
        "_context_handle",
        "_rng",
        "abort_collective_ops",
        "add_function_def",
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function": (
        "_attributes",
        "_autograph",
        "_experimental_autograph_options",
        "_jit_compile",
        "_name",
        "_reduce_retracing",
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction": (
        "_call_flat",
    ),
    "tensorflow.python.framework.func_graph.FuncGraph": (
        "_add_function_recursive",
        "_attr_scope_map",
        "_colocation_stack",
        "_create_op_internal",
        "_current_control_dependencies",
        "_device_function_stack",
        "_functions",
        "_get_control_flow_context",
        "_get_function",
        "captures",
    ),
    "tensorflow.python.framework.ops.EagerTensor": ("_capture_as_const",),
    "tensorflow.python.framework.ops.Operation": (
        "_add_control_input",
        "_add_control_inputs",
        "_is_stateful",
        "_remove_all_control_inputs",
        "_set_attr",
        "_set_device",
        "_update_input",
    ),
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable": (
        "_handle_data",
        "_unique_id",
    ),
    "tensorflow.python.ops.while_v2._WhileBodyGradFuncGraph": (
        "_capture_helper",
        "_indirect_captures",
    ),
}

# Names of local variables and of what a function asks for, which are read on the stack. Of
# functions with "|" between them, one has them.
NAMED_IN: Mapping[str, tuple[str, ...]] = {
    "keras.src.backend.tensorflow.core.Variable._initialize_with_initializer": (
        "initializer",
        "self",
    ),
    "keras.src.initializers.random_initializers.RandomNormal.__call__": ("normal", "random"),
    "keras.src.initializers.random_initializers.RandomUniform.__call__": ("random", "uniform"),
    "keras.src.initializers.random_initializers.TruncatedNormal.__call__": (
        "random",
        "truncated_normal",
    ),
    "keras.src.initializers.random_initializers.VarianceScaling.__call__": (
        "normal",
        "random",
        "truncated_normal",
        "uniform",
    ),
    _KERAS_TRAINER + ".TensorFlowTrainer.fit": ("callbacks", "epoch_iterator", "epochs", "self"),
    _KERAS_TRAINER + ".TensorFlowTrainer._symbolic_build": ("self",),
    _KERAS_TRAINER + ".TFEpochIterator.__init__": ("self",),
    "keras.src.backend.common.remat.get_current_remat_mode": ("remat_scope_stack",),
    "keras.src.ops.operation.Operation.__init__|keras.src.layers.layer.Layer.__init__": (
        "get_current_remat_mode",
        "self",
    ),
    "tensorflow.python.eager.backprop.GradientTape.jacobian": ("target",),
    "tensorflow.python.eager.backprop.GradientTape.gradient": (
        "_handle_or_self",
        "flat_targets",
        "self",
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function.__call__": (
        "kwds",
    ),
    "tensorflow.python.framework.func_graph.func_graph_from_py_func": (
        "deps_control_manager",
        "func_graph",
    ),
    "tensorflow.python.ops.custom_gradient._graph_mode_decorator": ("grad_fn", "tape_grad_fn"),
    "tensorflow.python.ops.cond_v2._build_cond": ("_false_graph", "_true_graph"),
}


def check() -> None:
    """Refuses versions that lack what this folder uses.

    Raises:
        ImportError: naming all that is missing, and which versions are supported.
    """
    missing = list(_missing())
    if missing:
        raise ImportError(
            f"tfparallel needs TensorFlow {SUPPORTED['tensorflow']} and Keras "
            f"{SUPPORTED['keras']}. Received: TensorFlow {_version('tensorflow')} and Keras "
            f"{_version('keras')}, which lack {', '.join(missing)}. Install supported versions."
        )


def _missing() -> Iterator[str]:
    for module, names in MODULES.items():
        for name in names:
            if found_at(f"{module}.{name}") is None:
                yield f"{module}.{name}"
    for path, names in ATTRIBUTES.items():
        kind = found_at(path)
        yield from (f"{path}.{name}" for name in names if not has(kind, name))
    for paths, names in NAMED_IN.items():
        known = [names_in(found_at(path)) for path in paths.split("|")]
        yield from (f"{name} in {paths}" for name in names if all(name not in k for k in known))


def _version(package: str) -> str:
    return getattr(importlib.import_module(package), "__version__", "of unknown version")
