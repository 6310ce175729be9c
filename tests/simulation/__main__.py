"""Runs schedules until told to stop: `make simulate`, or

    python -m tests.simulation [--scenario NAME ...] [--schedules N] [--seed S] [--replay NUMBERS]

A schedule is one scenario with one seed. Of one that fails the seed is printed, the numbers that it
drew are shrunk, and the shortest failing schedule is told step by step.
"""

import sys

from tests.simulation.command import main

if __name__ == "__main__":
    sys.exit(main())
