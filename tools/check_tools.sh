#!/usr/bin/env bash
# Check that this machine has what the build needs, before anything is built.
# A missing tool is named on a line of its own together with the Debian command that installs it.
# usage: tools/check_tools.sh [PYTHON]
set -uo pipefail

python=${1:-python3}
missing=0

report() {
    echo "$1" >&2
    missing=1
}

check_python() {
    if ! command -v "$python" >/dev/null; then
        report "$python is missing: install it with \"apt-get install python3 python3-venv\""
    elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        report "$python is older than 3.10: install a newer one with \"apt-get install python3.11\" and name it with \"make PYTHON=python3.11\""
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        report "python3-venv is missing: install it with \"apt-get install python3-venv\""
    fi
}

check_command() {
    command -v "$1" >/dev/null || report "$1 is missing: install it with \"apt-get install $1\""
}

check_python
check_command gcc
check_command g++
check_command cmake
exit "$missing"
