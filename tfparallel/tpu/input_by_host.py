"""Each host of a TPU reads the input for its own cores.

TensorFlow would let every host read all batches and keep each so many rows (or files) of its own.
Here a host reads all batches, too, and keeps of each the rows of its cores, which follow one
another as the cores do:

    8 rows, 2 hosts of 2 cores     host 0: core 0 gets rows 0 1, core 1 rows 2 3
                                   host 1: core 2 gets rows 4 5, core 3 rows 6 7

So a step is of one batch, that of one device, and no row goes from host to host. All hosts have to
read the same batches: what shuffles has a seed.
"""

from typing import Any

import tensorflow as tf

from tfparallel.internals import TrainerCall, context
from tfparallel.internals.datasets import (
    ArrayDataAdapter,
    arrays_of,
    copy_on,
    unrepeatable_functions,
    unrepeatable_parts,
)
from tfparallel.tpu.padded_batches import BatchSize, parts_on_host


def distributed_by_host(
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset,
    call: TrainerCall,
    size: BatchSize,
    num_replicas: int,
) -> Any:
    """`dataset` as a distributed one, whose batches are of `size`.

    Raises:
        ValueError: if several hosts would not read the same.
    """

    reasons = _why_not_repeatable(dataset, call)  # here, where the dataset is

    def of_host(own: tf.distribute.InputContext) -> tf.data.Dataset:
        hosts, each = own.num_input_pipelines, num_replicas // own.num_input_pipelines
        if num_replicas % hosts:
            raise ValueError(
                f"Every host needs as many cores. Received: {num_replicas} on {hosts} hosts."
            )
        first = own.input_pipeline_id * each
        batches = dataset
        if hosts > 1:
            _check_is_repeatable(reasons, hosts)
            batches = copy_on(tf.zeros([]).device, dataset)  # TensorFlow calls this for a device
        cut = parts_on_host(size, num_replicas, range(first, first + each))
        rows = -(-size.rows // num_replicas)
        return batches.map(cut).rebatch(rows, drop_remainder=True).prefetch(each)

    distributed = strategy.distribute_datasets_from_function(of_host)
    distributed.read_dataset = dataset  # for backups, as that of what reads ahead
    return distributed


def _why_not_repeatable(dataset: tf.data.Dataset, call: TrainerCall) -> list[str]:
    adapter = call.data_adapter
    if isinstance(adapter, ArrayDataAdapter):
        if arrays_of(adapter).is_shuffled and context.global_seed() is None:
            return ["shuffle=True without keras.utils.set_random_seed(...) before it"]
        return []
    if not call.is_dataset_of_user:
        return [f"{type(adapter).__name__}, that is Python of this process"]
    return unrepeatable_parts(dataset) + unrepeatable_functions(dataset)


def _check_is_repeatable(reasons: list[str], hosts: int) -> None:
    if reasons:
        raise ValueError(
            f"Each of the {hosts} hosts of a TPU Pod reads the input for its cores, and all have "
            f"to read the same. Received: {', '.join(reasons)}. Give what shuffles and draws a "
            "seed (or call keras.utils.set_random_seed before the dataset is made), and batches as "
            "a tf.data.Dataset of files or arrays."
        )
