"""Every test sees four logical CPU devices and a fixed seed."""

import gc
import os

# With TensorFlow's default of two inter-op threads, in-process collectives can starve and hang.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
# Tiny models gain nothing from more, and a container may see many more cores than it may use.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "2")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# Where GPUs are shown to the tests: products of float32 are those of float32, not of TF32.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# TensorFlow counts what a CPU has in use only in oneDNN's allocator, which it takes on its own on
# some CPUs (those with AVX-512 VNNI) and not on others.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import pytest
from hypothesis import HealthCheck, settings

from tests import slices
from tests.helpers import open_logical_cpus

open_logical_cpus(4)


# A random model takes seconds. `make test` always draws the same ones, `make test-all` others each
# time; a failure prints what repeats it.
_SLOW = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("same", derandomize=True, **_SLOW)
settings.register_profile("others", print_blob=True, **_SLOW)


def pytest_configure(config):
    settings.load_profile("others" if config.getoption("--everything") else "same")


def pytest_addoption(parser):
    parser.addoption(
        "--everything",
        action="store_true",
        help="also the tests marked `long`, and every conformance case of every strategy",
    )


def pytest_report_header():
    return [
        f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}, load {os.getloadavg()[0]}",
        f"slice of the tests that take turns: {slices.VARIABLE}={slices.slice_of_this_run()}",
    ]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # spare the collector what lives on: TensorFlow, Keras, the tests
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Frees a file's models at its end: where they pile up, one collection takes a minute."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what the session keeps is not looked at again


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own, which reads the groups
def pytest_collection_modifyitems(config, items):
    """What shares processes runs on one pytest worker: a strategy's cases, or a file's tests."""
    of_one_process = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if of_one_process:
        raise pytest.UsageError(
            "A test's name must be the same in every pytest worker: give `ids` without addresses. "
            f"Received: {of_one_process[0]}"
        )
    if not config.getoption("--everything"):
        number = slices.slice_of_this_run()
        left_out = [item for item in items if not slices.is_asked(item, number)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        item.add_marker(pytest.mark.xdist_group(row.name if row else item.path.name))
