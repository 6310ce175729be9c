"""What a real shell completes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT

pytestmark = pytest.mark.timeout(60)

# The function that the printed code has registered for `tfparallel` is called as bash calls it.
_ASK = """
eval "$(tfparallel completion bash)"
COMP_LINE=$1; COMP_POINT=${#1}; COMP_TYPE=9; COMP_WORDS=($1)
[[ $1 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function_name=$(complete -p tfparallel | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function_name tfparallel
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def completed(tmp_path):
    """What bash offers after a beginning of a command line."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "tfparallel"
    program.write_text(f"#!{sys.executable}\nfrom tfparallel.launch.cli import main\n"
                       "raise SystemExit(main())\n")  # fmt: skip
    program.chmod(0o755)
    (tmp_path / "train.py").touch()

    def ask(line: str) -> set[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", "--norc", "-c", _ASK, "bash", line]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return {word.strip() for word in ran.stdout.splitlines()} - {""}

    return ask


def test_commands(completed):
    assert completed("tfparallel ") >= {"launch", "backups", "doctor", "completion"}
    assert completed("tfparallel la") == {"launch"}


def test_options_of_a_command(completed):
    assert completed("tfparallel launch --no") == {"--node-rank"}
    assert completed("tfparallel launch --s") == {"--standalone", "--share-gpus", "--ssh-port"}


def test_choices_and_files(completed):
    assert completed("tfparallel completion z") == {"zsh"}
    assert "train.py" in completed("tfparallel launch --standalone --workers 2 tr")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_code(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    printed = subprocess.run([sys.executable, "-m", "tfparallel", "completion", shell],
                             env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
                             capture_output=True, text=True).stdout  # fmt: skip
    script = Path(tmp_path / "code")
    script.write_text(printed)
    subprocess.run([shell, "-n", script], check=True)
