"""A microbatch goes through the stages in rounds; a tensor knows the last stage behind it."""

import tensorflow as tf

from tfparallel.pipeline.rounds import Rounds


def test_a_round_ends_when_a_forward_pass_follows_a_backward_pass():
    rounds = Rounds()
    assert [rounds.current(0), rounds.current(0), rounds.come_back(0), rounds.come_back(0)] == [
        0
    ] * 4
    assert rounds.current(1) == 0  # each microbatch on its own
    assert [rounds.current(0), rounds.current(0), rounds.come_back(0)] == [1] * 3
    assert [rounds.current(1), rounds.current(0)] == [0, 2]


def test_a_tensor_is_of_the_latest_pass_behind_it():
    rounds, found = Rounds(), {}

    @tf.function(autograph=False)
    def step(x):
        first, second = tf.exp(x), tf.sin(x)
        rounds.note(first.op, 0, 2)
        rounds.note(second.op, 1, 0)
        both = (tf.reduce_sum(first) + 1.0) * second
        for name, tensors in {
            "input": [x],
            "none": [],
            "first": [first * 2.0],
            "all": [x, both],
            "again": [tf.stop_gradient(both)],
        }.items():
            found[name] = rounds.latest(tensors)
        return both

    step.get_concrete_function(tf.TensorSpec([3]))
    assert found == {
        "input": (0, 0),
        "none": (0, 0),
        "first": (0, 2),
        "all": (1, 0),
        "again": (1, 0),
    }
