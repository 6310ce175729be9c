"""Nodes of one stage run together; a node of several stages runs by itself."""

import pytest

from tfparallel.pipeline.graph_groups import Item, group_items


@pytest.mark.parametrize(
    ("items", "groups"),
    [
        # a chain
        ([({0}, "x", "a"), ({0}, "a", "b"), ({1}, "b", "c")], [[0, 1], [2]]),
        # branches, whose nodes Keras runs in turns
        ([({0}, "x", "a"), ({1}, "a", "b"), ({0}, "a", "c"), ({1}, "bc", "d")], [[0, 2], [1, 3]]),
        # a nested model of two stages: what can run before it does, what needs it cannot
        (
            [({0}, "x", "a"), ({0, 1}, "a", "b"), ({0}, "x", "c"), ({1}, "bc", "d")],
            [[0, 2], [1], [3]],
        ),
        # it begins on stage 0, so stage 1 comes later
        ([({1}, "x", "a"), ({0, 1}, "x", "b"), ({1}, "ab", "c")], [[1], [0, 2]]),
        # stage 0 once more, behind stage 1, as it takes what is made there
        ([({1}, "x", "a"), ({0}, "a", "b"), ({1}, "b", "c")], [[0], [1], [2]]),
        # nothing makes "y"
        ([({0}, "x", "a"), ({0}, "y", "b")], [[0]]),
        ([], []),
    ],
)
def test_groups(items, groups):
    given = [Item(stages, list(takes), list(makes)) for stages, takes, makes in items]
    assert group_items(given, ["x"]) == groups
