"""Runs the snippets that need what the argument says, where TensorFlow has not started yet.

One process for all of a kind; those of "a process in which TensorFlow has not started" start it
themselves, the others find eight logical CPUs.
"""

import os
import sys
import tempfile

import tfparallel
from tests.docs.reader import UNTOUCHED, run_snippet
from tests.docs.snippets import snippets
from tests.helpers import open_logical_cpus


def main(needs: str) -> None:
    chosen = [snippet for snippet in snippets() if snippet.needs == needs]
    if needs != UNTOUCHED:
        open_logical_cpus(8)
    for snippet in chosen:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            if needs != UNTOUCHED:
                tfparallel.keras_distribution.enable()  # as its page does, some lines above
            run_snippet(snippet)
            tfparallel.keras_distribution.disable()
            os.chdir("/")
        print("ran", snippet.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
