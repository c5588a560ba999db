#!/usr/bin/env bash
# Runs ordinary libfabric programs over the provider softefa: run.sh [DIST]
#
# DIST (default: dist) has libsoftefa-fi.so. With the system's libfabric and with the one that
# scripts/fetch-libfabric-alt.sh fetches, and over each wire, the script runs fi_info, fi_pingpong with data checks, and
# the clients in this directory, also on cards with faults. If FABTESTS_DIR names a directory with programs from
# libfabric's fabtests (fi_rdm, fi_rma_bw, ...), it also runs those that are listed below. Prints a line per test and a
# final line with the counts; exits with status 1 if a test failed. Reports missing programs as skipped.
#
#   FERROGIN_LIBFABRIC_ALT=FILE   the second libfabric.so.1, instead of the fetched one
#   LIBFABRIC_WIRES="shm tcp"     the wires
#   LIBFABRIC_FAULTS="..."        the faults, separated by spaces, instead of the list below
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=${1:-$root/dist}
wires=${LIBFABRIC_WIRES:-shm tcp}
faults=${LIBFABRIC_FAULTS:-seed=3,reorder=16 seed=5,reread=0.3,delay_us=0..300 max_batch=2,sq_size=16}
work=$(mktemp -d)
log=$work/err
trap 'rm -rf "$work"' EXIT
unset FI_PROVIDER SOFTEFA_FAULTS SOFTEFA_NICS SOFTEFA_WIRE

if [ ! -f "$dist/libsoftefa-fi.so" ]; then
    fail "libfabric programs: $dist has no libsoftefa-fi.so; run make build first"
    finish
fi
export FI_PROVIDER_PATH=$dist

# Succeeds if a process listens on this TCP port.
listens() {
    local hex
    hex=$(printf ':%04X' "$1")
    awk -v port="$hex" '$4 == "0A" && index($2, port) { found = 1 } END { exit !found }' /proc/net/tcp /proc/net/tcp6 2>/dev/null
}

# Ports below the range from which the kernel picks ports for connections.
next_port=$((15000 + $$ % 15000))

# two NAME SERVER-OPTION CLIENT-OPTION PROGRAM ARGS...: a server and a client; the port is appended to the options.
two() {
    local name=$1 server_option=$2 client_option=$3 server status
    shift 3
    while listens "$next_port"; do next_port=$((next_port + 1)); done
    timeout 300 "$@" "$server_option$next_port" >"$work/server" 2>&1 &
    server=$!
    until listens "$next_port" || ! kill -0 "$server" 2>/dev/null; do sleep 0.05; done
    timeout 300 "$@" "$client_option$next_port" 127.0.0.1 >"$work/client" 2>&1
    status=$?
    wait "$server" || status=$?
    next_port=$((next_port + 1))
    if [ "$status" -eq 0 ]; then pass "$name"; else fail "$name: status $status" "$work/server" "$work/client"; fi
}

# clients NAME: runs the clients in this directory, which print a line per test.
clients() {
    timeout 600 "$work/clients" >"$work/out" 2>"$log"
    count "$work/out" $? "$1" "$1: "
}

# The fabtests programs with their arguments. -E exchanges addresses outside the fabric, which real EFA needs.
fabtests() {
    cat <<'LIST'
fi_rdm
fi_rdm_pingpong -v -I 50
fi_rdm_pingpong -v -I 20 -c sread
fi_rdm_pingpong -v -I 20 -c fd
fi_rdm_pingpong -v -I 20 -U
fi_rdm_pingpong -I 20 -t counter
fi_rdm_tagged_pingpong -v -I 50
fi_rdm_tagged_bw -I 100
fi_rdm_tagged_peek
fi_rdm_cntr_pingpong -I 50
fi_rdm_rma_event
fi_rma_bw -o write -v -I 20
fi_rma_bw -o writedata -v -I 20
fi_rma_bw -o read -I 20
fi_rma_bw -o write -I 20 -t counter
fi_rma_pingpong -o write -I 20
fi_rma_pingpong -o writedata -v -I 20
fi_bw -I 100
fi_cq_data
fi_unexpected_msg -I 5
fi_multi_recv
fi_multi_ep
fi_recv_cancel
fi_rdm_multi_client -C 3
fi_av_xfer
fi_resmgmt_test
LIST
    # Newer programs offer FI_CONTEXT2, and can use the card directly.
    [ -x "$FABTESTS_DIR/fi_flood" ] || return
    cat <<'LIST'
fi_flood
fi_inject_test -A inject
fi_rdm_bw -I 100
fi_rma_tx_completion
fi_rdm_pingpong -f efa-direct -v -I 20 -S 4096
fi_rdm_pingpong -f efa-direct -v -I 20 -S 4096 -c fd
fi_rdm_pingpong -f efa-direct -I 20 -S 4096 -t counter
fi_rdm_cntr_pingpong -f efa-direct -I 20 -S 64
fi_rdm_rma_event -f efa-direct
fi_rma_bw -f efa-direct -o write -v -I 20
fi_rma_bw -f efa-direct -o writedata -v -I 20
fi_rma_bw -f efa-direct -o read -v -I 20
fi_rma_pingpong -f efa-direct -o writedata -v -I 20
LIST
}

