"""Random `tf.data` pipelines over numbers, made of steps that have a state to go back to."""

import tensorflow as tf


def numbers(count=23):
    return tf.data.Dataset.range(count)


STEPS = {
    "shuffle": lambda d, n: d.shuffle(2 + n),
    "shuffle once": lambda d, n: d.shuffle(2 + n, reshuffle_each_iteration=False),
    "map": lambda d, n: d.map(lambda x: x * 2 + n),
    "parallel map": lambda d, n: d.map(lambda x: x + n, num_parallel_calls=2),
    "prefetch": lambda d, n: d.prefetch(1 + n),
    "repeat": lambda d, n: d.repeat(1 + n % 2),
    "take": lambda d, n: d.take(12 + n),
    "interleave": lambda d, n: d.interleave(
        lambda x: tf.data.Dataset.from_tensors(x).repeat(2), cycle_length=2 + n
    ),
    "cache": lambda d, n: d.cache(),
    "rejection_resample": lambda d, n: d.rejection_resample(
        lambda x: tf.cast(x % 2, tf.int32), [0.5, 0.5], [0.5, 0.5], seed=3
    ).map(lambda _, x: x),
}


def built(pipeline):
    """The pipeline of steps before the batch, its size, and steps after it."""
    before, batch_size, after = pipeline
    dataset = numbers(15)
    for name, n in before:
        dataset = STEPS[name](dataset, n)
    dataset = dataset.take(30).batch(batch_size)
    for name, n in after:
        dataset = STEPS[name](dataset, n)
    return dataset
