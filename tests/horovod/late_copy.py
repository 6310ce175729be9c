"""Ranks 2 and 3, which share the second copy, read their weights when the others have done so."""

import os
import time

import tfparallel
from tests.horovod.training import fit

strategy = tfparallel.ShardedStrategy(min_size=1, replicas=2)
model = fit(strategy)
if int(os.environ["HOROVOD_RANK"]) > 1:
    time.sleep(5)
print("weights:", sum(float(abs(weight).sum()) for weight in model.get_weights()), flush=True)
