#!/usr/bin/env bash
# Open MPI with a rank on each of two hosts, which are this network namespace and a new one: two_hosts.sh DIRECTORY
# mpirun OPTION... PROGRAM Open MPI starts its daemon on the other host with a script in DIRECTORY instead of ssh.
# Status 77: the namespaces can't be connected.
. "$(dirname "${BASH_SOURCE[0]}")/../second-host.sh"
printf '%s\n' '#!/bin/sh' shift "exec nsenter --target $peer --net sh -c \"\$*\"" >"$1/agent"
chmod +x "$1/agent"
"$2" --host 192.0.2.1:1,192.0.2.2:1 --mca plm_rsh_agent "$1/agent" "${@:3}"
