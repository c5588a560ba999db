#!/usr/bin/env bash
# Tests the plugin with NCCL's own device code: run.sh [DIST] [-- SCENARIO...]
#
# DIST (default: dist) has libnccl-gin-ferrogin.so and libsoftefa-fi.so. For each NCCL release, the script fetches the
# headers from PyPI once (into .cache/), compiles layout_check, gin_post and foreign against them (into
# target/foreign/), and runs all scenarios with 2 and 4 ranks, then on cards with faults, then the RMA plugin's through
# NCCL's proxy. Prints a line per test and a final line with the counts; exits with status 1 if a test failed. Without
# PyPI, pip or a compiler, it prints the reason and counts the tests as skipped.
#
#   FERROGIN_PROVIDER=efa   over the provider of the libfabric in FERROGIN_LIBFABRIC, with the software card below verbs
#   SOFTEFA_FAULTS=...      only these faults
#   FOREIGN_RANKS="2 3 4"   how many ranks to run on a card without faults [2 4; 2 with NCCL 2.31]
#   FOREIGN_RELEASES=...    only these releases
#   FERROGIN_VECTORS=DIR    the vectors, instead of tests/vectors
#   FERROGIN_SOAK=1         2, 3 and 4 ranks; on cards with faults, also the scenarios that wait for seconds
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$root/dist
if [ $# -gt 0 ] && [ "$1" != "--" ]; then
    dist=$1
    shift
fi
[ "${1:-}" = "--" ] && shift
scenarios=("${@:-all}")
releases=${FOREIGN_RELEASES:-2.31.2 2.32.3}
vectors=${FERROGIN_VECTORS:-$root/tests/vectors}

for tool in "${CXX:-g++}" make python3; do
    if ! command -v "$tool" >/dev/null; then
        skip "NCCL's device code on the plugin: no $tool"
        finish
    fi
done
plugin=$dist/libnccl-gin-ferrogin.so
if [ ! -f "$plugin" ]; then
    fail "$plugin does not exist: run make build, or give the directory"
    finish
fi

# run RANKS SCENARIO [OPTION...], with the current release.
run() {
    local ranks=$1 scenario=$2
    shift 2
    "${on_card[@]}" "$out/foreign" "$plugin" --ranks "$ranks" --scenario "$scenario" "$@" >"$log"
    count "$log" $? "NCCL $release, $ranks ranks, ${SOFTEFA_FAULTS:-no faults}, $scenario"
}

# run_proxy RANKS FAULTS [OPTION...]: all chosen scenarios, through NCCL's proxy.
run_proxy() {
    local ranks=$1 scenario
    local -x SOFTEFA_FAULTS=$2
    shift 2
    for scenario in "${scenarios[@]}"; do
        [ "$scenario" = all ] || "$out/foreign" --proxy --list | grep -qx "$scenario" || continue
        "$out/foreign" "$plugin" --proxy --ranks "$ranks" --scenario "$scenario" "$@" >"$log"
        count "$log" $? "NCCL $release, proxy, $ranks ranks, ${SOFTEFA_FAULTS:-no faults}, $scenario"
    done
}

# All tests of one release.
run_release() {
    local status n scenario
    bash "$here/fetch-headers.sh" "$release" "$root/.cache"
    status=$?
    if [ $status -eq 3 ]; then
        skip "NCCL $release: its headers cannot be fetched from PyPI (the reason stands above)"
        return
    elif [ $status -ne 0 ]; then
        echo "FAIL NCCL $release: fetching headers"
        return
    fi
    out=$root/target/foreign/$release
    if ! make --no-print-directory -s -j2 -f "$here/Makefile" RELEASE="$release" OUT="$out" \
        HEADERS="$root/.cache/nccl-$release/include" VECTORS="$vectors"; then
        echo "FAIL NCCL $release: compiling"
        return
    fi
    echo "PASS NCCL $release, layouts: NCCL's headers, the plugin ABI and the vectors agree"
    if [ -n "$no_card" ]; then
        for scenario in $("$out/foreign" --list); do
            skip "NCCL $release over efa, $scenario: $no_card"
        done
        return
    fi
    "$out/gin_post" "$vectors/efa_dp.json" >"$log"
    count "$log" $? "NCCL $release, gin_post"
    # These mostly wait, so they run alongside the other scenarios.
    local failures=
    if [ "${scenarios[*]}" = all ] && [ -z "${SOFTEFA_FAULTS:-}" ]; then
        # Through a pipe, because the ranks' file size limit would cut off what they write to a file.
        {
            {
                [ "$FERROGIN_PROVIDER" != softefa ] || "$out/foreign" "$plugin" --proxy --scenario failures
                "${on_card[@]}" "$out/foreign" "$plugin" --scenario failures
            } 2>&1 >"$log.failures" | cat >&2
        } &
        failures=$!
    fi
    local ranks="2 4"
    # With NCCL 2.31, four ranks add nothing to the three with faults.
    [ "$release" != 2.31.2 ] || ranks=2
    [ -z "${FERROGIN_SOAK:-}" ] || ranks="2 3 4"
    for n in ${FOREIGN_RANKS:-$ranks}; do
        for scenario in "${scenarios[@]}"; do
            run "$n" "$scenario"
        done
    done
    [ "$FERROGIN_PROVIDER" != softefa ] || [ -z "${SOFTEFA_FAULTS:-}" ] || run_proxy 2 "$SOFTEFA_FAULTS" --except large
    [ -z "${SOFTEFA_FAULTS:-}" ] || return
    # Deliveries and completions in any order, with 16-bit request ids; a card without 128-byte requests; counters that
    # start above 0, and counters that wrap during the run, without the scenarios that read a signal or counter
    # (README.md).
    for scenario in "${scenarios[@]}"; do
        SOFTEFA_FAULTS=seed=7,reorder=64,qp_caps=0 run 3 "$scenario"
        [ "$FERROGIN_PROVIDER" != efa ] || SOFTEFA_FAULTS=seed=5,reorder=64,reread=0.2 run 2 "$scenario" "${thin[@]}"
        # NCCL 2.31 has only 64-byte requests, and posts on the same counters.
        [ ${#thin[@]} -gt 0 ] && [ "$release" = 2.31.2 ] || SOFTEFA_FAULTS=wqe_size=64 run 2 "$scenario" "${thin[@]}"
        [ ${#thin[@]} -gt 0 ] && [ "$release" = 2.31.2 ] || SOFTEFA_FAULTS=cntr_start=2147400000 run 2 "$scenario" "${thin[@]}"
        case $scenario in
        all)
            SOFTEFA_FAULTS=cntr_start=2147483640 run 2 plain_laps
            SOFTEFA_FAULTS=cntr_start=2147483640 run 2 put_value
            ;;
        plain_laps | put_value) SOFTEFA_FAULTS=cntr_start=2147483640 run 2 "$scenario" ;;
        esac
    done
    if [ "$FERROGIN_PROVIDER" = softefa ]; then
        run_proxy 3 ""
        run_proxy 2 seed=2,reorder=64
        run_proxy 2 seed=5,reorder=512,reread=0.5,delay_us=0..200 --except large
        FERROGIN_PROVIDER=tcp run_proxy 2 ""
    fi
    [ -z "$failures" ] || { wait "$failures"; count "$log.failures" $? "NCCL $release, failures"; }
}

export FERROGIN_PROVIDER=${FERROGIN_PROVIDER:-softefa}
export FERROGIN_DEVICE=${FERROGIN_DEVICE:-cpu}
# The command that gives the ranks it runs a card, or why there is none.
on_card=(env) no_card=
if [ "$FERROGIN_PROVIDER" = efa ]; then
    on_card=("$dist/ferrogin" verbs --)
    if ! grep -qs 'efa gda ops' "${FERROGIN_LIBFABRIC:-}"; then
        no_card="FERROGIN_LIBFABRIC names no libfabric whose efa provider has operations for GPUs"
    fi
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Scenarios that wait several seconds for a timeout don't depend on the card's sizes and counters.
thin=()
if [ -z "${FERROGIN_SOAK:-}" ] && [ "${scenarios[*]}" = all ]; then
    thin=(--except peer_dies --except killed_in_setup --except dead_peer)
fi
# The releases run side by side, because they mostly wait. Each prints its lines into a file.
declare -A process
for release in $releases; do
    log=$work/$release.log
    (run_release; exit 0) >"$work/$release" 2>&1 &
    process[$release]=$!
done
for release in $releases; do
    wait "${process[$release]}"
    count "$work/$release" $? "NCCL $release"
done
finish
