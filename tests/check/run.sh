#!/usr/bin/env bash
# Runs `ferrogin check` on the kernels of this directory: run.sh [DIST]
#
# Compiles the kernels with clang 22, with their mistakes and repaired, and runs each set on two ranks with several seeds. Every mistake must be
# reported at its two lines with every seed, and nothing else. Prints a line per test and a final line with the counts; exits with status 1 if a
# test failed. Without clang 22, everything counts as skipped.
#
#   FERROGIN_SOAK=1   20 seeds instead of 4
#   CHECK_ONLY=TEXT   only kernels whose names contain TEXT
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
out=$root/target/check
seeds=${FERROGIN_SOAK:+20}
passed=0 failed=0 skipped=0
unset SOFTEFA_NICS SOFTEFA_WIRE SOFTGPU_MEMORY FERROGIN_PROVIDER FERROGIN_DEVICE
mkdir -p "$out"
log=$(mktemp "$out/log.XXXXXX")
trap 'rm -f "$log"' EXIT

pass() {
    echo "PASS $1"
    passed=$((passed + 1))
}

fail() {
    echo "FAIL $1"
    failed=$((failed + 1))
    tail -n 40 "$log" | sed 's/^/    /'
}

finish() {
    echo "check: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

clang=
for command in clang++-22 clang++; do
    version=$("$command" -dumpversion 2>/dev/null | cut -d. -f1) || continue
    if [ "${version:-0}" -ge 22 ]; then
        clang=$command
        break
    fi
done
if [ -z "$clang" ]; then
    echo "SKIP kernels with mistakes: no clang 22 is here (apt-get install clang-22)"
    skipped=1
    finish
fi

# compile NAME OPTION...: all kernels in one file, with their lines.
compile() {
    local name=$1
    shift
    printf '#include "%s"\n' "$here"/*.cu |
        "$clang" -x cuda -std=c++17 --cuda-device-only --cuda-gpu-arch=sm_90 --cuda-feature=+ptx86 -nocudainc -nocudalib -O2 -Wall -Werror \
            -gline-tables-only -S -I"$dist/include" -I"$here" -include ferrogin/clang_cuda.h "$@" - -o "$out/$name.ptx"
}

if ! { compile wrong && compile repaired -DREPAIRED &&
    "$clang" -std=c++17 -O1 -Wall -I"$dist/include" -I"$dist/gpu" "$here/driver.cpp" -o "$out/driver" -L"$dist" -L"$dist/gpu" -lferrogin -lcuda \
        -Wl,-rpath,"$dist"; } >"$log" 2>&1; then
    fail "the kernels compile"
    finish
fi

# names PATTERN: the kernels whose names match, or don't with -v.
names() {
    sed -n 's/^KERNEL(\([a-z_0-9]*\))/\1/p' "$here"/*.cu | tr -d '{ ' | grep -v '_then$' | grep "$@" | grep -F "${CHECK_ONLY:-}"
}

# check TEST wrong|repaired SIGNALS OPTION KERNEL...
check() {
    local test=$1 set=$2 signals=$3 option=$4 seed status=0
    shift 4
    [ $# -gt 0 ] || return 0
    for ((seed = 1; seed <= ${seeds:-4}; seed++)); do
        # shellcheck disable=SC2086
        SOFTGPU_SEED=$((seed * 1000)) SOFTEFA_FAULTS="seed=$seed,reorder=64,delay_us=0..200" FERROGIN_SIGNALS=$signals timeout --kill-after=5 300 \
            "$dist/ferrogin" check --json $option -- "$dist/ferrogin" run -n 2 -- "$out/driver" "$out/$set.ptx" "$dist/cuda/ferrogin_device.ptx" "$@" \
            >"$out/reports.json" 2>"$log" || status=$?
        if [ $status -gt 1 ]; then
            fail "$test, seed $seed"
            return
        fi
        if ! python3 "$here/expect.py" "$out/reports.json" $set "$@" >"$log"; then
            fail "$test, seed $seed"
            return
        fi
    done
    pass "$test"
}

# Strong signals need emulated ones.
# shellcheck disable=SC2046
{
    check "kernels with a mistake" wrong card "" $(names -v '^strong_')
    check "their repaired twins" repaired card "" $(names -v '^strong_')
    check "kernels with a mistake, emulated signals" wrong emulated "" $(names '^strong_')
    check "their repaired twins, emulated signals" repaired emulated "" $(names '^strong_')
}

finish
