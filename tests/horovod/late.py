"""A rank that sleeps before it makes its strategy: `python -m tests.horovod.late RANK SECONDS`."""

import os
import sys
import time

if os.environ["HOROVOD_RANK"] == sys.argv[1]:
    time.sleep(float(sys.argv[2]))

import tfparallel

tfparallel.HorovodStrategy(start_timeout_s=5.0)
print("made", flush=True)
