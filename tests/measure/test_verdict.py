"""The verdict names the largest loss by its cause, with a number; healthy runs raise no alarm."""

import dataclasses

import pytest

from tfparallel.measure.record import Record, StepTimes
from tfparallel.measure.shares import CATEGORIES
from tfparallel.measure.verdict import Setting, judge

PIPELINE = Setting("PipelineStrategy", stages=2, microbatches=2, batch_size=64)


def record(details=None, **seconds):
    known = {**dict.fromkeys(CATEGORIES, 0.0), **seconds}
    known["compute"] = 10.0 - sum(seconds.values())
    steps = StepTimes(0.002, 0.003, 0.01)
    return Record(0, 100, 6400, 10.0, known, steps, {}, {"traces": 1, **(details or {})})


def stage(kind, name):
    return {"input_stage": {"kind": kind, "name": name, "ms": 8.1}}


CAUSES = [
    ("input: map", record(stage("map", "Map"), input=6), Setting(), "num_parallel_calls"),
    ("input: map", record(stage("parallel map", "ParallelMapV2"), input=6), Setting(), "cache()"),
    ("input: generator", record(stage("generator", "FlatMap"), input=6), Setting(), "PyDataset"),
    ("input: files", record(stage("files", "TFRecord"), input=6), Setting(), "interleave"),
    ("input: shuffle", record(stage("shuffle", "Shuffle"), input=6), Setting(), "buffer"),
    ("input: filter", record(stage("filter", "Filter"), input=6), Setting(), "beforehand"),
    ("input: batch", record(stage("batch", "BatchV2"), input=6), Setting(), "in parallel"),
    ("input: cache", record(stage("cache", "CacheV2"), input=6), Setting(), "memory"),
    ("input: processors", record(stage("prefetch", "Prefetch"), input=6), Setting(), "wait for"),
    ("input: tf.data", record(stage("tf.data", "Zip"), input=6), Setting(), "prefetch"),
    ("input", record(input=6), Setting(), "prefetch"),
    ("input: iterators", record({"iterators_s": 3.5}, input=6), Setting(), "3.5 s in all"),
    (
        "communication: slow link",
        record({"bytes_sent": 10**7}, communication=6),
        Setting(),
        "Adaptive",
    ),
    (
        "communication: small steps",
        record({"bytes_sent": 10**10}, communication=6),
        Setting(),
        "larger batch",
    ),
    ("bubble: schedule", record(bubble=4), PIPELINE, "num_microbatches=8"),
    ("imbalance: stage", record({"slowest": "stage 1"}, imbalance=4), PIPELINE, "stage 1"),
    ("imbalance: rank", record({"slowest": "rank 3"}, imbalance=4), Setting(), "rank 3"),
    ("host: tiny batch", record(host=6), Setting(batch_size=2), "of 2 rows"),
    ("host: between epochs", record({"python_s": 1.0}, host=6), Setting(), "5.0 s in all"),
    ("host: tiny batch", record({"python_s": 5.0}, host=6), Setting(), "steps_per_execution=3"),
    ("host: tiny batch", record(host=6), Setting(steps_at_once=4), "steps_per_execution=8"),
    (
        "host: callback Sleeper",
        record({"callbacks_s": {"Sleeper": 5.0, "History": 0.1}}, host=6),
        Setting(),
        "50.0 ms a step",
    ),
    (
        "saving: BackupAndRestore",
        record({"saving_s": {"BackupAndRestore": 6.0}}, saving=6),
        Setting(),
        "30 times",
    ),
    ("tracing: retracing", record({"traces": 90}, tracing=6), Setting(), "90 traces"),
    ("run_eagerly", record(), Setting(eager=True), "graph"),
    ("threads", record(), Setting(cores=8, threads=1), "1 of 8 cores"),
]


@pytest.mark.parametrize(("cause", "measured", "setting", "told"), CAUSES)
def test_the_cause_is_named_with_its_cure(cause, measured, setting, told):
    verdict = judge(measured, setting)
    assert verdict.cause == cause
    assert told in verdict.text
    assert "%" in verdict.text or cause in ("run_eagerly", "threads")


@pytest.mark.parametrize(
    "measured",
    [
        record(),
        record(input=0.9, host=0.5),
        record(tracing=6),  # once
        record(validation=6),
        record(bubble=0.9, imbalance=0.5),
    ],
)
def test_healthy_runs_raise_no_alarm(measured):
    verdict = judge(measured, Setting(cores=8, threads=8))
    assert verdict.cause == "none"
    assert "computes" in verdict.text


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (record(input=0.5), "95% computes; the largest loss is input with 5%."),
        (
            record(tracing=6, input=0.4),
            "6.0 s tracing (paid once); of the rest 90% computes; the largest loss is "
            "input with 10%.",
        ),
        (
            record(tracing=5, validation=3),
            "5.0 s tracing (paid once) and 3.0 s validation; of the rest 100% computes; no losses.",
        ),
    ],
)
def test_what_is_paid_once_hides_nothing_of_the_rest(measured, told):
    assert judge(measured, Setting()).text == told


def test_the_largest_loss_comes_first():
    both = record(stage("map", "Map"), input=3, host=2)
    assert judge(both, Setting()).cause == "input: map"
    assert judge(
        dataclasses.replace(both, seconds={**both.seconds, "host": 4}), Setting()
    ).cause == ("host: tiny batch")


def test_rows_per_second_of_nothing():
    assert dataclasses.replace(record(), rows=None).rows_per_s is None
    assert dataclasses.replace(record(), wall_s=0.0).rows_per_s is None


def test_a_training_that_traces_every_other_step_is_told_so():
    """No step is left to compare with, so that its share of the time is a lower bound."""
    own = {**dict.fromkeys(CATEGORIES, 0.0), "compute": 9.6, "tracing": 0.4}
    told = Record(0, 20, 80, 10.0, own, details={"traces": 20})
    assert judge(told, Setting()).cause == "tracing: retracing"
    assert judge(dataclasses.replace(told, details={"traces": 3}), Setting()).cause == "none"
