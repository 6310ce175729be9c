"""What a real shell completes."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

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
def program(tmp_path):
    """An environment in which `tfparallel` is this checkout's."""
    program = tmp_path / "tfparallel"
    program.write_text(f"#!{sys.executable}\nfrom tfparallel.launch.cli import main\n"
                       "raise SystemExit(main())\n")  # fmt: skip
    program.chmod(0o755)
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def completed(tmp_path, program):
    """What bash offers after a beginning of a command line."""
    (tmp_path / "train.py").touch()

    def ask(line: str) -> set[str]:
        command = [shell("bash"), "--norc", "-c", _ASK, "bash", line]
        ran = subprocess.run(command, cwd=tmp_path, env=program, capture_output=True, text=True)
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


def shell(name: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def test_fish_completes(program):
    script = "tfparallel completion fish | source; complete -C 'tfparallel launch --no'"
    command = [shell("fish"), "--no-config", "-c", script]
    ran = subprocess.run(command, env=program, capture_output=True, text=True)
    assert ran.stdout.split("\t")[0] == "--node-rank", ran.stderr


def test_zsh_completes(program):
    start = (
        'autoload -Uz compinit; compinit -D -u; eval "$(tfparallel completion zsh)"; echo re""ady'
    )
    master, terminal = pty.openpty()
    process = subprocess.Popen([shell("zsh"), "-f", "-i"], env={**program, "TERM": "dumb"},
                               stdin=terminal, stdout=terminal, stderr=terminal,
                               start_new_session=True)  # fmt: skip
    try:
        for typed, answer in ((f"{start}\n", "ready"), ("tfparallel la\t", "tfparallel launch")):
            os.write(master, typed.encode())
            read_until(master, answer)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(terminal)


def read_until(terminal: int, answer: str) -> None:
    shown, deadline = "", time.monotonic() + 40
    while answer not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
