"""How long importing tfparallel takes beyond TensorFlow and Keras, interleaved in fresh processes.

python benchmarks/import_time.py [--rounds 7]
"""

import argparse
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "tensorflow, keras": "import tensorflow, keras",
    "tensorflow, keras, all strategies of tfparallel": (
        "import tensorflow, keras, tfparallel\n"
        "for name in tfparallel.__all__: getattr(tfparallel, name)"
    ),
}


def time_program(code: str) -> float:
    """Seconds that a fresh Python takes to run `code`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Prints the median of each program and their difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, code in PROGRAMS.items():
            seconds[name].append(time_program(code))
    medians = [statistics.median(times) for times in seconds.values()]
    for name, median in zip(seconds, medians, strict=True):
        print(f"{median:7.3f} s  {name}")
    pairs = zip(*seconds.values(), strict=True)
    difference = statistics.median(after - before for before, after in pairs)
    print(f"{difference:7.3f} s  median difference over {rounds} rounds (to reach: at most 0.2)")


if __name__ == "__main__":
    main()
