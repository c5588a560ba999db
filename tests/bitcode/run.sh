#!/usr/bin/env bash
# Reads the device code's bitcode, ferrogin's and NCCL's, with LLVM 20 and 22: run.sh [DIST]
#
# Both LLVMs come with llvmlite from PyPI, each in its own environment (.cache/python/llvm20, llvm22). Links DIST/cuda/ferrogin_device.bc
# with kernels, runs them between two ranks on the software GPU, and shows what the optimizer does to the bitcode of NCCL 2.32.3. Prints a
# line per test and a final line with the counts; exits with status 1 if a test failed. What isn't available counts as skipped.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
release=2.32.3
passed=0 failed=0 skipped=0
faults=seed=3,reorder=64,reread=0.2,delay_us=0..200
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
export FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda

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

# two_ranks LLVM: a kernel of one rank sends to another rank's.
two_ranks() {
    [ -n "$wheel" ] || return
    if "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel" >"$log" 2>&1 &&
        SOFTEFA_FAULTS=$faults timeout --kill-after=5 600 "$dist/ferrogin" gpu -- "$dist/ferrogin" run -n 2 -- \
            "$environment/bin/python" "$here/two_ranks.py" >"$log" 2>&1; then
        echo "PASS $1, a kernel sends an array to another rank's"
        passed=$((passed + 1))
    else
        echo "FAIL $1, a kernel sends an array to another rank's"
        tail -n 12 "$log" | sed 's/^/    /'
        failed=$((failed + 1))
    fi
}

bash "$root/tests/foreign/fetch-headers.sh" $release "$root/.cache" 2>"$log"
fetched=$?
[ $fetched -eq 0 ] || skip "NCCL $release's bitcode"
wheel=$("$root/python/wheel.sh" "$dist" "$work" 2>"$log") || skip "kernels between two ranks"
for llvm in llvm20 llvm22; do
    if ! environment=$("$root/python/venv.sh" "$llvm" "$here/requirements-$llvm.txt" 2>"$log"); then
        skip "$llvm"
        continue
    fi
    "$environment/bin/python" "$here/ours.py" "$dist/cuda/ferrogin_device.bc" >"$log" 2>&1
    count "ferrogin's bitcode, $llvm" $?
    two_ranks "$llvm"
    [ $fetched -eq 0 ] || continue
    "$environment/bin/python" "$here/nccl.py" "$root/.cache/nccl-$release/lib/libnccl_device.bc" >"$log" 2>&1
    count "NCCL's bitcode, $llvm" $?
done
echo "bitcode: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
