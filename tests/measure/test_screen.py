"""Lines of the screen that are more than a figure of a record."""

import dataclasses

from tests.measure.test_verdict import record
from tfparallel.measure.screen import speed_up_line


def test_speed_up_is_of_steps_as_one_devices_is():
    """6,400 rows in 10 s, of which 5 s are a first trace and 1 s is validation."""
    of_steps = record(tracing=5, validation=1)
    told = "speed-up 1.60 of 2, efficiency 80%, without tracing and validation"
    assert speed_up_line(of_steps, 1000.0, 2) == told
    again = dataclasses.replace(of_steps, details={"traces": 90})  # a cost of each step
    assert speed_up_line(again, 1000.0, 2).startswith("speed-up 0.71 of 2")
    assert speed_up_line(record(), 400.0, 2) == "speed-up 1.60 of 2, efficiency 80%"
