"""Writes docs/worth_it.md: one measured training per cause, before and after what helps.

    python benchmarks/worth_it.py                 # all, 10 minutes; links need root
    python benchmarks/worth_it.py --only map link # measured again, others as in worth_it.json

Trainings of one process run in this one, others as in `measure.py`. Pictures go to
docs/images/worth_it, figures to benchmarks/worth_it.json.
"""

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import measure  # noqa: E402
import measure_causes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tfparallel.measure.plots import COLOURS  # noqa: E402

DOCS = FOLDER.parent / "docs"
FIGURES = FOLDER / "worth_it.json"


@dataclass(frozen=True)
class Example:
    """One cause.

    Attributes:
        fault: its name in `measure_causes.FAULTS`, and of what helps in `CURED`.
        slug: of its picture.
        title, words: what it is.
        before, after: code.
    """

    fault: str
    slug: str
    title: str
    words: str
    before: str
    after: str


EXAMPLES = (
    Example(
        "map, one thread",
        "map",
        "The devices wait for data",
        "A map that takes longer than a step, one batch after the other.",
        "dataset.map(decode)",
        "options.threading.private_threadpool_size = 16   # where the map waits, not computes\n"
        "dataset.map(decode, num_parallel_calls=16).prefetch(16).with_options(options)",
    ),
    Example(
        "tiny batch",
        "tiny_batch",
        "Steps are so short that Python takes longer",
        "One row a step. The second picture is of 64 rows a step, so it is a step of 64 times the "
        "work. This model is so small that Python still takes longer: larger batches would be "
        "faster still.",
        "dataset.batch(1)",
        "dataset.batch(64)",
    ),
    Example(
        "callback sleeps at the end",
        "callback",
        "A callback holds up each step",
        "Logging after each batch, which takes longer than a step.",
        "def on_train_batch_end(self, batch, logs=None): self.log_images()",
        "def on_train_batch_end(self, batch, logs=None):\n"
        "    if batch % 20 == 19: self.log_images()",
    ),
    Example(
        "ModelCheckpoint",
        "saving",
        "Saving too often",
        "Weights are written after each batch.",
        "ModelCheckpoint(path, save_freq=1)",
        "ModelCheckpoint(path, save_freq=500)   # or BackupAndRestore, which writes beside",
    ),
    Example(
        "retracing",
        "tracing",
        "The step is traced again and again",
        "Something makes Keras trace its step anew: here a callback, at each third batch; "
        "elsewhere shapes that differ, or Python numbers.",
        "def on_train_batch_end(self, batch, logs=None):\n"
        "    if batch % 3 == 2: self.model.make_train_function(force=True)",
        "# traced once: no such callback",
    ),
    Example(
        "run_eagerly",
        "eager",
        "Debugging was left on",
        "Python runs each operation.",
        "model.compile(..., run_eagerly=True)",
        "model.compile(...)",
    ),
    Example(
        "one thread",
        "threads",
        "One core works, the others look on",
        "A variable of the environment, often set by a scheduler or a container.",
        "TF_NUM_INTRAOP_THREADS=1 python train.py",
        "python train.py",
    ),
    Example(
        "few microbatches",
        "bubble",
        "A pipeline that is empty a third of the time",
        "Two stages and two microbatches: at its beginning and end one stage waits for the other. "
        "Layers sleep for each row here, as if each stage had a device of its own: logical CPUs "
        "share their cores, and gain nothing. Where passes of few rows take as long as those of "
        "many, as of small layers, more microbatches are slower: compare samples/s.",
        "PipelineStrategy(2, num_microbatches=2)",
        "PipelineStrategy(2, num_microbatches=8)",
    ),
    Example(
        "unbalanced partition",
        "stage",
        "One stage of a pipeline has more to do",
        "Four layers that take alike, as above by the row, one of them on the first stage and "
        "three on the second: the first one waits.",
        'PipelineStrategy(2, num_microbatches=8, partition=[["first", "later_1"], ["later_*"]])',
        "PipelineStrategy(2, num_microbatches=8)   # divided by what layers take",
    ),
    Example(
        "data of one rank",
        "rank",
        "All wait for one rank",
        "The data of the second of two ranks come late: the first one waits in the all-reduce, and "
        "its screen names the second.",
        "# rank 1 reads from a slower disk",
        "# as fast as the others",
    ),
    Example(
        "link of 100 Mbit/s",
        "link",
        "The link is slow",
        "Two hosts, 100 Mbit/s between them, gradients of 3 MB.",
        "MultiWorkerMirroredStrategy()",
        'MultiWorkerMirroredStrategy(compression="power_sgd")',
    ),
)

