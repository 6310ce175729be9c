"""What `tfparallel selftest` decides: how checks end, and what they call wrong."""

import asyncio
import dataclasses
import importlib
import itertools
import json
import re
import sys
import warnings

import numpy as np
import pytest
from rich.console import Console
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.docs.snippets import ROOT
from tfparallel.segments.graph_copy import GraphFunction
from tfparallel.selftest import children, exactness_checks, remote_integers
from tfparallel.selftest.catalogue import CHECKS, FIRST, REFERENCE, Check, why_not
from tfparallel.selftest.children import outcome_of, run_check, run_checks
from tfparallel.selftest.command_line import chosen_gpus, outcomes_as_json, show
from tfparallel.selftest.contenders import (
    IN_ONE_PROCESS,
    IN_SEVERAL_PROCESSES,
    XLA,
    references,
    repeated_of,
    trials_of,
)
from tfparallel.selftest.gpu_checks import (
    Copies,
    copies_of_profile,
    judge_copies,
    judge_nccl,
)
from tfparallel.selftest.machine_devices import Bench, bench_of_json
from tfparallel.selftest.one_check import MARK
from tfparallel.selftest.trials import OPTIONS, Trial, train
from tfparallel.selftest.verdicts import CheckFailedError, Outcome

CHECK = Check("a check", "module:function", cure="do this", limit_s=7)


def test_every_check_names_a_function_and_every_strategy_has_a_check():
    for check in (*FIRST, *CHECKS):
        module, _, name = check.function.partition(":")
        assert callable(getattr(importlib.import_module(f"tfparallel.selftest.{module}"), name))
        assert check.cure
    named = {check.name.removeprefix("exact: ") for check in CHECKS if "exact" in check.name}
    assert named == {*IN_ONE_PROCESS, *IN_SEVERAL_PROCESSES}


def test_the_page_shows_every_check_and_says_of_each_what_it_is_and_what_to_do():
    page = (ROOT / "docs" / "gpu.md").read_text()
    _, shown, checked, cures = re.split(
        r"^## What (?:it prints|is checked|to do)", page, flags=re.M
    )
    names = [check.name for check in (*FIRST, *CHECKS)]
    assert re.findall(r"^│ (\S.*?) +│ (?:ok|skipped) ", shown, re.M) == names
    families = {name.partition(":")[0] for name in names}
    for table in (checked, cures.partition("\n## ")[0]):
        rows = ", ".join(re.findall(r"^\| ([^|]+) \|", table, re.M)[1:])
        assert families <= {each.partition(":")[0] for each in rows.split(", ")}


def said(verdict: str, found: str = "text") -> str:
    return f"lines\n[worker 0] {MARK}" + json.dumps(
        {"verdict": verdict, "found": found, "figures": {"x": 1}}
    )


@pytest.mark.parametrize(
    ("status", "output", "verdict", "found"),
    [
        (0, said("ok"), "ok", "text"),
        (0, said("skipped"), "skipped", "text"),
        (1, said("failed"), "failed", "text"),
        (0, said("ok") + "\n" + said("failed", "later"), "failed", "later"),
        (-11, said("ok"), "failed", "ended by SIGSEGV"),
        (None, said("ok"), "failed", "no end after 7 s"),
        (3, "Traceback", "failed", "exit status 3 before it could say how it ended"),
    ],
)
def test_a_check_ends_as_its_process_does(status, output, verdict, found):
    outcome = outcome_of(CHECK, status, output, 1.0)
    assert (outcome.verdict, outcome.found) == (verdict, found)
    assert bool(outcome.cure) == bool(outcome.output) == (verdict == "failed")


def test_a_process_that_cannot_run_its_check_has_failed(tmp_path):
    outcome = asyncio.run(run_check(CHECK, Bench((), str(tmp_path))))
    assert outcome.verdict == "failed" and "exit status 1" in outcome.found
    assert "ModuleNotFoundError" in outcome.output


