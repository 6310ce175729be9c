"""Trains until one rank has a signal for itself: `python -m tests.horovod.killed RANK SIGNAL`."""

import os
import sys

import tfparallel
from tests.horovod.training import AfterThreeBatches, fit

strategy = tfparallel.HorovodStrategy(stall_timeout_s=8.0)
victim, number = map(int, sys.argv[1:])
hit = AfterThreeBatches(lambda: strategy.rank == victim and os.kill(os.getpid(), number))
fit(strategy, callbacks=[hit])
print("trained", flush=True)