HEAD = """# Is it worth it?

Is a parallel program better than one device, and if not, why? `Measure` trains a second model like
yours on one device for a moment, and prints speed-up and efficiency beside the shares of the time:

```python
measure = tfparallel.callbacks.Measure(one_device_rows_per_s="measure")
model.fit(dataset, epochs=2, callbacks=[measure])   # speed-up 1.72 of 2, efficiency 86%
```

Then read the verdict, do what it says, and measure again. Devices that share the same cores, such
as logical CPUs, are no faster together than one: they are for trying things out.

Below, one training for each cause, with what `Measure` said of it, and the same after the cure.
Pictures show where the time of a step goes, in milliseconds. Made by
`python benchmarks/worth_it.py` on 2 CPU cores, {dates}. The model is small, a step takes 3 ms, so
what is left after a cure is often Python between the steps. Where figures come from: [Where the
time goes](measure.md).
"""


def main() -> None:
    """Measures what is asked for, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    args = parser.parse_args()
    measure_causes.open_cpus(2)
    known: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for example in EXAMPLES:
        is_asked = any(each in example.fault for each in args.only)
        if not is_asked and (args.only or example.fault in known):
            continue
        date = datetime.date.today().isoformat()
        measured = [_measured(example.fault, is_cured) for is_cured in (False, True)]
        pair = [{**each, "date": date} for each in measured]
        known[example.fault] = pair
        FIGURES.write_text(json.dumps(known, indent=1))
        print(f"{example.fault}: {pair[0]['cause']}, then {pair[1]['cause']}", flush=True)
    (DOCS / "images" / "worth_it").mkdir(exist_ok=True)
    for example in EXAMPLES:
        if example.fault in known:
            _draw(known[example.fault], DOCS / "images" / "worth_it" / f"{example.slug}.png")
    (DOCS / "worth_it.md").write_text(_page(known))


def _measured(fault: str, is_cured: bool) -> dict[str, Any]:
    if fault == "one thread" or fault in measure_causes.OF_RANKS:
        return measure.training(fault, is_cured)
    with tempfile.TemporaryDirectory() as folder:
        return measure_causes.run(fault, Path(folder), is_cured)


def _page(known: Mapping[str, Any]) -> str:
    shown = [example for example in EXAMPLES if example.fault in known]
    dates = sorted({known[example.fault][0]["date"] for example in shown})
    sections = [_section(example, known) for example in shown]
    return "\n".join([HEAD.format(dates=" and ".join(dates)), *sections])


def _section(example: Example, known: Mapping[str, Any]) -> str:
    before, after = known[example.fault]
    speeds = [f"{each['rows_per_s']:,.0f} samples/s" for each in (before, after)]
    return f"""## {example.title}

{example.words}

```text
{example.before}
```

> {before["text"]}

```text
{example.after}
```

> {after["text"]}

{speeds[0]} before, {speeds[1]} after.

![Where the time of a step goes, before and after](images/worth_it/{example.slug}.png)
"""


def _draw(pair: list, path: Path) -> None:
    figure = Figure(figsize=(7.2, 2.2), layout="constrained")
    axes = figure.subplots()
    names = [name for name in COLOURS if any(each["shares"][name] >= 0.01 for each in pair)]
    left = [0.0, 0.0]
    for name in names:
        ms = [each["seconds"][name] / each["steps"] * 1e3 for each in pair]
        axes.barh([0, 1], ms, left=left, color=COLOURS[name], label=name)
        left = [a + b for a, b in zip(left, ms, strict=True)]
    axes.set_yticks([0, 1], ["before", "after"])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper left", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
