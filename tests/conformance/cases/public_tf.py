"""TensorFlow's own tests of a strategy, from the library that its wheel ships."""

import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib

from tests.conformance.case import CASES, Case, Run


class V1Names:
    """A strategy under the older names that `strategy_test_lib` still uses."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy

    def __getattr__(self, name: str):
        return getattr(self._strategy, name)

    def make_input_fn_iterator(self, input_fn):
        return _Iterator(self._strategy.distribute_datasets_from_function(input_fn))

    def experimental_run(self, fn, iterator):
        return self._strategy.run(fn, args=(next(iterator),))

    def unwrap(self, value):
        return self._strategy.experimental_local_results(value)


class _Iterator:
    def __init__(self, distributed):
        self._iterator = iter(distributed)

    def initialize(self):
        return []

    def __next__(self):
        return next(self._iterator)


def _any(run: Run) -> bool:
    return True


def _one_process(run: Run) -> bool:
    return run.row.num_workers == 1


def _mixin(run: Run):
    return {
        1: strategy_test_lib.OneDeviceDistributionTestBase,
        2: strategy_test_lib.TwoDeviceDistributionTestBase,
    }.get(run.row.num_replicas)


# Name in strategy_test_lib: which rows it applies to. Left out: tests of graph mode and of V1.
COMMON = {
    "_test_minimize_loss_eager": _any,
    "_test_replica_id": _one_process,  # counts replicas of this process from 0
    "_test_call_and_merge_exceptions": _any,
    "_test_global_step_update": _any,
    "_test_trainable_variable": _any,
    "_test_summary_for_replica_zero_only": _one_process,  # expects replica 0's file here
}
BY_NUMBER_OF_DEVICES = [
    "_test_run",
    "_test_all_reduce_sum",
    "_test_all_reduce_sum_gradient_tape",
    "_test_all_reduce_mean",
    "_test_all_reduce_mean_gradient_tape",
]


def _run_common(run: Run, name: str, applies) -> None:
    if applies(run) and run.strategy:
        test = started(strategy_test_lib.DistributionTestBase)
        getattr(test, name)(V1Names(run.strategy))


def _run_by_number_of_devices(run: Run, name: str) -> None:
    mixin = _mixin(run)
    if mixin and _one_process(run) and run.strategy:
        getattr(started(mixin), name)(V1Names(run.strategy))


def _dataset_from_function(run: Run) -> None:
    """Every replica draws its own element, and the iterable can be started again."""
    if not _one_process(run) or not run.strategy:
        return
    replicas = run.row.num_replicas
    test = started(strategy_test_lib.DistributionTestBase)
    input_fn = test._input_fn_to_test_input_context(
        lambda: tf.data.Dataset.range(3 * replicas),
        expected_num_replicas_in_sync=replicas,
        expected_num_input_pipelines=1,
        expected_input_pipeline_id=0,
    )
    expected = [[step * replicas + i for i in range(replicas)] for step in range(3)]
    test._test_input_fn_iterable(run.strategy, input_fn, expected)


def started(test_class: type):
    test = test_class()
    test.setUp()
    return test


def _add(name: str, function) -> None:
    CASES[name] = Case(name, function, core=True, claims=True, atol=0.0)


for _name, _applies in COMMON.items():
    _add(
        f"public_tf.{_name.removeprefix('_test_')}",
        lambda run, name=_name, applies=_applies: _run_common(run, name, applies),
    )
for _name in BY_NUMBER_OF_DEVICES:
    _add(
        f"public_tf.{_name.removeprefix('_test_')}",
        lambda run, name=_name: _run_by_number_of_devices(run, name),
    )
_add("public_tf.dataset_from_function", _dataset_from_function)
