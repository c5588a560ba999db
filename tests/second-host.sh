# Sourced in a new network namespace: makes another one, which reaches this one over a pair of interfaces, like two hosts. This one has the address
# 192.0.2.1, the other 192.0.2.2, and `there COMMAND...` runs a command in it. Exits with status 77 where the machine allows no such pair. What
# still runs in the background at the end is killed.
unshare --net sleep infinity & peer=$!
trap 'kill $(jobs -p)' EXIT
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
there() { nsenter --target "$peer" --net "$@"; }
{ ip link add va type veth peer name vb netns "$peer" && ip addr add 192.0.2.1/24 dev va && ip link set va up && ip link set lo up &&
    there ip addr add 192.0.2.2/24 dev vb && there ip link set vb up && there ip link set lo up; } || exit 77
# The kernel notices the carrier later, and drops what is sent before.
until ip link show va | grep -q 'state UP' && there ip link show vb | grep -q 'state UP'; do sleep 0.01; done
