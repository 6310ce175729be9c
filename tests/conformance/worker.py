"""The program of a pool's workers: runs one case after another under one strategy.

By hand, one case in this process: `python tests/conformance/worker.py mirrored_2 optimizers.adam`.
"""

import gc
import json
import os
import queue
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import keras
import numpy as np

from tests.conformance.case import Run
from tests.conformance.cases import CASES
from tests.conformance.cases.coexistence import remember_originals
from tests.conformance.strategies import ROWS
from tests.helpers import open_logical_cpus


def main(row_name: str, case_name: str | None = None) -> None:
    """Serve a pool through stdin and stdout, or run one case and print its results."""
    replies = _take_over_stdout()
    row = ROWS[row_name]
    open_logical_cpus(row.devices_per_worker)
    remember_originals()
    strategy = row.make()
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    rank = int(os.environ.get("HOROVOD_RANK", task.get("index", 0)))
    if case_name:
        with tempfile.TemporaryDirectory() as folder:
            print(CASES[case_name].function(Run(row, strategy, Path(folder), rank)))
        return
    requests = _requests()
    gc.freeze()  # spare the collector what lives on: cases take half the time
    gc.set_threshold(50_000, 20, 20)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while True:
        request = requests.get()
        reply = _answer(row, strategy, rank, request["case"], Path(request["folder"]))
        print(json.dumps(reply), file=replies, flush=True)


def _take_over_stdout():
    """Keep stdout for replies: whatever else is printed goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _requests() -> queue.Queue:
    """Requests as they come in; the process ends when the pool has gone, even out of a hang."""
    requests: queue.Queue = queue.Queue()

    def read():
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return requests


def _answer(row, strategy, rank: int, case_name: str, folder: Path) -> dict:
    try:
        results = CASES[case_name].function(Run(row, strategy, folder, rank))
        file = folder / f"results{rank}.npz"
        np.savez(file, **(results or {}))
        return {"results": str(file)}
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
        gc.freeze()


if __name__ == "__main__":
    main(*sys.argv[1:])
