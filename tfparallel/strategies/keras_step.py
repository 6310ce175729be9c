"""One train, test or predict step of a Keras model, cut over the replicas and put together again.

Keras's step function is written for one device. Run on a replica with `n_i` of the batch's `N` rows
it computes the mean loss `L_i` over its own rows. What one device computes is
`L = sum_i w_i L_i` with `w_i = n_i / N`, so inside a step:

- Keras sees one replica (`num_replicas_in_sync == 1`): its losses are plain means, not means / R;
- gradients are weighted by `w_i` and summed, before anything is clipped (`optimizer_hooks.py`);
- losses that are not means over rows are rescaled so that the same formula holds;
- metrics that average scalars count a batch once, and every metric result is the global one.

`w_i` is right for any batch: uneven ones, and batches with fewer rows than replicas.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from tfparallel.tf_internals import (
    Mean,
    PerReplica,
    ReduceOp,
    Sum,
    distribute_lib,
    distribute_utils,
    uses_stock_train_step,
    values_util,
)

_active = threading.local()


def current_replica_step() -> "ReplicaStep | None":
    """What the calling replica thread needs to know of the Keras step it runs, if it runs one."""
    return getattr(_active, "step", None)


class ReplicaStep:
    """One replica's share of a Keras step.

    Attributes:
        rows: int or scalar int32 tensor, rows of the batch this replica computes on.
        weight: scalar float32 tensor, `rows` over the rows of all replicas.
        weights_loss: the loss itself is weighted (the stock `train_step`); else gradients are.
        gradients_reduced: inside `optimizer.apply`, after the all-reduce.
        statistics: variables assigned from this replica's rows only, to be averaged.
    """

    def __init__(self, rows, weight, weights_loss: bool, statistics: list):
        self.rows, self.weight = rows, weight
        self.weights_loss, self.statistics = weights_loss, statistics
        self.gradients_reduced = False

    def weigh_gradient(self, gradient):
        """`gradient * weight`, unless the loss already carries the weight."""
        if gradient is None or self.weights_loss:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.weigh_gradient(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.multiply_no_nan(gradient, tf.cast(self.weight, gradient.dtype))

    @contextlib.contextmanager
    def active(self):
        """Makes this the current step of the calling thread."""
        _active.step = self
        _weigh_backward_of_all_reduce(distribute_lib.get_replica_context(), self)
        try:
            yield
        finally:
            _active.step = None


def split_rows(num_rows, num_replicas: int, replica_ids) -> tuple[list, list]:
    """`(starts, sizes)` of the contiguous rows of each replica, as even as possible.

    `num_rows` is an int or a scalar tensor; so are the results.
    """
    quotient, remainder = num_rows // num_replicas, num_rows % num_replicas
    minimum = min if _is_static(num_rows) else tf.minimum
    starts = [quotient * i + minimum(i, remainder) for i in replica_ids]
    ends = [quotient * (i + 1) + minimum(i + 1, remainder) for i in replica_ids]
    return starts, [end - start for start, end in zip(starts, ends)]


class Batch:
    """A batch as Keras hands it to `Strategy.run`, cut into the rows of this worker's replicas.

    Args:
        strategy: the strategy that runs the step.
        data: nest of tensors `[rows, ...]`, the whole global batch (Keras's own input path and
            `*_on_batch`), or nest of `PerReplica` (a dataset the user distributed).

    Attributes:
        parts: one nest for each local replica.
        rows, weights: for each local replica, as in `ReplicaStep`.
    """

    def __init__(self, strategy, data):
        extended = strategy.extended
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        num_local = len(extended.worker_devices)
        with tf.device(extended._host_device):
            if any(isinstance(leaf, PerReplica) for leaf in leaves):
                self.parts = [distribute_utils.select_replica(i, data) for i in range(num_local)]
                self.rows = [_num_rows(part) for part in self.parts]
                total = extended._sum_across_workers(
                    tf.add_n([tf.cast(n, tf.int32) for n in self.rows])
                )
            else:
                data = keras.tree.map_structure(_as_tensor, data)
                total = _num_rows(data)
                if _is_static(total) and total < extended._num_replicas_in_sync:
                    data = keras.tree.map_structure(_hide_num_rows, data)
                    total = _num_rows(data)
                first = extended._get_replica_id_in_sync_group(0)
                starts, self.rows = split_rows(
                    total, extended._num_replicas_in_sync, range(first, first + num_local)
                )
                self.parts = [
                    keras.tree.map_structure(lambda x, s=s, n=n: _slice_rows(x, s, n), data)
                    for s, n in zip(starts, self.rows)
                ]
            total = tf.cast(total, tf.float32)
            self.weights = [tf.math.divide_no_nan(tf.cast(n, tf.float32), total) for n in self.rows]

    def part_of_current_replica(self, extended):
        return self.parts[_local_replica_id(extended)]


def run_predict_step(strategy, predict_step, data):
    """Runs `predict_step` on every replica's rows; returns all rows in the caller's order."""
    batch = Batch(strategy, data)
    extended = strategy.extended
    outputs = strategy._run_on_replicas(
        lambda: predict_step(batch.part_of_current_replica(extended))
    )
    return keras.tree.map_structure(
        lambda value: extended._gather_rows(_concat(strategy.experimental_local_results(value))),
        outputs,
    )


def run_keras_step(strategy, step_function, data):
    """Runs a model's `train_step` or `test_step` on every replica; returns what one device would."""
    model, extended = step_function.__self__, strategy.extended
    batch = Batch(strategy, data)
    weights_loss = step_function.__name__ == "train_step" and uses_stock_train_step(model)
    statistics: list = []
    global_results: list = []

    def replica_function():
        i = _local_replica_id(extended)
        step = ReplicaStep(batch.rows[i], batch.weights[i], weights_loss, statistics)
        with step.active():
            return step_function(batch.parts[i])

    with _hooked_model(model, strategy, global_results):
        outputs = strategy._run_on_replicas(replica_function)
    _average_statistics(extended, statistics, batch)
    return keras.tree.map_structure(
        lambda value: _reduce_output(strategy, value, batch, global_results), outputs
    )


