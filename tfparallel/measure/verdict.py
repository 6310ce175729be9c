"""One or two sentences: what costs the most time besides computing, and what would help.

Rules only, in plain Python: each category has causes, and each cause a cure with its number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfparallel.measure.record import MANY_TRACES, Record

ALARM = 0.10  # of the wall time: less is left alone
_TINY_STEP_S = 0.005
_SLOW_MBIT_PER_S = 900.0


@dataclass(frozen=True)
class Setting:
    """What a training runs on, as far as advice depends on it.

    Attributes:
        strategy: the name of its class; "none" without one.
        num_devices: that compute.
        batch_size: rows of a step; None where that is not known.
        microbatches, stages: of a pipeline.
        cores: that this process has.
        threads: that TensorFlow may use within an operation; 0: it chooses.
        eager: whether `run_eagerly` is set.
        steps_at_once: `steps_per_execution`.
        gpus: whether a device is one.
    """

    strategy: str = "none"
    num_devices: int = 1
    batch_size: int | None = None
    microbatches: int = 0
    stages: int = 0
    cores: float = 1.0
    threads: int = 0
    eager: bool = False
    steps_at_once: int = 1
    gpus: bool = False


@dataclass(frozen=True)
class Verdict:
    """What costs the most.

    Attributes:
        cause: a word for it, such as "input: map"; "none" of a healthy run.
        share: of the wall time.
        text: one or two sentences.
    """

    cause: str
    share: float
    text: str


def judge(record: Record, setting: Setting) -> Verdict:
    """The largest loss and its cure; "none" where every loss is below `ALARM`.

    The first trace is no alarm: it is paid once. Nor is validation, which was asked for.
    """
    losses = {name: record.share(name) for name in _JUDGES}
    traces = record.details.get("traces", 0)
    if setting.eager:
        return _eager(record)
    if traces <= MANY_TRACES:
        losses.pop("tracing")
    elif (
        2 * traces * setting.steps_at_once >= record.steps
    ):  # no step is left to compare with: the share is a lower bound
        cause, text = _tracing(record, setting, record.details)
        return Verdict(f"tracing: {cause}", losses["tracing"], text)
    name = max(losses, key=losses.__getitem__)
    if losses[name] >= ALARM:
        cause, text = _JUDGES[name](record, setting, record.details)
        return Verdict(f"{name}: {cause}" if cause else name, losses[name], text)
    if setting.threads and setting.threads * 2 <= setting.cores:
        return _few_threads(record, setting)
    return Verdict("none", losses[name], _healthy(record, name))


def _healthy(record: Record, largest: str) -> str:
    """What computes, of all but what is paid once and validation, where those are much."""
    once_s, validation_s = record.once_s, record.seconds["validation"]
    rest_s, start = record.wall_s, ""
    if once_s + validation_s >= ALARM * record.wall_s:
        rest_s = max(record.wall_s - once_s - validation_s, 1e-9)
        apart = {"tracing (paid once)": once_s, "validation": validation_s}
        told = [f"{seconds:.1f} s {name}" for name, seconds in apart.items() if seconds > 0]
        start = f"{' and '.join(told)}; of the rest "
    loss_s = record.seconds[largest]
    loss = f"the largest loss is {largest} with {loss_s / rest_s:.0%}" if loss_s else "no losses"
    return f"{start}{record.seconds['compute'] / max(rest_s, 1e-9):.0%} computes; {loss}."


def _percent(record: Record, category: str) -> str:
    return f"{record.share(category):.0%} of the time"


def _per_step_ms(record: Record, category: str) -> float:
    return record.seconds[category] / max(1, record.steps) * 1e3


def _input(record: Record, setting: Setting, details: Mapping[str, Any]) -> tuple[str, str]:
    stage = details.get("input_stage") or {}
    kind, each_ms = stage.get("kind", ""), stage.get("ms", 0.0)
    iterators_s = details.get("iterators_s", 0.0)
    if iterators_s > record.seconds["input"] / 2:
        return "iterators", (
            f"{_percent(record, 'input')} passes before first steps of epochs, {iterators_s:.1f} s "
            "in all: each makes an iterator. Longer epochs pay it less often: repeat() of tf.data "
            "with steps_per_epoch, a larger len() of a PyDataset."
        )
    start = (
        f"{_percent(record, 'input')} waits for data, {_per_step_ms(record, 'input'):.1f} ms a step"
    )
    if not kind:
        return "", f"{start}. A tf.data pipeline with prefetch(AUTOTUNE) would hide it."
    cause, cure = _INPUT_CURES.get(kind, ("tf.data", "prefetch(tf.data.AUTOTUNE) would hide it."))
    return cause, (
        f"{start}: the slowest stage of the input is {stage.get('name', kind)}, {each_ms:.1f} ms "
        f"an element. {cure}"
    )


_PARALLEL_MAP = "With num_parallel_calls=tf.data.AUTOTUNE several rows are mapped at once."
_INPUT_CURES = {
    "map": ("map", _PARALLEL_MAP),
    "parallel map": (
        "map",
        "All cores are at it: make the function cheaper, cache() its result, or do it beforehand.",
    ),
    "generator": (
        "generator",
        "Python makes one element at a time: keras.utils.PyDataset(workers=...), or tf.data of "
        "arrays or files, makes several.",
    ),
    "files": (
        "files",
        "interleave(num_parallel_calls=tf.data.AUTOTUNE) reads several files at once.",
    ),
    "shuffle": ("shuffle", "A smaller shuffle buffer is full sooner, in each epoch."),
    "batch": ("batch", "batch(num_parallel_calls=tf.data.AUTOTUNE) copies rows in parallel."),
    "filter": ("filter", "Filter beforehand, or cache() what is left."),
    "cache": ("cache", "A cache that fits into memory is read faster than a file."),
    "prefetch": (
        "processors",
        "Batches are read ahead already, and no stage computes longer: their threads wait for "
        "processors, which steps or other programs take.",
    ),
    "python": ("generator", "tf.data of arrays or files makes batches beside the step."),
}


def _communication(record: Record, setting: Setting, details: Mapping[str, Any]) -> tuple[str, str]:
    sent = details.get("bytes_sent", 0)
    if not sent:  # Horovod does not tell
        return "small steps", (
            f"{_percent(record, 'communication')} waits for sums of gradients. A larger batch "
            "computes longer for the same bytes; compression= sends fewer."
        )
    # What is hidden has taken time on the link, too; what waited for others has not.
    hidden_s = details.get("collectives_s", 0.0) - record.seconds["communication"]
    hidden_s -= record.seconds["imbalance"]
    seconds = max(record.seconds["communication"] + max(0.0, hidden_s), 1e-9)
    mbit_per_s = sent * 8e-6 / seconds
    each_step_mb = sent / max(1, record.steps) / 1e6
    text = (
        f"{_percent(record, 'communication')} sends gradients, {each_step_mb:.1f} MB a step at "
        f"{mbit_per_s:,.0f} Mbit/s. "
    )
    if mbit_per_s < _SLOW_MBIT_PER_S:
        return "slow link", text + (
            "compression=tfparallel.compression.Adaptive() measures how much to compress here."
        )
    return "small steps", text + "A larger batch computes longer for the same bytes."


def _bubble(record: Record, setting: Setting, details: Mapping[str, object]) -> tuple[str, str]:
    more = max(2 * setting.microbatches, 4 * setting.stages)
    rows = None if setting.batch_size is None else max(1, setting.batch_size // more)
    of = "fewer rows" if rows is None else f"{rows} rows"
    ideal = (setting.stages - 1) / max(1, more + setting.stages - 1)
    return "schedule", (
        f"{_percent(record, 'bubble')} is the pipeline's bubble: {setting.stages} stages, "
        f"{setting.microbatches} microbatches. num_microbatches={more} would leave {ideal:.0%}, "
        f"and is faster where passes of {of} take as much less time: compare samples/s."
    )


def _imbalance(record: Record, setting: Setting, details: Mapping[str, object]) -> tuple[str, str]:
    who = details.get("slowest", "the slowest one")
    if setting.stages:
        return "stage", (
            f"{_percent(record, 'imbalance')} waits for {who}. partition='balanced' divides the "
            "layers by measured time; a layer that is slower than all others together needs more "
            "devices of its own."
        )
    return "rank", (
        f"{_percent(record, 'imbalance')} waits for {who}. Is another program running there, or "
        "are its cores fewer or its rows more? `tfparallel doctor` on that host says."
    )


def _host(record: Record, setting: Setting, details: Mapping[str, Any]) -> tuple[str, str]:
    callbacks: Mapping[str, float] = details.get("callbacks_s", {})
    start = f"{_percent(record, 'host')} is Python between and before the steps"
    if callbacks:
        name = max(callbacks, key=callbacks.__getitem__)
        if callbacks[name] >= record.seconds["host"] / 2:
            each = callbacks[name] / max(1, record.steps) * 1e3
            return f"callback {name}", (
                f"{start}: {callbacks[name]:.1f} s of it in the callback {name}, {each:.1f} ms a "
                "step. Call it less often, or let it do its work on a thread."
            )
    between_s = record.seconds["host"] - details.get("python_s", record.seconds["host"])
    if between_s - sum(callbacks.values()) >= record.seconds["host"] / 2:
        return "between epochs", (
            f"{_percent(record, 'host')} is Python between epochs, {between_s:.1f} s in all: Keras "
            "ends one, and begins the next and its validation. Longer epochs pay it less often."
        )
    at_once = max(2, math.ceil(_TINY_STEP_S / max(record.step.median, 1e-6)))
    at_once = max(at_once, 2 * setting.steps_at_once)
    size = "" if setting.batch_size is None else f" of {setting.batch_size} rows"
    return "tiny batch", (
        f"{start}: a step{size} takes {record.step.median * 1e3:.1f} ms. A larger batch, or "
        f"steps_per_execution={at_once}, pays it less often."
    )


def _saving(record: Record, setting: Setting, details: Mapping[str, Any]) -> tuple[str, str]:
    saves: Mapping[str, float] = details.get("saving_s", {})
    name = max(saves, key=saves.__getitem__, default="saving")
    rarer = max(2, math.ceil(record.share("saving") / 0.02))
    return name, (
        f"{_percent(record, 'saving')} saves ({name}). Saving {rarer} times less often costs 2 %; "
        "BackupAndRestore writes beside the training."
    )


def _tracing(record: Record, setting: Setting, details: Mapping[str, object]) -> tuple[str, str]:
    return "retracing", (
        f"{_percent(record, 'tracing')} traces: {details.get('traces')} traces in {record.steps} "
        "steps, as shapes or Python values differ from step to step. Batches of one shape "
        "(drop_remainder=True, padding), or tensors for Python numbers, are traced once."
    )


def _eager(record: Record) -> Verdict:
    return Verdict(
        "run_eagerly",
        record.share("compute"),
        "run_eagerly=True runs every operation from Python, a step takes "
        f"{record.step.median * 1e3:.1f} ms. Without it a step is a graph that is traced once.",
    )


def _few_threads(record: Record, setting: Setting) -> Verdict:
    return Verdict(
        "threads",
        record.share("compute"),
        f"An operation may use {setting.threads} of {setting.cores:g} cores. Unset OMP_NUM_THREADS "
        f"and TF_NUM_INTRAOP_THREADS, or set them to {math.floor(setting.cores)}.",
    )


_JUDGES = {
    "input": _input,
    "communication": _communication,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "host": _host,
    "saving": _saving,
    "tracing": _tracing,
}
