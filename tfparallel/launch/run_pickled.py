"""Calls the function that `notebook` has pickled, and pickles what it returns.

python run_pickled.py CALL RESULT
"""

import os
import pickle
import sys
from pathlib import Path


def main() -> None:
    """Runs the call of the file in the first argument."""
    sys.path[0] = os.getcwd()  # as in the notebook; not the folder of this file
    import cloudpickle  # type: ignore[import-untyped]

    function, args, kwargs = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(cloudpickle.dumps(function(*args, **kwargs)))


if __name__ == "__main__":
    main()
