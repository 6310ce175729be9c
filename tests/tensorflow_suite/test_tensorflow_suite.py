"""TensorFlow's own tests of `tf.distribute`, which are not in its wheel, under our strategies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi_process.pool import REPOSITORY
from tests.tensorflow_suite.run import STOCK_VARIABLE

SOURCE_VARIABLE = "TENSORFLOW_SOURCE"
TIMEOUT_S = 1200
HOW = (
    "needs a checkout of TensorFlow's repository, of the version that is installed: "
    f"{SOURCE_VARIABLE}=/path/to/tensorflow make test-all"
)


# What `testUnsaveable` says where replicas update without merging, under TensorFlow's strategies,
# too. tests/replicas/test_extended.py asks ours what it asks.
SKIPPED = re.compile(r"\[ +SKIPPED +\] (\S*testUnsaveable\S*) - Unsupported combination")
PASSED = re.compile(r"\[ +OK +\] ([^\s\[]+)")  # another process may go on in the same line


def told(file: Path, log: Path, environment: dict[str, str]) -> str:
    """What the tests of `file` say, in a process with `environment`."""
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "tests.tensorflow_suite.run", str(file)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    return log.read_text()


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "name", ["strategy_gather_test", "strategy_common_test", "distributed_variable_test"]
)
def test_what_passes_under_stock_strategies_passes_under_ours(name, tmp_path):
    for module in ("dill", "portpicker", "tblib"):
        pytest.importorskip(module, reason=f"TensorFlow's tests of several processes need {module}")
    source = os.environ.get(SOURCE_VARIABLE) or pytest.skip(HOW)
    file = Path(source) / "tensorflow/python/distribute" / f"{name}.py"
    stock = set(PASSED.findall(told(file, tmp_path / "stock.log", {STOCK_VARIABLE: "1"})))
    ours = told(file, tmp_path / "ours.log", {})
    assert stock, f"No test passes under TensorFlow's own strategies: {tmp_path / 'stock.log'}"
    others = stock.difference(PASSED.findall(ours), SKIPPED.findall(ours))
    assert not others, f"{len(stock)} pass under stock. See {tmp_path / 'ours.log'}"
