"""A process that C++ aborts says its last words before, and may end otherwise."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tfparallel

FILE = Path(tfparallel.__path__[0]) / "coordination" / "last_words.py"
PROGRAM = f"""
import ctypes, os, runpy, threading
say_before_abort = runpy.run_path({str(FILE)!r})["say_before_abort"]  # without TensorFlow: fast

class Speaker:
    def __init__(self, words):
        self.words = words

    def speak(self):
        print(self.words, flush=True)
        if self.words == "exits":
            os._exit(7)

speakers = [Speaker(words) for words in WORDS]
for speaker in speakers:
    say_before_abort(speaker.speak)
speaker = None
if GONE:
    speakers.pop()
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
threading.Thread(target=terminate).start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks for GCC's library by its name on Linux")
@pytest.mark.parametrize(
    ("words", "gone", "said", "status"),
    [
        (["first", "second"], False, ["second", "first"], -signal.SIGABRT),
        (["first", "exits"], False, ["exits"], 7),
        (["first", "gone"], True, ["first"], -signal.SIGABRT),
    ],
)
def test_the_last_who_asked_speaks_first(words, gone, said, status):
    program = f"WORDS, GONE = {words}, {gone}\n{PROGRAM}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.split(), ran.returncode) == (said, status), ran.stderr