def test_a_process_over_its_limit_is_ended(tmp_path):
    slow = Check("slow", "exactness_checks:train_reference", limit_s=0.3)
    outcome = asyncio.run(run_check(slow, Bench((), str(tmp_path))))
    assert outcome.found == "no end after 0.3 s" and outcome.seconds < 60


def test_who_compares_waits_for_the_reference_and_others_do_not(monkeypatch):
    began, ended = [], []

    async def run_check(check, bench, is_forked):
        began.append((check.name, REFERENCE.name in ended))
        await asyncio.sleep(0.1 if check is REFERENCE else 0)
        ended.append(check.name)
        return Outcome(check.name, "ok", "")

    async def run():
        checks = [REFERENCE, Check("compares", "", needs_reference=True), Check("alone", "")]
        return [check.name async for check, _ in run_checks(checks, Bench((), ""), 2, False)]

    monkeypatch.setattr(children, "run_check", run_check)
    assert asyncio.run(run()) == ["alone", "reference", "compares"]
    assert began == [("reference", False), ("alone", False), ("compares", True)]


@pytest.mark.parametrize(
    ("check", "num_gpus", "reason"),
    [
        (CHECK, 0, ""),
        (Check("x", "", min_gpus=1), 0, "needs 1 GPU, 0 here"),
        (Check("x", "", min_gpus=2), 1, "needs 2 GPUs, 1 here"),
        (Check("x", "", is_job=True), 1, "needs a GPU for each of two processes, 1 here"),
        (Check("x", "", is_job=True), 0, ""),
        (Check("x", "", is_job=True, is_slow=True), 0, "takes too long without GPUs"),
        (Check("x", "", is_job=True, is_slow=True), 2, ""),
        (Check("x", "", is_for_tpus=True), 2, "needs a TPU, and libtpu is not installed"),
        (Check("x", "", min_gpus=2, is_job=True), 2, ""),
    ],
)
def test_a_check_that_does_not_apply_says_why(check, num_gpus, reason):
    assert why_not(check, num_gpus) == reason


def test_gpus_are_the_first_so_many():
    assert chosen_gpus(["GPU-a", "GPU-b"], None) == ["GPU-a", "GPU-b"]
    assert chosen_gpus(["GPU-a", "GPU-b"], 1) == ["GPU-a"]
    assert chosen_gpus(["GPU-a"], 0) == []
    with pytest.raises(ValueError, match="0 to 1, as many as there are. Received: 2"):
        chosen_gpus(["GPU-a"], 2)


