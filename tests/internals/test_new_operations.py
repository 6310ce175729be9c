"""Who is told of which layers, while threads construct them at once."""

import threading

import keras
import pytest
from keras import layers

from tests.helpers import tiny_data, train
from tfparallel import PipelineStrategy
from tfparallel.internals.new_operations import new_operations_told

_INIT = keras.Operation.__init__


def test_all_that_is_constructed_is_told_and_nothing_else():
    told = []
    layers.Dense(1)
    with new_operations_told(told.append):
        own = [layers.Dense(1, name="named"), layers.Dropout(0.1), keras.Sequential()]
        keras.optimizers.SGD()
    layers.Dense(1)
    assert [any(each is x for x in told) for each in own] == [True] * 3
    assert all(isinstance(each, keras.Operation) for each in told) and len(told) == 3


@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15),
    reason="Keras before 3.15 asks for open scopes in the constructor of layers only",
)
def test_operations_of_a_functional_model_are_told():
    told = []
    x = keras.Input((2,))
    with new_operations_told(told.append):
        x + 1
    assert [type(each).__name__ for each in told] == ["Add"]


def test_no_class_is_changed_while_it_lasts():
    with new_operations_told(lambda _: None):
        assert keras.Operation.__init__ is _INIT


def test_of_nested_ones_the_innermost_is_told_last():
    told = []
    with new_operations_told(lambda _: told.append("outer")):
        with new_operations_told(lambda _: told.append("inner")):
            layers.Dense(1)
        assert told == ["outer", "inner"]
        layers.Dense(1)
    assert told == ["outer", "inner", "outer"]


def test_rematerialisation_scopes_within_and_around_keep_their_meaning():
    told = []
    with keras.RematScope("full"), new_operations_told(told.append):
        around = layers.Dense(1)
        with keras.RematScope("activations"):
            within = layers.Dense(1)
    after = layers.Dense(1)
    assert [each._remat_mode and each._remat_mode.mode for each in (around, within, after)] == [
        "full",
        "activations",
        None,
    ]
    assert told == [around, within]


def test_an_error_ends_it():
    told = []
    with pytest.raises(RuntimeError), new_operations_told(told.append):
        raise RuntimeError
    layers.Dense(1)
    assert not told


def test_threads_that_construct_at_once_put_their_layers_on_their_own_stages():
    """Scopes that end in another order than they began, each in a thread of its own."""
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], 2)
    made, began, constructed = {}, threading.Barrier(3), threading.Barrier(3)
    last = threading.Event()

    def construct(stage: int):
        with strategy.stage(stage):
            began.wait()
            made[stage] = [layers.Dense(1) for _ in range(50)]
            constructed.wait()
            if stage == 0:  # the first to begin ends last
                last.wait()
        if stage == 1:
            last.set()
        made[stage, "after"] = layers.Dense(1)

    threads = [threading.Thread(target=construct, args=(stage,)) for stage in range(2)]
    for thread in threads:
        thread.start()
    began.wait()
    made["elsewhere"] = [layers.Dense(1) for _ in range(50)]
    constructed.wait()
    for thread in threads:
        thread.join()
    stage_of = strategy.extended._placement._stage_of
    for stage in range(2):
        assert {stage_of[layer] for layer in made[stage]} == {stage}
        assert made[stage, "after"] not in stage_of
    assert not any(layer in stage_of for layer in made["elsewhere"])
    assert keras.Operation.__init__ is _INIT


def test_a_model_put_on_stages_trains():
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], 2)

    def build():
        with strategy.stage(0):
            first = layers.Dense(4, activation="tanh")
        with strategy.stage(1):
            second = layers.Dense(3)
        return keras.Sequential([keras.Input((6,)), first, second])

    training = train(strategy, build=build, data=tiny_data)
    assert list(strategy.stages(training.model).stage_of) == [0, 1]
