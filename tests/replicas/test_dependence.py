"""Whether values depend on tensors of a graph, asked one after another while it grows."""

import functools
import random

import pytest
import tensorflow as tf

from tfparallel.replicas.dependence import Reached, reaches


def _depends(value, targets, ends):
    """By the definition."""

    @functools.cache
    def depends(at):
        given = [] if at in ends else by_id[at].op.inputs
        by_id.update({id(x): x for x in given})
        return at in targets or any(depends(id(x)) for x in given)

    by_id = {id(value): value}
    return depends(id(value))


@pytest.mark.parametrize("seed", range(20))
def test_many_searches_find_what_each_finds_alone(seed):
    choose, reached = random.Random(seed), Reached()
    with tf.Graph().as_default():
        rows = [tf.constant(1.0) for _ in range(2)]
        tensors, targets, ends = [*rows, tf.constant(0.0)], set(map(id, rows)), set()
        for number in range(80):
            tensors.append(tf.add_n(choose.choices(tensors, k=choose.randint(1, 3))))
            if number % 3 == 0:
                value = choose.choice(tensors[3:])
                depends = reached.reaches(value, targets, ends)
                assert depends == _depends(value, targets, ends) == reaches(value, targets, ends)
                if choose.random() < 0.5:  # it is assigned, as the value that this stands for
                    tensors.append(tf.stop_gradient(value))
                    ends.add(id(tensors[-1]))
                    targets |= {id(tensors[-1])} if depends else set()


def test_what_was_looked_at_is_not_looked_at_again():
    reached = Reached()
    with tf.Graph().as_default():
        row = tf.constant(1.0)
        chain = [row]
        for _ in range(50):
            chain.append(tf.identity(chain[-1]))
        assert reached.reaches(chain[-1], {id(row)})
        assert len(reached.dependent) == 50
        assert reached.reaches(tf.negative(chain[25]), set())  # by what is known alone
        assert not reached.reaches(tf.constant(2.0), {id(row)})
        reached.forget()
        assert not reached.reaches(chain[-1], set())
