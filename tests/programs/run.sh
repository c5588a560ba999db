#!/usr/bin/env bash
# Runs other projects' programs on the software card below verbs: run.sh [DIST]
#
# The programs are Mooncake's transfer engine (PyPI: mooncake-transfer-engine-efa-non-cuda) and NIXL's back end LIBFABRIC (PyPI: nixl-cu12),
# as they come from PyPI, each in its own environment below .cache/programs/. Two processes move blocks through libfabric's provider efa and
# compare all bytes: on one host without faults and with the faults below, and in two network namespaces. Prints a line per test and a final
# line with the counts; exits with status 1 if a test failed. What isn't available counts as skipped.
#
#   FERROGIN_LIBFABRIC=FILE   a libfabric.so.1 with the provider efa, for both programs [2.5.1]
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
faults=seed=3,reorder=32,reread=0.2
limit=1800 # seconds per run, which takes less than a minute on an idle machine, and many minutes on a busy one
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
unset SOFTEFA_FAULTS SOFTEFA_NICS SOFTEFA_WIRE SOFTEFA_IFADDR FI_PROVIDER FI_PROVIDER_PATH
# libfabric's own shared memory would bypass the card between two processes on one host.
export FI_EFA_ENABLE_SHM_TRANSFER=0 PYTHONPATH=$here

# A free port for a test's two processes.
port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# judge NAME STATUS: both processes must have said that all data is right.
judge() {
    if [ "$2" -eq 0 ] && [ "$(cat "$work"/*.log | grep -c '^all data right')" -eq 2 ]; then
        pass "$1"
    elif [ "$2" -eq 77 ]; then
        skip "$1: this machine allows no network namespaces with a pair of interfaces, or has no \`ip\`"
    else
        fail "$1: status $2" "$work"/*.log
    fi
}

# one_host NAME COMMAND...: two processes; one listens and the other connects.
one_host() {
    local name=$1 status=0 listener port
    shift
    port=$(port)
    rm -f "$work"/*.log
    timeout --kill-after=5 "$limit" "$@" listen 127.0.0.1 "$port" >"$work/listen.log" 2>&1 &
    listener=$!
    timeout --kill-after=5 "$limit" "$@" connect 127.0.0.1 "$port" >"$work/connect.log" 2>&1 || status=$?
    wait "$listener" || status=$?
    judge "$name" "$status"
}

# two_hosts NAME COMMAND...: the same in two network namespaces, which can reach each other only over TCP.
two_hosts() {
    local name=$1 status=0
    shift
    rm -f "$work"/*.log
    timeout --kill-after=5 "$((2 * limit))" unshare --user --map-root-user --net bash "$here/two_hosts.sh" "$work" "$@" >"$work/hosts.log" 2>&1 ||
        status=$?
    judge "$name" "$status"
}

# each NAME COMMAND...: all of a program's runs.
each() {
    one_host "$1" "${@:2}"
    SOFTEFA_FAULTS=$faults one_host "$1, $faults" "${@:2}"
    two_hosts "$1, two hosts" "${@:2}"
}

if [ ! -f "$dist/verbs/libibverbs.so.1" ]; then
    fail "programs: $dist has no verbs/libibverbs.so.1; run make build first"
    finish
fi

# The libfabric for all programs. Sets `libfabric`.
if ! libfabric=${FERROGIN_LIBFABRIC:-$("$root/scripts/fetch-libfabric-alt.sh" 2>"$log")}; then
    skip "Mooncake and NIXL: no libfabric newer than 1.17: $(tail -n 1 "$log")"
    finish
fi

mooncake() {
    if ! "$dist/ferrogin" verbs -- test -c /dev/infiniband/uverbs0 2>/dev/null; then
        skip "Mooncake: it looks for cards in /dev/infiniband, and this user may not make a private one for \`ferrogin verbs\`"
        return
    fi
    environment programs mooncake --no-deps mooncake-transfer-engine-efa-non-cuda==0.3.13.post1 || return
    LD_LIBRARY_PATH=${libfabric%/*} each Mooncake "$dist/ferrogin" verbs -- "$place/bin/python" "$here/mooncake_transfers.py"
}

nixl() {
    local version=1.4.1 libraries
    # The first release that needs a libfabric newer than 2.6.0, which no registry has.
    grep -q FABRIC_1.10 "$libfabric" && version=1.5.1
    environment programs "nixl-$version" --no-deps "nixl==$version" "nixl-cu12==$version" nvidia-cuda-runtime-cu12 numpy || return
    libraries=$("$place/bin/python" -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cuda_runtime", "lib"))')
    # Its back end links the CUDA driver, whose place the software GPU takes.
    LD_LIBRARY_PATH=$libraries:${libfabric%/*} each "NIXL $version" \
        "$dist/ferrogin" gpu -- "$dist/ferrogin" verbs -- "$place/bin/python" "$here/nixl_transfers.py"
}

mooncake
nixl
finish
