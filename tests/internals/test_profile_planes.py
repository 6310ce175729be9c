"""What is read of planes: of a TPU as they are documented, and of XLA programs on CPUs."""

import itertools
import re
import time

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tests.internals.planes_of_a_tpu import BEGAN_NS, space_of_two_cores
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.internals.profile_planes import ProgramPlanes, instructions, read_profile


def in_ms(ran):
    """Name, type, begin and end, by device."""
    found = {}
    for each in ran:
        times = [round((at - BEGAN_NS * 1e-9) * 1e3, 2) for at in (each.start_s, each.end_s)]
        found.setdefault(each.device, []).append((each.name, each.operation, *times))
    return found


CORE = [
    ("", "infeed", 0, 1),
    ("dense/MatMul", "convolution fusion", 1, 4),
    ("", "while", 4, 4.5),
    ("while/body/Tanh", "loop fusion", 4.5, 6.5),
    ("", "while", 6.5, 7),
    ("", "all-reduce", 7, 9),
    ("adam/Mul_3", "loop fusion", 9, 11),
]
BESIDE = [("", "all-gather-start", 1, 3.5), ("", "copy-start", 5, 6)]


def later(expected):
    return [(name, operation, begin + 1, end + 1) for name, operation, begin, end in expected]


def test_instructions_of_cores_are_read_and_nothing_else(tmp_path):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(space_of_two_cores().SerializeToString())
    profile = read_profile(path)
    assert profile.end_s - profile.start_s == pytest.approx(0.1, rel=1e-5)
    assert in_ms(profile.ran) == {
        "TPU:0": CORE,
        "TPU:0 async": BESIDE,
        "TPU:1": later(CORE),
        "TPU:1 async": later(BESIDE),
        "TPU:0 SparseCore 1": [("", "gather", 2, 3)],
    }


def test_lines_that_count_from_1970_are_read_alike():
    """TensorFlow subtracts when the profiler began of lines that begin later; others are as is."""
    space = space_of_two_cores()
    (plane,) = [each for each in space.planes if each.name == "/device:TPU:1"]
    for line in plane.lines:
        line.timestamp_ns += BEGAN_NS
    assert in_ms(instructions(plane, BEGAN_NS))["TPU:1"] == later(CORE)


# XLA writes instructions of CPUs to the lines of the host's threads, without categories.
CPUS = ProgramPlanes(re.compile(r"/host:(CPU)"), re.compile(".*"), re.compile("none"), "hlo_op")


@pytest.fixture(scope="module")
def program_of_a_core():
    """The step that each core of a TPU runs, as an XLA program of the CPU, and a batch."""
    strategy = CpuStrategy(num_cores=1)
    batch = tf.nest.map_structure(tf.constant, tiny_data(8))
    with strategy.scope():
        model = tiny_model()
        model.compile("adam", **tiny_compile_options())
        model._symbolic_build(data_batch=batch)
        model.optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True, autograph=False)
    def step(batch):
        return strategy.run(model.train_step, args=(batch,))

    step(batch)
    return step, batch


def test_instructions_that_xla_has_run_on_a_cpu_are_those_of_its_program(
    program_of_a_core, tmp_path
):
    step, batch = program_of_a_core
    tf.profiler.experimental.start(str(tmp_path))
    began_s = time.time()
    for _ in range(2):
        step(batch)
    ended_s = time.time()
    tf.profiler.experimental.stop()
    (path,) = tmp_path.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    began_ns = round(read_profile(path).start_s * 1e9)
    ran = [each for plane in space.planes for each in instructions(plane, began_ns, CPUS)]
    program = step.experimental_get_compiler_ir(batch)(stage="optimized_hlo")
    named = {name.partition(".")[0] for name in re.findall(r"%([\w.-]+) = ", program)}
    assert {each.operation for each in ran} <= named
    products = [each for each in ran if each.operation.startswith("MatMul")]
    assert len(products) == 2 * 5  # of two layers: forward, of weights, and of what the second gets
    assert min(each.start_s for each in ran) >= began_s - 1e-3
    assert max(each.end_s for each in ran) <= ended_s + 1e-3
    in_order = sorted(ran, key=lambda each: each.start_s)
    for before, after in itertools.pairwise(in_order):
        assert before.end_s <= after.start_s + 1e-6
