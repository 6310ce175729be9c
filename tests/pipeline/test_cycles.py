"""Operations that wait for one another in a circle are found before TensorFlow hangs on them."""

import tensorflow as tf

from tfparallel.pipeline.cycles import has_cycle


def chain() -> tuple[tf.Graph, list[tf.Operation]]:
    with tf.Graph().as_default() as graph:
        a = tf.constant(1.0)
        b = a + 1.0
        c = b * 2.0
    return graph, [a.op, b.op, c.op]


def test_a_chain_has_none_also_with_an_edge_along_it():
    graph, (first, _, last) = chain()
    assert not has_cycle(graph)
    assert not has_cycle(graph, [(first, last)])


def test_an_edge_against_inputs_makes_one():
    graph, (_, second, last) = chain()
    assert has_cycle(graph, [(last, second)])


def test_edges_alone_make_one():
    graph, (first, *_) = chain()
    with graph.as_default():
        other = tf.constant(0.0).op
    assert has_cycle(graph, [(first, other), (other, first)])
