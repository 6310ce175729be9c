"""How a contestant's process is spoken to: a request is a JSON line, so is its answer.

A contestant that is not asked blocks on its pipe and uses no processor.
"""

import itertools
import json
import os
import sys
import time
import traceback


def timed_steps(step, steps: int, warmup: int) -> dict:
    """Calls `step` and measures it.

    Returns:
        `wall_s`: how long each of the last `steps` calls took. `cpu_s`: what one of them used of
        processors on average, in all threads of this process: a figure that other programs on the
        machine disturb less.
    """
    for _ in range(warmup):
        step()
    times, cpu_start_s = [time.perf_counter()], time.process_time()
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    cpu_s = (time.process_time() - cpu_start_s) / steps
    return {"wall_s": [end - start for start, end in itertools.pairwise(times)], "cpu_s": cpu_s}


def serve(make_contestant) -> None:
    """Answers requests on stdin until it closes.

    Args:
        make_contestant: called once with the JSON object in `sys.argv[1]` as keyword arguments.
            A request `{"do": "name", **arguments}` calls that method of what it returns.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer

    def answer(function, **arguments) -> bool:
        try:
            message, went_well = {"result": function(**arguments)}, True
        except Exception:
            message, went_well = {"error": traceback.format_exc()}, False
        print(json.dumps(message), file=answers, flush=True)
        return went_well

    contestants = []
    if not answer(lambda: contestants.append(make_contestant(**json.loads(sys.argv[1])))):
        return
    for line in sys.stdin:
        request = json.loads(line)
        answer(getattr(contestants[0], request.pop("do")), **request)
