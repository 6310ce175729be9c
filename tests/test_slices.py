"""Which tests a run is asked: those that take turns have all had one after as many commits."""

import pytest

from tests.slices import NUM_SLICES, TURNS, VARIABLE, is_asked, slice_of_this_run


def test_the_slice_can_be_given(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    assert slice_of_this_run() == 7
    monkeypatch.setenv(VARIABLE, str(NUM_SLICES))
    with pytest.raises(ValueError, match=f"0 to {NUM_SLICES - 1}"):
        slice_of_this_run()
    monkeypatch.setenv(VARIABLE, "commit")
    assert slice_of_this_run() in range(NUM_SLICES)
    monkeypatch.delenv(VARIABLE)
    assert slice_of_this_run() is None


def test_a_test_has_one_turn_in_so_many_commits(request):
    request.node.add_marker(pytest.mark.turns)
    for first in range(NUM_SLICES):
        numbers = [(first + i) % NUM_SLICES for i in range(TURNS)]
        assert sum(is_asked(request.node, number) for number in numbers) == 1
    assert is_asked(request.node, None)


def test_a_test_without_turns_is_always_asked_and_a_long_one_never(request):
    assert all(is_asked(request.node, i) for i in (None, 0, 1))
    request.node.add_marker(pytest.mark.long)
    assert not any(is_asked(request.node, i) for i in (None, 0, 1))
