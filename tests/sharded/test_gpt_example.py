"""examples/sharded_gpt.py: all that it says to type, made short."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sharded_gpt.py"
COMMANDS = re.findall(r"^    (.*sharded_gpt\.py.*)$", EXAMPLE.read_text(), re.MULTILINE)


def printed(command: str) -> str:
    words = ["python", *shlex.split(command)[1:]]
    if command.startswith("tfparallel"):
        words.insert(1, "-m")
        words.insert(2, "tfparallel")
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(
        [sys.executable, *words[1:], "--quick"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_every_command_trains_to_one_loss():
    assert len(COMMANDS) >= 8
    outputs = {command: printed(command) for command in COMMANDS}
    losses = {command: set(re.findall(r"\bloss (\d\S*)", out)) for command, out in outputs.items()}
    (expected,) = losses[COMMANDS[0]]
    for command, own in losses.items():
        assert own, command
        for loss in own:
            assert abs(float(loss) - float(expected)) < 2e-5, (command, loss, expected)
    for command, out in outputs.items():
        assert ("above it in a step" in out) and ("gathered" in out) != ("none" in command), command
