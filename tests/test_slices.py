"""Which tests a run is asked: those that take turns have all had one after as many commits."""

import pytest

from tests.slices import NUM_SLICES, VARIABLE, has_its_turn, is_asked, slice_of_this_run


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


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_a_test_has_one_turn_in_so_many_commits(request, turns):
    request.node.add_marker(pytest.mark.turns(turns))
    for first in range(NUM_SLICES - turns):
        assert sum(is_asked(request.node, first + i) for i in range(turns)) == 1
    assert is_asked(request.node, None)


def test_a_test_without_turns_is_always_asked_and_a_long_one_never(request):
    assert all(is_asked(request.node, i) for i in (None, 0, 1))
    request.node.add_marker(pytest.mark.long)
    assert not any(is_asked(request.node, i) for i in (None, 0, 1))


def test_turns_that_would_wait_for_longer_behind_the_last_slice_are_refused():
    with pytest.raises(ValueError, match=f"divide {NUM_SLICES}. Received: 7"):
        has_its_turn("name", 7, 0)
