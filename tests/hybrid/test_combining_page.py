"""What the page "Combining" says of pairs of axes, and of what is refused, is what happens."""

import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.helpers import assert_same_training, cpu_mesh_of, train
from tests.hybrid import matrix_of_features
from tests.hybrid.meshes import PAIRS, hybrid
from tests.tensor_parallel.layouts import LayoutOfAnything
from tfparallel import HybridStrategy, MemoryPolicy, PipelineOptions, PipelineStrategy, Sharding
from tfparallel.communication.compression.names import as_compressor
from tfparallel.communication.local_sgd import LocalSGD, as_meeting
from tfparallel.hybrid.mesh_over_processes import laid_over_processes
from tfparallel.hybrid.processes_of_job import GradientsCrossing
from tfparallel.mesh import ALIASES, mesh_of
from tfparallel.replicas.inner import inside_of

PAGE = (Path(__file__).parents[2] / "docs" / "combining.md").read_text()


def table(first_heading):
    """The cells of each row of the table that begins with it."""
    lines = iter(PAGE.splitlines())
    for line in lines:
        if line.startswith(f"| {first_heading}".rstrip() + " |"):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def fitted(strategy, *stack, **compile_options):
    with strategy.scope():
        model = keras.Sequential([keras.Input(batch_shape=(8, 4, 3)), *stack, layers.Dense(2)])
        model.compile("sgd", "mse", **compile_options)
    model.fit(np.ones((8, 4, 3)), np.ones((8, *model.output_shape[1:])), verbose=0)


class Halved(layers.Dense):
    """Assigns its own weight."""

    def call(self, x):
        self.kernel.assign(self.kernel / 2)
        return super().call(x)


def rounds():
    """One worker has no rounds, so that this takes the place of several."""
    several = types.SimpleNamespace(_meets_every_step=as_meeting(LocalSGD(2)) is None)
    inside_of(None, PipelineStrategy(["CPU:0", "CPU:1"], 2), several)


# By the first cell of a row of the page: what it says is refused.
REFUSED = {
    "`BatchNormalization(synchronized=True)`": [
        lambda: fitted(hybrid({"pipeline": 2}), layers.BatchNormalization(synchronized=True)),
    ],
    "a layer that assigns its own weight, if that is in parts": [
        lambda: fitted(hybrid({"pipeline": 2, "model": 2}), Halved(8, name="dense_0")),
        lambda: fitted(hybrid({"shard": 2, "pipeline": 2}), Halved(8, name="dense_0")),
        lambda: fitted(hybrid({"shard": 2, "model": 2}), Halved(8, name="dense_0")),
    ],
    "`LocalSGD`, `DiLoCo`": [rounds],
    "`jit_compile=True`": [
        lambda sizes=sizes: fitted(hybrid(sizes), layers.Dense(3), jit_compile=True)
        for sizes in ({"pipeline": 2}, {"data": 2}, {"shard": 2}, {"model": 2})
    ],
    "`stateful=True` of recurrent layers": [
        lambda sizes=sizes: fitted(hybrid(sizes), layers.LSTM(4, stateful=True))
        for sizes in ({"data": 2}, {"shard": 2}, {"pipeline": 2})
    ],
    "layers that draw in their own way": [
        lambda: fitted(
            hybrid({"data": 2}, seed_by="row"), layers.Reshape((2, 2, 3)), layers.RandomFlip()
        ),
    ],
    "`units`, `prefetch`, `reshard_after_forward`, `gather_dtype`": [
        lambda sizes=sizes, option=option: HybridStrategy(
            cpu_mesh_of(**sizes),
            shard=Sharding(**option),
            layout_map=LayoutOfAnything(cpu_mesh_of(**sizes)) if "model" in sizes else None,
        )
        for sizes in ({"shard": 2, "pipeline": 2}, {"shard": 2, "model": 2})
        for option in (
            {"units": "dense"},
            {"prefetch": 2},
            {"reshard_after_forward": False},
            {"gather_dtype": "bfloat16"},
        )
    ],
    '`MemoryPolicy(offload={"dense*"})`': [
        lambda: HybridStrategy(cpu_mesh_of(pipeline=2), memory=MemoryPolicy(offload={"dense*"})),
    ],
    "`num_stages`": [
        lambda: HybridStrategy(
            cpu_mesh_of(data=2, pipeline=2), pipeline=PipelineOptions(4, num_stages=2)
        ),
    ],
    'an axis "pipeline" or "model" over processes': [
        lambda axis=axis: laid_over_processes({axis: 4}, 2, 2, has_parts=False)
        for axis in ("pipeline", "model")
    ],
    "`compression`, `check_weights_every`": [
        lambda own=own: own.refuse_beside_shared_state(mesh_of([4], ["shard"], list("0123")))
        for own in (GradientsCrossing(as_compressor("fp16")), GradientsCrossing(None, 4))
    ],
    '"shard" over some of the processes, or with "data"': [
        lambda sizes=sizes, job=job: laid_over_processes(sizes, *job, has_parts=False)
        for sizes, job in (
            ({"shard": 4, "model": 2}, (2, 4)),
            ({"data": 2, "shard": 2, "pipeline": 2}, (4, 2)),
        )
    ],
    '`layout_map="auto"`': [
        lambda: HybridStrategy(cpu_mesh_of(shard=2, model=2), layout_map="auto"),
    ],
}


def test_the_page_and_this_file_name_the_same():
    assert {row[0] for row in table("refused")} == set(REFUSED)


def test_what_the_matrix_refuses_is_on_the_page():
    assert set(matrix_of_features.REFUSED.values()) <= set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_says_is_refused_is_refused(name):
    for attempt in REFUSED[name]:
        with pytest.raises((ValueError, NotImplementedError), match="Received"):
            attempt()


def test_the_page_calls_axes_what_the_code_does():
    others = {row[0].strip("`"): tuple(re.findall(r"`(\w+)`", row[1])) for row in table("axis")}
    assert others == ALIASES


def test_every_pair_of_axes_is_on_the_page_and_none_is_refused():
    rows = table("")
    assert [row[0].strip("*") for row in rows] == list(PAIRS)
    for i, row in enumerate(rows):
        for j, cell in enumerate(row[1:]):
            alone = re.fullmatch(r"`(\w+)`", cell)
            assert alone if i == j else cell == "yes"
            assert alone is None or hasattr(tfparallel, alone[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "pair", [(a, b) for i, a in enumerate(PAIRS) for b in PAIRS[i + 1 :]], ids=" x ".join
)
def test_a_pair_trains_as_one_device(pair):
    assert_same_training(train(None), train(hybrid(dict.fromkeys(pair, 2))))