def test_a_place_travels_and_hides_what_it_does_not_use(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    bench = Bench(("GPU-a", "GPU-b"), str(tmp_path))
    assert bench_of_json(bench.to_json()) == bench
    assert bench.devices == ["GPU:0", "GPU:1"]
    assert bench.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert "TF_CONFIG" not in bench.environment()
    assert Bench((), "").environment()["CUDA_VISIBLE_DEVICES"] == "-1"
    assert Bench(("GPU-a",), "").devices == ["GPU:0", "GPU:1"]  # two halves of it


TRIAL = Trial("mlp", "uneven")


def test_a_strategy_that_trains_elsewhere_fails_and_one_that_does_not_passes(tmp_path, monkeypatch):
    bench = Bench((), str(tmp_path))
    make = IN_ONE_PROCESS["mirrored"]
    reference = train(TRIAL)
    monkeypatch.setattr(exactness_checks, "trials_of", lambda *_, **__: [TRIAL])
    exactness_checks._write(bench, TRIAL, reference)
    found = exactness_checks.compare("mirrored", lambda: make(bench.devices), bench)
    assert found.figures[str(TRIAL)] <= 1e-5
    reference.weights[2][0, 0] += 3e-5
    exactness_checks._write(bench, TRIAL, reference)
    with pytest.raises(CheckFailedError, match="mlp-uneven-float32 by 3"):
        exactness_checks.compare("mirrored", lambda: make(bench.devices), bench)
    reference.weights[2][0, 0] = np.nan
    exactness_checks._write(bench, TRIAL, reference)
    with pytest.raises(CheckFailedError, match="by nan"):
        exactness_checks.compare("mirrored", lambda: make(bench.devices), bench)


def test_other_bits_in_the_second_of_two_fail(tmp_path, monkeypatch):
    bench = Bench((), str(tmp_path))
    monkeypatch.setattr(exactness_checks, "trials_of", lambda *_, **__: [TRIAL])
    exactness_checks._write(bench, TRIAL, train(TRIAL))
    endings = iter([train(TRIAL), train(TRIAL)])

    def one_bit_off_the_second_time(*_):
        ending = next(endings)
        if next(counted):
            ending.weights[0][0, 0] = np.nextafter(ending.weights[0][0, 0], 1.0)
        return ending

    counted = itertools.count()
    monkeypatch.setattr(exactness_checks, "train", one_bit_off_the_second_time)
    with pytest.raises(CheckFailedError, match="second of two: mlp-uneven-float32"):
        exactness_checks.compare("mirrored", lambda: None, bench)


@pytest.mark.parametrize(
    ("strategy", "option", "message", "is_refused"),
    [
        ("mirrored", "jit_compile", "jit_compile=True needs one replica per process", True),
        ("one_device", "jit_compile", "jit_compile=True needs one replica per process", False),
        ("mirrored", "jit_compile", "shapes do not match", False),
        ("mirrored", "run_eagerly", "run_eagerly=True is not here", False),
        ("parameter_server_async", "run_eagerly", "run_eagerly=True runs Python", True),
    ],
)
def test_what_a_page_refuses_is_told_and_all_else_fails(
    monkeypatch, strategy, option, message, is_refused
):
    def refuse(*_):
        raise ValueError(message)

    monkeypatch.setattr(exactness_checks, "train", refuse)
    trial = Trial("mlp", "many", option=option)
    if is_refused:
        assert exactness_checks._ending(strategy, trial, None) is None
    else:
        with pytest.raises(ValueError, match=message):
            exactness_checks._ending(strategy, trial, None)


def test_a_step_that_keras_does_not_compile_fails(monkeypatch):
    """As where operations are deterministic: Keras warns, and XLA is asked nothing."""

    def train_without_xla(*_):
        said = "Model doesn't support `jit_compile=True`. Proceeding with `jit_compile=False`."
        warnings.warn(said, stacklevel=2)

    monkeypatch.setattr(exactness_checks, "train", train_without_xla)
    with pytest.raises(CheckFailedError, match="jit_compile=False"):
        exactness_checks._ending("one_device", XLA, None)


def test_other_weights_by_xla_fail():
    ending = train(TRIAL)
    passed = exactness_checks.judge_xla({"one_device": ending, "mirrored": None}, ending)
    assert passed.text == "from one device: one_device 0.0e+00; refused: mirrored"
    off = dataclasses.replace(ending, predictions=ending.predictions + 1e-4)
    with pytest.raises(CheckFailedError, match="one_device by"):
        exactness_checks.judge_xla({"one_device": off}, ending)


def test_one_device_trains_whatever_any_strategy_is_asked():
    # Models by sizes, models by half types, and of five batches: plain, clipped, accumulated.
    assert len(references(on_gpus=True)) == 4 * 3 + 4 * 2 + 3
    assert len(references(on_gpus=False)) == 6 + 2 + 3


def test_without_gpus_some_strategies_are_asked_each_kind_of_model_batch_and_type():
    for name in ("mirrored", "pipeline_1f1b"):
        asked = trials_of(name, on_gpus=False)
        assert {trial.model.partition("_")[0] for trial in asked} > {"mlp", "gpt"}
        assert {trial.size for trial in asked} >= {"static", "uneven", "tiny"}
        assert {trial.dtype for trial in asked} == {"float32", "mixed_float16", "mixed_bfloat16"}


def test_every_option_is_asked_of_every_strategy_on_gpus():
    for name in (*IN_ONE_PROCESS, *IN_SEVERAL_PROCESSES):
        options = {trial.option for trial in trials_of(name, on_gpus=True)}
        assert options | {XLA.option} == set(OPTIONS)
        assert {trial.model for trial in repeated_of(name, on_gpus=True)} >= {"mlp", "gpt"}
        assert repeated_of(name, on_gpus=False) in ([], [Trial("mlp", "uneven")])
    assert repeated_of("mirrored", on_gpus=False)


NCCL = """\
h:1 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1 - Init COMPLETE
host:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 6 datatype 7 op 0
"""


def test_nccl_is_found_in_its_log():
    assert judge_nccl(NCCL, 2).text == "2 ranks, 1 sums"
    with pytest.raises(CheckFailedError, match=r"groups of \[2\] GPUs"):
        judge_nccl(NCCL, 4)
    with pytest.raises(CheckFailedError, match="0 sums"):
        judge_nccl(NCCL.replace("AllReduce", "Broadcast"), 2)
    with pytest.raises(CheckFailedError, match="sockets"):
        judge_nccl(NCCL + "Channel 00 : 0[0] -> 1[1] via NET/Socket/0", 2)


def profile(**sizes: list[int]) -> bytes:
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    plane.stat_metadata[1].name = "memcpy_details"
    line = plane.lines.add()
    for number, (name, own) in enumerate(sizes.items(), 1):
        plane.event_metadata[number].name = name
        for size in own:
            event = line.events.add(metadata_id=number)
            text = f"kind_src:pageable kind_dst:device size:{size} dest:0 async:1"
            event.stats.add(metadata_id=1, str_value=text)
    return space.SerializeToString()


def test_copies_are_counted_by_direction():
    found = copies_of_profile(profile(MemcpyH2D=[100, 20], MemcpyD2H=[4], sgemm=[7]))
    assert found == Copies(2, 120, 1, 4, 0, 0)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (Copies(10, 1000, 10, 40, 0, 0), None),
        (Copies(10, 1200, 10, 40, 0, 0), "expected 110 there"),
        (Copies(10, 1000, 10, 99_999, 0, 0), "and 4096 back"),
        (Copies(0, 0, 0, 0, 0, 0), "no copy to a GPU"),
    ],
)
def test_copies_are_held_against_the_batch(copies, message):
    if message is None:
        assert "1 copies of 100 bytes to GPUs" in judge_copies(copies, 10, 1000).text
    else:
        with pytest.raises(CheckFailedError, match=message):
            judge_copies(copies, 10, 1000)


