#!/usr/bin/env bash
# Runs the fuzz targets with the address sanitizer: run.sh [DIST] (DIST is not used).
#
# `cargo fuzz run TARGET` does the same with cargo-fuzz and a nightly compiler; this script needs neither. Failing
# inputs go to tests/fuzz/artifacts/. New corpus inputs stay in the build directory; the script only reads the
# checked-in corpus. If the sanitizer doesn't link, or a crate isn't available, the script prints the reason and counts
# the targets as skipped.
#
#   FUZZ_SECONDS=N        seconds per target [10]
#   FUZZ_TARGETS="a b"    only these targets
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
seconds=${FUZZ_SECONDS:-10}
targets=${FUZZ_TARGETS:-rings wires settings formats messages attributes verbs mlx5_cq mlx5_requests ptx gpu_images}
build=${CARGO_TARGET_DIR:-$root/target}/fuzz
triple=$(uname -m)-unknown-linux-gnu

export CARGO_TARGET_DIR=$build
# RUSTC_BOOTSTRAP makes a stable compiler accept the unstable flags for sanitizer and coverage.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="--cfg fuzzing -Cdebug-assertions -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! (cd "$here" && "${CARGO:-cargo}" build --quiet --release --target "$triple") 2>"$log"; then
    why=$(grep -m1 -E '^error' "$log" || tail -1 "$log")
    for target in $targets; do
        skip "fuzz $target: the targets cannot be built here: $why"
    done
    # A compile error is a failure, not a limitation of the machine.
    if grep -qE '^error(\[E[0-9]+\])?: ' "$log" && grep -qE '^ *--> ' "$log"; then
        fail "fuzz: the targets do not compile"
    fi
else
    mkdir -p "$here/artifacts"
    for target in $targets; do
        corpus=$build/corpus/$target
        mkdir -p "$corpus"
        # No leak detection: libfabric and the fixtures keep memory until the process ends.
        if ASAN_OPTIONS=detect_leaks=0 nice "$build/$triple/release/$target" -max_total_time="$seconds" -max_len=2048 \
            -timeout=100 -rss_limit_mb=4096 -artifact_prefix="$here/artifacts/$target-" -print_final_stats=1 \
            "$corpus" "$here/corpus/$target" >"$log" 2>&1; then
            runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
            pass "fuzz $target: $runs inputs in $seconds s"
        else
            fail "fuzz $target: see $here/artifacts"
        fi
    done
fi
finish
