#!/usr/bin/env bash
# Two processes on two hosts, which are this network namespace and a new one: two_hosts.sh LOGS COMMAND...
# The command gets `listen` or `connect`, the listener's address, and a port. Status 77: the namespaces can't be
# connected.
. "$(dirname "${BASH_SOURCE[0]}")/../second-host.sh"
logs=$1
shift
there env SOFTEFA_IFADDR=192.0.2.2 "$@" listen 192.0.2.2 15000 >"$logs/listen.log" 2>&1 & listener=$!
SOFTEFA_IFADDR=192.0.2.1 "$@" connect 192.0.2.2 15000 >"$logs/connect.log" 2>&1 || exit
wait $listener
