"""The clock at an iterator: it counts what comes out, and a later training traces nothing anew."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel.callbacks import Measure
from tfparallel.internals.keras_trainer import graphs_of_step
from tfparallel.measure.input_wait import InputWait


def compiled(**options):
    keras.utils.set_random_seed(7)
    model = tiny_model()
    model.compile("sgd", **tiny_compile_options(), **options)
    return model


@pytest.mark.parametrize("steps", [1, 4, 6])
@pytest.mark.parametrize("is_length_known", [True, False])
def test_rows_of_steps_that_are_executed_together(steps, is_length_known):
    """Six batches of 22 rows: the last one is smaller, the last execution, too."""
    data = tf.data.Dataset.from_tensor_slices(tiny_data(22)).batch(4)
    if not is_length_known:
        data = data.filter(lambda x, y: True)
    weights = []
    for callbacks in ([], [Measure(verbose=0)]):
        model = compiled(steps_per_execution=steps)
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    assert [record.rows for record in callbacks[0].records] == [22, 22]
    if is_length_known:
        assert [record.steps for record in callbacks[0].records] == [6, 6]
    for without, measured in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, measured)


def test_a_later_training_traces_nothing():
    """Each has a clock of its own, which is no part of what a step is traced for."""
    model = compiled()
    told = []
    for _ in range(2):
        measure = Measure(verbose=0)
        model.fit(*tiny_data(12), batch_size=4, verbose=0, callbacks=[measure])
        (graph,), _ = graphs_of_step(model.train_function)
        told.append((graph.experimental_get_tracing_count(), measure.total.rows))
    assert told == [(1, 12)] * 2


RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]])
ELEMENTS = {
    "dense": np.zeros((4, 2), "float32"),
    "ragged, then dense": (RAGGED, np.zeros(4, "float32")),
    "sparse, then dense": (tf.sparse.eye(4), np.zeros(4, "float32")),
    "named": {"a": np.zeros((4, 1)), "b": np.zeros((4, 3))},
}


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("in_graph", [False, True])
def test_rows_of_elements_of_many_kinds(kind, in_graph):
    wait = InputWait()
    data = tf.data.Dataset.from_tensor_slices(ELEMENTS[kind]).batch(3)
    iterator = wait.around(iter(data))
    assert iterator.element_spec == data.element_spec

    def take(iterator):
        return iterator.get_next()

    take = tf.function(take) if in_graph else take
    for rows in (3, 4):
        took = take(iterator)
        assert wait.rows == rows
    expected = list(data)[1]
    for one, other in zip(*map(_arrays, (took, expected)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(tf.errors.OutOfRangeError):
        take(iterator)
    assert wait.rows == 4 and wait.waited_s > 0


def test_rows_of_one_iterator_after_the_other():
    """Of other ranks; of one that is not known."""
    wait = InputWait()
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([np.zeros((5, 2)), np.zeros(2)]), output_signature=tf.TensorSpec(None)
    )
    told = []
    for data in (tf.data.Dataset.range(4).batch(3), unknown, unknown.map(lambda x: (x, x))):
        for _ in wait.around(iter(data)):
            told.append(wait.rows)
    assert told == [3, 4, 9, 11, 16, 18]


def _arrays(element):
    return [each.numpy() for each in tf.nest.flatten(element, expand_composites=True)]


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_end_has_no_rows(in_graph):
    wait = InputWait()
    iterator = wait.around(iter(tf.data.Dataset.range(5).batch(3)))

    def take(iterator):
        return iterator.get_next_as_optional().has_value()

    take = tf.function(take) if in_graph else take
    assert [bool(take(iterator)) for _ in range(3)] == [True, True, False]
    assert wait.rows == 5
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_pipeline_that_only_reads_ahead_is_a_prefetch():
    wait = InputWait()
    batches = wait.around(iter(tf.data.Dataset.range(1000).prefetch(2)))
    for _ in range(100):  # of one alone, on a busy machine, its source may take longer
        next(batches)
    assert wait.slowest_stage()["kind"] == "prefetch"
