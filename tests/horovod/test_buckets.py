"""Real `horovodrun`: what Horovod makes of our buckets, by its own timeline."""

import collections
import re

import pytest

from tests.horovod.launching import horovodrun

pytestmark = pytest.mark.turns

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")


def times_joined_and_reduced(timeline):
    """Of each tensor that a function reduces: how often it was copied to others, and reduced."""
    text = timeline.read_text()  # no whole JSON: a job's end may cut it off
    names = dict(re.findall(r'"pid": (\d+), "args": {"name": "(tfparallel_.*?)"}', text))
    begun = collections.Counter(re.findall(r'"B", "name": "(\w+)", "ts": \d+, "pid": (\d+)', text))
    return [
        (begun["MEMCPY_IN_FUSION_BUFFER", number], begun["GLOO_ALLREDUCE", number])
        for number in names
    ]


@pytest.mark.timeout(300)
def test_full_buckets_that_are_ready_together_are_not_joined(tmp_path):
    # A cycle in which all gradients of a step become ready.
    timeline = ["--timeline-filename", str(tmp_path / "timeline.json"), "--cycle-time-ms", "100"]
    status, output = horovodrun("training", "in buckets", options=timeline)
    assert status == 0, output
    counts = times_joined_and_reduced(tmp_path / "timeline.json")
    assert any(joined > 0 for joined, _ in counts)  # small ones are
    assert any(joined == 0 and reduced >= 16 for joined, reduced in counts), counts
