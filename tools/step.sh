#!/usr/bin/env bash
# Run a command quietly: one line says what it does and how long it took; its output is shown
# only when it fails.
# usage: tools/step.sh "what it does" COMMAND [ARGUMENT...]
set -uo pipefail

what=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT

printf '==> %s ... ' "$what"
SECONDS=0
"$@" >"$log" 2>&1
status=$?
if [ "$status" -eq 0 ]; then
    echo "$SECONDS s"
else
    echo "failed after $SECONDS s (exit status $status)"
    cat "$log" >&2
fi
exit "$status"