# ---- what the model sees while its step is traced ------------------------------------------------


@contextlib.contextmanager
def _hooked_model(model, strategy, global_results: list):
    """Shadows methods of this model's metrics and losses on the instances, and only for one step."""
    shadows: list[tuple[dict, str]] = []

    def shadow(instance, name: str, function):
        vars(instance)[name] = function
        shadows.append((vars(instance), name))

    def in_cross_replica(result, metrics):
        return _in_cross_replica(result, metrics, strategy.extended, global_results)

    metrics = model.metrics
    shadow(model, "get_metrics_result", in_cross_replica(model.get_metrics_result, metrics))
    for metric in metrics:
        shadow(metric, "result", in_cross_replica(metric.result, [metric]))
        if type(metric).update_state in (Mean.update_state, Sum.update_state):
            shadow(metric, "update_state", _counting_a_batch_once(metric.update_state))
    compile_loss = getattr(model, "_compile_loss", None)
    flat_losses = getattr(compile_loss, "_flat_losses", None)
    try:
        if flat_losses:
            compile_loss._flat_losses = [
                entry._replace(loss=_weighted_by_rows(entry.loss)) for entry in flat_losses
            ]
        yield
    finally:
        if flat_losses:
            compile_loss._flat_losses = flat_losses
        for attributes, name in shadows:
            del attributes[name]


def _in_cross_replica(result, metrics, extended, global_results: list):
    """`result()` computed once from the state of all replicas, the same tensors for each."""

    def compute(_, *args, **kwargs):
        with extended._metrics_read_together(metrics):
            return result(*args, **kwargs)

    def merged(*args, **kwargs):
        context = distribute_lib.get_replica_context()
        if context is None or current_replica_step() is None:
            return result(*args, **kwargs)
        value = context.merge_call(compute, args, kwargs)
        global_results.append(value)
        return value

    return merged


def _counting_a_batch_once(update_state):
    """A scalar (a batch's loss) counts with the replica's share of rows, so the shares add up to 1."""

    def weighted(values, sample_weight=None):
        step = current_replica_step()
        if step is not None and tf.convert_to_tensor(values).shape.rank == 0:
            if sample_weight is None:
                sample_weight = step.weight
            # Without rows a mean is 0/0, and 0 * NaN would stay in the metric.
            values = tf.where(tf.greater(step.rows, 0), values, tf.zeros_like(values))
        return update_state(values, sample_weight=sample_weight)

    return weighted


def _weighted_by_rows(loss):
    """`loss` rescaled so that the row-weighted mean over replicas is the loss of the whole batch.

    Means over rows need nothing. A sum is divided by the replica's weight; a mean over something
    else (unmasked steps, sample weights) is rescaled from its own share to the share of rows.
    """

    def call(y_true, y_pred, sample_weight=None):
        step = current_replica_step()
        value = loss(y_true, y_pred, sample_weight)
        if step is None:
            return value
        reduction = getattr(loss, "reduction", "mean")
        if value.shape == (0,) and reduction not in ("none", None):
            value = tf.reduce_sum(value)  # eagerly, Keras returns a loss over no rows unreduced
        mask = getattr(y_pred, "_keras_mask", None)
        if reduction in ("sum", "none", None):
            share = tf.ones((), value.dtype)
        elif reduction == "mean_with_sample_weight" and not (
            sample_weight is None and mask is None
        ):
            share = _share_of(_sum_of_weights(sample_weight, mask, value.dtype))
        elif mask is not None:
            share = _share_of(tf.reduce_sum(tf.cast(mask, value.dtype)))
        else:
            return value
        return value * tf.math.divide_no_nan(share, tf.cast(step.weight, value.dtype))

    return call


