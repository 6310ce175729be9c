"""Trains until one rank has a signal for itself: `python -m tests.horovod.killed RANK SIGNAL`.

With a third argument the weights are in parts, in so many copies that ranks share.
"""

import os
import sys

import tfparallel
from tests.horovod.training import AfterThreeBatches, fit
from tfparallel.coordination.timeouts import WorkerTimeouts

victim, number, *copies = map(int, sys.argv[1:])
if copies:
    timeouts = WorkerTimeouts(stall_s=8.0)
    strategy = tfparallel.ShardedStrategy(min_size=1, replicas=copies[0], timeouts=timeouts)
else:
    strategy = tfparallel.HorovodStrategy(stall_timeout_s=8.0)
rank = int(os.environ["HOROVOD_RANK"])
hit = AfterThreeBatches(lambda: rank == victim and os.kill(os.getpid(), number))
fit(strategy, callbacks=[hit])
print("trained", flush=True)
