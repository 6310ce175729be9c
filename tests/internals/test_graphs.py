"""Graphs under construction."""

import pytest
import tensorflow as tf

from tfparallel.internals.graphs import call_one_branch

BRANCHES = [lambda: [tf.constant(1.0), tf.zeros([2])], lambda: [tf.constant(2.0), tf.ones([2])]]


@pytest.mark.parametrize("chosen", [0, 1])
def test_one_branch_is_called_and_the_others_are_not_in_the_graph(chosen):
    @tf.function
    def choose(index):
        return call_one_branch(index, BRANCHES)

    number, vector = choose(tf.constant(chosen))
    assert number == chosen + 1 and vector.numpy().tolist() == [chosen, chosen]
    traced = choose.get_concrete_function(tf.TensorSpec([], tf.int32)).graph
    (case,) = [op for op in traced.get_operations() if "Case" in op.type]
    assert not case.get_attr("_lower_using_switch_merge")
    functions = {each.signature.name: each for each in traced.as_graph_def().library.function}
    for branch in case.get_attr("branches"):  # only what these call passes TensorFlow's optimisers
        assert {"PartitionedCall"} <= {node.op for node in functions[branch.name].node_def}


def test_a_branch_is_chosen_eagerly():
    number, vector = call_one_branch(tf.constant(1), BRANCHES)
    assert number == 2 and vector.numpy().tolist() == [1, 1]
