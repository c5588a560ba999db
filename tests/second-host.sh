# Sourced in a new network namespace: creates another one, connected to this one by a pair of interfaces, like two
# hosts. This one has the address 192.0.2.1 and the other 192.0.2.2; `there COMMAND...` runs a command in the other.
# Exits with status 77 if the machine doesn't allow this. At the end, kills what still runs in the background.
unshare --net sleep infinity & peer=$!
trap 'kill $(jobs -p)' EXIT
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
there() { nsenter --target "$peer" --net "$@"; }
{ ip link add va type veth peer name vb netns "$peer" && ip addr add 192.0.2.1/24 dev va && ip link set va up && ip link set lo up &&
    there ip addr add 192.0.2.2/24 dev vb && there ip link set vb up && there ip link set lo up; } || exit 77
# The kernel notices the carrier with a delay, and drops what is sent before.
until ip link show va | grep -q 'state UP' && there ip link show vb | grep -q 'state UP'; do sleep 0.01; done
