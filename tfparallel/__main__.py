"""`python -m tfparallel` is the console script `tfparallel`."""

import sys

from tfparallel.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
