#!/usr/bin/env bash
# Builds ferrogin's libraries for aarch64 Linux: check-aarch64.sh [DIST] (DIST is ignored). Installs nothing.
#
#   FERROGIN_AARCH64_TESTS=1   builds the whole workspace, and runs all tests that need nothing but a processor in an emulator, which
#                              takes minutes
#
# Prints a line per part and a last line with the counts; exits with 1 if anything failed. Says what it leaves out if a tool is missing:
# scripts/aarch64-tools.sh lists the tools. The emulator is qemu-aarch64 (Debian: qemu-user).
set -uo pipefail

. "$(dirname "$0")/../tests/counts.sh"
cd "$root" || exit 1
. scripts/aarch64-tools.sh
tests=${FERROGIN_AARCH64_TESTS:-}
log=$(mktemp)
trap 'rm -f "$log"' EXIT


if [ "$(uname -m)" = aarch64 ]; then
    skip "aarch64: this machine is one, and its own tests say more"
    finish aarch64
fi
if ! aarch64_tools; then
    skip "aarch64: $why"
    finish aarch64
fi

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/aarch64 CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false
# In an emulator, unoptimised code, including std, takes many times as long.
[ -z "$tests" ] || export CARGO_PROFILE_DEV_OPT_LEVEL=1
packages=(-p ferrogin-host-plugin -p ferrogin-host-api -p softefa -p ferrogin-device-kernels)
what="the plugin, the host API, the software card and the device library"
[ -z "$tests" ] || { packages=(--workspace) what="the workspace"; }
if ! "$cargo" build "${packages[@]}" --locked "${options[@]}" >"$log" 2>&1; then
    fail "aarch64 build: $what"
    finish aarch64
fi
pass "aarch64 build: $what"
if [ -z "$tests" ]; then
    skip "aarch64 tests: they take minutes; FERROGIN_AARCH64_TESTS=1 or \`cargo xtask soak aarch64\` runs them in an emulator"
    finish aarch64
fi

# Runs `cargo test` for the target with these arguments, and adds up libtest's totals.
run_tests() {
    "$cargo" test --no-fail-fast --locked "${options[@]}" "$@" >"$log" 2>&1
    local status=$? totals
    # Sums up `test result: ok. 3 passed; 0 failed; 1 ignored; ...`, a line per program.
    totals=$(awk '/^test result: /{ok += $4; bad += $6; left += $8} END {print ok + 0, bad + 0, left + 0}' "$log")
    read -r ok bad left <<<"$totals"
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + left))
    [ "$status" -eq 0 ] || cat "$log"
    [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || fail "aarch64 tests: cargo test $* ended with status $status"
    echo "aarch64: of cargo test $*: $ok passed, $bad failed, $left ignored"
}

emulator=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
if [ -z "$emulator" ]; then
    skip "aarch64 tests: no qemu-aarch64"
    finish aarch64
fi
if [ ! -e "/usr/$gnu/lib/ld-linux-aarch64.so.1" ]; then
    skip "aarch64 tests: no C library for $gnu in /usr/$gnu"
    finish aarch64
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="timeout 300 $emulator -L /usr/$gnu"
run_tests -p efa-dp-direct -p ferrogin-ffi-headers -p mlx5 -p ferrogin-device-kernels --lib --tests
run_tests -p soft-nic --lib memory::copy
finish aarch64
