#!/usr/bin/env bash
# Two processes on two hosts, which are this network namespace and a new one: two_hosts.sh LOGS COMMAND...
# The command gets `listen` or `connect`, the address of the one that listens, and a port. Status 77: the namespaces cannot be joined.
logs=$1
shift
unshare --net sleep infinity & peer=$!
trap 'kill $peer' EXIT
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
there() { nsenter --target "$peer" --net "$@"; }
{ ip link add va type veth peer name vb netns "$peer" && ip addr add 192.0.2.1/24 dev va && ip link set va up && ip link set lo up &&
    there ip addr add 192.0.2.2/24 dev vb && there ip link set vb up && there ip link set lo up; } || exit 77
there env SOFTEFA_IFADDR=192.0.2.2 "$@" listen 192.0.2.2 15000 >"$logs/listen.log" 2>&1 & listener=$!
SOFTEFA_IFADDR=192.0.2.1 "$@" connect 192.0.2.2 15000 >"$logs/connect.log" 2>&1 || exit
wait $listener
