#!/usr/bin/env bash
# Links DIST/cuda/ferrogin_device.bc with a kernel, by LLVM 20 and by LLVM 22: run.sh [DIST]
#
# Both come with llvmlite from PyPI, each in its own environment (.cache/python/llvm20, llvm22). Prints a line per test and a final line with
# the counts; exits with status 1 if a test failed. What isn't available counts as skipped.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

skip() {
    echo "SKIP $1: $(tail -n 1 "$log")"
    skipped=$((skipped + 1))
}

# count NAME STATUS: prints and counts a program's lines. A program that ends without a FAIL line, but with an error, counts as failed.
count() {
    grep -E '^(PASS|FAIL) ' "$log"
    passed=$((passed + $(grep -c '^PASS ' "$log")))
    failed=$((failed + $(grep -c '^FAIL ' "$log")))
    [ "$2" -eq 0 ] && return
    echo "FAIL $1: status $2"
    tail -n 12 "$log" | sed 's/^/    /'
    failed=$((failed + 1))
}

for llvm in llvm20 llvm22; do
    if ! environment=$("$root/python/venv.sh" "$llvm" "$here/requirements-$llvm.txt" 2>"$log"); then
        skip "$llvm"
        continue
    fi
    "$environment/bin/python" "$here/ours.py" "$dist/cuda/ferrogin_device.bc" >"$log" 2>&1
    count "ferrogin's bitcode, $llvm" $?
done
echo "bitcode: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