@pytest.mark.parametrize("is_wide", [True, False])
def test_integers_that_arrive_are_told_from_others(monkeypatch, is_wide):
    device = "/job:localhost/replica:0/task:0/device:CPU:1"
    assert remote_integers.arrives(device, is_wide)

    class OffByOne(GraphFunction):
        def __call__(self, device, arguments):
            doubled, following = super().__call__(device, arguments)
            return [doubled, following + 1]

    monkeypatch.setattr(remote_integers, "GraphFunction", OffByOne)
    assert not remote_integers.arrives(device, is_wide)


def test_how_a_process_ends_that_may_crash():
    run = [sys.executable, "-c"]
    assert remote_integers._ending([*run, "pass"]) == "they arrive"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert remote_integers._ending([*run, crash]) == "ended by SIGSEGV"


def test_a_failure_is_shown_with_what_to_do():
    console = Console(record=True, width=100)
    failed = Outcome("nccl", "failed", "0 sums", 3.0, "set this", "the [end] of its output")
    show([Outcome("devices", "ok", "right"), failed], console)
    text = console.export_text()
    for part in ("devices", "0 sums", "-> set this", "the [end] of its output"):
        assert part in text
    written = json.loads(outcomes_as_json([failed], ["GPU-a"]))
    assert written["outcomes"][0]["cure"] == "set this" and written["gpus"] == ["GPU-a"]
