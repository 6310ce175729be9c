"""The other end of a `WorkerPool`: a process that answers requests, one JSON line each."""

import json
import os
import sys
import traceback
from collections.abc import Callable


def answer_requests(answer: Callable[..., dict], begin: Callable[[], object]) -> None:
    """Replies to each request with what `answer(**request)` returns, until there are no more.

    Args:
        answer: what it raises is the reply `{"error": ...}`.
        begin: called first, with the standard output sent to the log.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(**json.loads(line))
        except BaseException:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)