def _share_of(local):
    total = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, local)
    return tf.math.divide_no_nan(local, total)


def _sum_of_weights(sample_weight, mask, dtype):
    if mask is None:
        return tf.reduce_sum(tf.cast(sample_weight, dtype))
    weights = tf.cast(mask, dtype)
    if sample_weight is not None:
        sample_weight = tf.cast(sample_weight, dtype)
        missing = len(weights.shape) - len(sample_weight.shape)
        weights *= tf.reshape(sample_weight, tf.concat([tf.shape(sample_weight), [1] * missing], 0))
    return tf.reduce_sum(weights)


def _weigh_backward_of_all_reduce(context, step: ReplicaStep) -> None:
    """Gradients that cross replicas (synchronised BatchNorm) are weighted when they do.

    Where gradients are weighted only at the end, by the weight of the replica they arrive at, what
    replica j sends to replica i has to carry `w_j / w_i`.
    """
    all_reduce = context.all_reduce

    def weighted(reduce_op, value, options=None):
        if step.weights_loss or any(
            isinstance(v, tf.IndexedSlices) for v in tf.nest.flatten(value)
        ):
            return all_reduce(reduce_op, value, options)

        @tf.custom_gradient
        def forward(*tensors):
            def backward(*gradients):
                reduced = all_reduce(
                    reduce_op, [g * tf.cast(step.weight, g.dtype) for g in gradients]
                )
                return [tf.math.divide_no_nan(g, tf.cast(step.weight, g.dtype)) for g in reduced]

            return all_reduce(reduce_op, list(tensors), options), backward

        return tf.nest.pack_sequence_as(value, forward(*tf.nest.flatten(value)))

    context.all_reduce = weighted  # this context lives as long as this replica's step


# ---- what comes out of a step --------------------------------------------------------------------


def _average_statistics(extended, variables: list, batch: Batch) -> None:
    """Statistics of each replica's own rows (BatchNorm) become the mean weighted by rows."""
    variables = list({id(variable): variable for variable in variables}.values())
    if not variables:
        return
    means = []
    for variable in variables:
        local = [
            tf.where(tf.greater(n, 0), copy.read_value(), tf.zeros_like(copy))
            * tf.cast(w, copy.dtype)
            for copy, n, w in zip(variable.values, batch.rows, batch.weights)
        ]
        means.append(tf.add_n(local))
    for variable, mean in zip(variables, extended._sum_list_across_workers(means)):
        for copy in variable.values:
            with tf.device(copy.device):
                copy.assign(mean)


def _reduce_output(strategy, value, batch: Batch, global_results: list):
    """One value of what the step returned: a global result as it is, else the mean over rows."""
    if any(value is leaf for leaf in keras.tree.flatten(global_results)):
        return value
    local = strategy.experimental_local_results(value)
    if not tf.is_tensor(local[0]) or not local[0].dtype.is_floating or len(local[0].shape) > 0:
        return value
    weighted = [x * tf.cast(w, x.dtype) for x, w in zip(local, batch.weights)]
    return strategy.extended._sum_across_workers(tf.add_n(weighted))


# ---- rows ----------------------------------------------------------------------------------------


def _is_static(value) -> bool:
    return isinstance(value, int)


def _as_tensor(leaf):
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def _num_rows(data):
    """Rows of a nest, as an int where they are known when tracing."""
    for leaf in keras.tree.flatten(data):
        if leaf is not None and leaf.shape.rank != 0:
            if isinstance(leaf, tf.RaggedTensor):
                return leaf.nrows(out_type=tf.int32)
            if leaf.shape[0] is not None:
                return int(leaf.shape[0])
            if isinstance(leaf, tf.SparseTensor):
                return tf.cast(leaf.dense_shape[0], tf.int32)
            return tf.shape(leaf)[0]
    raise ValueError(
        "A batch needs at least one tensor with rows to split over replicas. "
        f"Received: {keras.tree.map_structure(lambda x: getattr(x, 'shape', x), data)}"
    )


def _slice_rows(leaf, start, size):
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([[start], tf.zeros([tf.rank(leaf) - 1], tf.int32)], 0)
        extent = tf.concat([[tf.cast(size, tf.int64)], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, tf.cast(begin, tf.int64), extent)
    return leaf[start : start + size]


def _hide_num_rows(leaf):
    """`leaf` with rows unknown when tracing: some replicas get none, and all must trace alike.

    Keras returns a loss of static shape [0] unreduced, and leaves out ops for static shapes.
    """
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (0, None) or tf.executing_eagerly():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])


def _concat(parts):
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if not isinstance(parts[0], tf.RaggedTensor) and parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, axis=0)


def _local_replica_id(extended) -> int:
    return extended._get_local_replica_id(values_util.get_current_replica_id_as_int())