run_fabtests() {
    local name=$1 program args unit found=0
    "$FABTESTS_DIR/fi_rdm_pingpong" -h >"$work/out" 2>&1
    if grep -q "version .* not found" "$work/out"; then
        skip "$name: fabtests: those in FABTESTS_DIR need a newer libfabric"
        return
    fi
    while read -r -u 3 program args; do
        [ -x "$FABTESTS_DIR/$program" ] || continue
        found=1
        # shellcheck disable=SC2086 # the arguments are several words
        two "$name: $program $args" -E= -E= "$FABTESTS_DIR/$program" -p softefa $args
    done 3< <(fabtests)
    for unit in getinfo_test mr_test cntr_test cq_test dom_test eq_test setopt_test; do
        [ -x "$FABTESTS_DIR/fi_$unit" ] || continue
        found=1
        if timeout 120 "$FABTESTS_DIR/fi_$unit" -p softefa >"$work/out" 2>&1; then
            pass "$name: fi_$unit"
        else
            grep -v 'PASS' "$work/out" >"$log"
            fail "$name: fi_$unit" "$log"
        fi
    done
    [ "$found" -eq 1 ] || skip "$name: fabtests: $FABTESTS_DIR holds none of the programs"
}

# Runs all tests with the libfabric that the environment selects.
with_libfabric() {
    local label=$1 wire fault
    for wire in $wires; do
        export SOFTEFA_WIRE=$wire
        if [ "$have_tools" -eq 1 ]; then
            if fi_info -p softefa >"$work/out" 2>&1 && grep -q 'fabric: efa-direct' "$work/out"; then
                pass "$label $wire: fi_info"
            else
                fail "$label $wire: fi_info" "$work/out"
            fi
            two "$label $wire: fi_pingpong" -B -P fi_pingpong -p softefa -e rdm -c
            two "$label $wire: fi_pingpong, tagged" -B -P fi_pingpong -p softefa -e rdm -c -m tagged
        fi
        if [ "$have_clients" -eq 1 ]; then
            clients "$label $wire"
            for fault in $faults; do
                SOFTEFA_FAULTS=$fault clients "$label $wire $fault"
            done
        fi
        [ -z "${FABTESTS_DIR:-}" ] || run_fabtests "$label $wire"
    done
    unset SOFTEFA_WIRE
}

have_tools=1 have_clients=1
if ! command -v fi_info >/dev/null || ! command -v fi_pingpong >/dev/null; then
    skip "fi_info and fi_pingpong: not installed (Debian: libfabric-bin)"
    have_tools=0
fi
if ! command -v "${CC:-cc}" >/dev/null; then
    skip "clients in C: no C compiler"
    have_clients=0
elif ! echo '#include <rdma/fabric.h>' | "${CC:-cc}" -E - >/dev/null 2>&1; then
    skip "clients in C: no headers of libfabric (Debian: libfabric-dev)"
    have_clients=0
elif ! "${CC:-cc}" -std=gnu11 -O1 -Wall -Wextra -Werror -o "$work/clients" "$here"/*.c -lfabric -lpthread 2>"$log"; then
    fail "clients in C: they do not compile"
    have_clients=0
fi
[ -n "${FABTESTS_DIR:-}" ] || skip "libfabric's own tests: set FABTESTS_DIR to a directory with programs of fabtests (see tests/libfabric/README.md)"

with_libfabric "system"
if other=${FERROGIN_LIBFABRIC_ALT:-$("$root/scripts/fetch-libfabric-alt.sh" 2>"$log")} && [ -f "$other" ]; then
    export LD_LIBRARY_PATH=${other%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    faults=
    with_libfabric "other"
else
    skip "programs on a second libfabric: $(tail -n 1 "$log")"
fi
finish
