"""What a step sends along an axis, counted in its graph, is what the axis has to send."""

import pytest

from benchmarks import hybrid

SENDS_WHAT_IT_HAS_TO = [
    (sizes, what) for sizes, what in hybrid.meshes() if "pipeline" not in sizes or len(sizes) == 1
]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        pytest.param(sizes, what, marks=[] if sizes == {"shard": 4} else pytest.mark.long)
        for sizes, what in [*SENDS_WHAT_IT_HAS_TO, ({"data": 2, "pipeline": 2}, "parameters")]
    ],
    ids=str,
)
def test_no_axis_sends_more_than_it_has_to(sizes, what):
    sent = hybrid.bytes_by_axis(sizes, what)
    for axis in sizes:
        assert sent[axis] == hybrid.bytes_along(axis, sizes, what)
