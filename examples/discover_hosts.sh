#!/usr/bin/env bash
# For `horovodrun --host-discovery-script`: prints the hosts that ranks may run on, "host:slots".
#
# Reads them from the file $HOSTS_FILE (default: hosts.txt in the current directory), one a line,
# which may be edited while the job runs: a line that is added adds ranks, one that is removed takes
# them away. Other hosts than this one are printed only while their ssh answers, because horovodrun
# starts ranks by ssh.
set -uo pipefail

hosts_file=${HOSTS_FILE:-hosts.txt}
ssh_port=${SSH_PORT:-22}
if [[ ! -r $hosts_file ]]; then
    echo "discover_hosts.sh: expected lines 'host:slots' in $hosts_file (or in \$HOSTS_FILE)" >&2
    exit 1
fi

answers() {
    case $1 in localhost | 127.* | "$(hostname)") return 0 ;; esac
    timeout 1 bash -c ": </dev/tcp/$1/$ssh_port" 2>/dev/null
}

while IFS= read -r line; do
    line=${line%%#*}
    line=${line//[[:space:]]/}
    if [[ -n $line ]] && answers "${line%%:*}"; then
        echo "$line"
    fi
done <"$hosts_file"
