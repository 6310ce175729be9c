"""Hooks on instances: what was there comes back, whoever put it there."""

import functools
import threading

import keras
import pytest
import tensorflow as tf

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel import MirroredStrategy, PipelineStrategy
from tfparallel.internals.hooks import (
    hook_next_call,
    hook_once,
    is_hooked,
    shadowed,
    wrapped,
)

_FOR = {"during": "a test", "why": "a test"}


class Greeter:
    def greet(self, name: str) -> str:
        return f"hello {name}"


def _louder(original, name):
    return original(name) + "!"


def test_what_the_class_has_is_back_afterwards():
    greeter = Greeter()
    with shadowed(greeter, "greet", wrapped(greeter, "greet", _louder), **_FOR):
        assert greeter.greet("a") == "hello a!"
        assert Greeter().greet("a") == "hello a"
    assert greeter.greet("a") == "hello a"
    assert "greet" not in vars(greeter)


def test_what_a_user_set_on_the_instance_is_back_afterwards():
    greeter = Greeter()
    greeter.greet = own = lambda name: f"moin {name}"
    with shadowed(greeter, "greet", wrapped(greeter, "greet", _louder), **_FOR):
        assert greeter.greet("a") == "moin a!"
    assert greeter.greet is own


def test_none_that_was_on_the_instance_is_back_afterwards():
    greeter = Greeter()
    greeter.greet = None
    with shadowed(greeter, "greet", _louder, **_FOR):
        pass
    assert vars(greeter) == {"greet": None}


def test_nested_hooks_are_undone_last_in_first_out():
    greeter = Greeter()
    with shadowed(greeter, "greet", wrapped(greeter, "greet", _louder), **_FOR):
        outer = greeter.greet
        with shadowed(greeter, "greet", wrapped(greeter, "greet", _louder), **_FOR):
            assert greeter.greet("a") == "hello a!!"
        assert greeter.greet is outer
    assert not vars(greeter)


def test_an_error_undoes_a_hook():
    greeter = Greeter()
    with pytest.raises(RuntimeError), shadowed(greeter, "greet", _louder, **_FOR):
        raise RuntimeError
    assert not vars(greeter)


def test_a_hook_that_stays_is_put_once():
    greeter = Greeter()
    for _ in range(2):
        hook_once(greeter, "greet", wrapped(greeter, "greet", _louder), why="a test")
    assert greeter.greet("a") == "hello a!"
    with shadowed(greeter, "greet", wrapped(greeter, "greet", _louder), **_FOR):
        assert is_hooked(greeter, "greet")  # by the hook below


def test_a_hook_that_stays_goes_before_what_a_user_set():
    greeter = Greeter()
    greeter.greet = lambda name: f"moin {name}"
    hook_once(greeter, "greet", wrapped(greeter, "greet", _louder), why="a test")
    assert greeter.greet("a") == "moin a!"


def test_a_hook_of_the_next_call_puts_back_what_a_user_set():
    greeter = Greeter()
    greeter.greet = own = lambda name: f"moin {name}"
    hook_next_call(greeter, "greet", lambda name: "never called", why="a test")
    hook_next_call(greeter, "greet", lambda name: f"once {name}", why="a test")
    assert greeter.greet("a") == "once a"
    assert greeter.greet is own


# ---- the hooks of our strategies -----------------------------------------------------------------


def _strategies():
    return [MirroredStrategy(["CPU:0", "CPU:1"]), PipelineStrategy(["CPU:0", "CPU:1"], 3)]


def _model(strategy, optimizer=None) -> keras.Model:
    with strategy.scope():
        model = tiny_model()
        model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), **tiny_compile_options())
        model.build((None, 6))
    return model


def _counting(method, counts: list):
    @functools.wraps(method)
    def counted(*args, **kwargs):
        counts.append(threading.get_ident())
        return method(*args, **kwargs)

    return counted


@pytest.mark.parametrize("number", range(2))
def test_what_a_user_set_on_model_loss_and_metrics_is_used_and_stays(number):
    model, x_y = _model(_strategies()[number]), tiny_data(13)
    model.fit(*x_y, batch_size=13, verbose=0)
    objects = [(model, "get_metrics_result")]
    objects += [(metric, "update_state") for metric in model.metrics]
    objects += [(metric, "result") for metric in model.metrics]
    objects += [(model, "_maybe_symbolic_build"), (model.optimizer, "apply")]
    calls: dict = {}
    for instance, name in objects:
        counts = calls[id(instance), name] = []
        vars(instance)[name] = _counting(getattr(instance, name), counts)
    own = [vars(instance)[name] for instance, name in objects]
    model.make_train_function(force=True)
    model.fit(*x_y, batch_size=13, verbose=0)
    assert all(calls.values()), [key for key, value in calls.items() if not value]
    for (instance, name), function in zip(objects, own, strict=True):
        assert vars(instance)[name] is function


def test_a_traced_step_of_a_pipeline_leaves_nothing_on_the_model():
    model = _model(_strategies()[1])
    watched = [model, model._loss_tracker, *model.metrics, *model._flatten_layers()]
    model.fit(*tiny_data(13), batch_size=13, verbose=0)
    before = [set(vars(each)) for each in watched]
    losses = model._compile_loss._flat_losses
    model.make_train_function(force=True)
    model.fit(*tiny_data(13), batch_size=13, verbose=0)
    for each, names in zip(watched, before, strict=True):
        assert set(vars(each)) == names
    assert model._compile_loss._flat_losses is losses
    for metric in (model._loss_tracker, model._compile_metrics):
        assert "update_state" not in vars(metric)


def test_a_hook_of_the_step_gives_back_the_one_of_the_stages():
    """The pipeline's hook on the loss tracker is there again when the step's is gone."""
    from tfparallel.pipeline.staged_losses import staged_losses
    from tfparallel.replicas.model_hooks import hooked

    strategy = _strategies()[0]
    model = _model(strategy)
    model.fit(*tiny_data(13), batch_size=13, verbose=0)
    with staged_losses(model, lambda name, function, arguments: function(*arguments)):
        staged = vars(model._loss_tracker)["update_state"]
        with hooked(model, strategy.extended, []):
            assert vars(model._loss_tracker)["update_state"] is not staged
        assert vars(model._loss_tracker)["update_state"] is staged
    assert "update_state" not in vars(model._loss_tracker)


def test_an_optimizer_with_a_method_of_its_own_still_reduces_first():
    """What a user set on the instance before its first variable does not keep our hook away."""

    class Counted(keras.optimizers.SGD):
        def __init__(self, *args, **kwargs):
            vars(self)["apply"] = _counting(self.apply, counts)
            super().__init__(*args, **kwargs)

    def trained(strategy, is_counted):
        keras.utils.set_random_seed(1)
        kind = Counted if is_counted else keras.optimizers.SGD
        with strategy.scope():
            optimizer = kind(0.1, global_clipnorm=0.01)
        model = _model(strategy, optimizer)
        model.fit(*tiny_data(13), batch_size=13, verbose=0)
        return model.get_weights()

    counts: list = []
    alone = trained(tf.distribute.get_strategy(), False)
    distributed = trained(_strategies()[0], True)
    assert counts
    for a, b in zip(alone, distributed, strict=True):
        assert abs(a - b).max() < 1e-6
