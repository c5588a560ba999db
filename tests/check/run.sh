#!/usr/bin/env bash
# Runs `ferrogin check` on the kernels of this directory: run.sh [DIST]
#
# Compiles the kernels with clang 22, with their mistakes and repaired, and runs each set on two ranks with several seeds. Every mistake must be
# reported at its two lines with every seed, and nothing else. Prints a line per test and a final line with the counts; exits with status 1 if a
# test failed. Without clang 22, everything counts as skipped; without a Rust that has the source of core, the kernels in Rust.
#
#   FERROGIN_SOAK=1   20 seeds instead of 4
#   CHECK_ONLY=TEXT   only kernels whose names contain TEXT
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
out=$root/target/check
seeds=${FERROGIN_SOAK:+20}
unset SOFTEFA_NICS SOFTEFA_WIRE SOFTGPU_MEMORY FERROGIN_PROVIDER FERROGIN_DEVICE
mkdir -p "$out"
log=$(mktemp "$out/log.XXXXXX")
trap 'rm -f "$log"' EXIT

if ! clang=$("$root/scripts/clang-22.sh" clang++ 2>"$log"); then
    skip "kernels with mistakes: $(cat "$log")"
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
    sed -n 's/^KERNEL(\([a-z_0-9]*\)).*/\1/p; s/.*"ptx-kernel" fn \([a-z_0-9]*\).*/\1/p' "$here"/*.cu "$here"/*.rs | grep -v '_then$' | grep "$@" |
        grep -F "${CHECK_ONLY:-}"
}

# compile_rust NAME OPTION...: the kernels in Rust, with their lines.
compile_rust() {
    RUSTC=$rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_NVPTX64_NVIDIA_CUDA_LINKER=true env -u RUSTFLAGS "${rustc%rustc}cargo" rustc --quiet --release \
        --manifest-path "$out/rust/Cargo.toml" --target nvptx64-nvidia-cuda -Zbuild-std=core --target-dir "$out/rust" "${@:2}" -- \
        --emit=asm -Zverbose-asm -Ctarget-cpu=sm_70 -Ctarget-feature=+ptx82 && cp "$out/rust/nvptx64-nvidia-cuda/release/deps/check_kernels.s" "$out/rust-$1.ptx"
}

# check TEST wrong|repaired SIGNALS OPTION KERNEL...
check() {
    local test=$1 set=$2 signals=$3 option=$4 seed status=0
    shift 4
    [ $# -gt 0 ] || return 0
    for ((seed = 1; seed <= ${seeds:-4}; seed++)); do
        # shellcheck disable=SC2086
        SOFTGPU_SEED=$((seed * 1000)) SOFTEFA_FAULTS="seed=$seed,reorder=64,delay_us=0..200" FERROGIN_SIGNALS=$signals timeout --kill-after=5 300 \
            "$dist/ferrogin" check --json $option -- "$dist/ferrogin" run -n 2 -- "$out/driver" "$out/$language$set.ptx" "$dist/cuda/ferrogin_device.ptx" "$@" \
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
language=
# shellcheck disable=SC2046
{
    check "kernels with a mistake" wrong card "" $(names -v '^strong_\|^rust_')
    check "their repaired twins" repaired card "" $(names -v '^strong_\|^rust_')
    check "kernels with a mistake, emulated signals" wrong emulated "" $(names '^strong_')
    check "their repaired twins, emulated signals" repaired emulated "" $(names '^strong_')
}
for rustc in rustc /usr/bin/rustc none; do
    [ ! -f "$("$rustc" --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library/core/src/lib.rs" ] || break
done
language=rust-
mkdir -p "$out/rust"
sed "s|@ROOT@|$root|" "$here/kernels.toml" >"$out/rust/Cargo.toml"
cp "$root/Cargo.lock" "$out/rust/"
if [ "$rustc" = none ]; then
    skip "kernels in Rust: no rustc here has the source of core (rustup component add rust-src, or Debian's rust-web-src)"
elif ! { compile_rust wrong && compile_rust repaired --features repaired; } >"$log" 2>&1; then
    fail "the kernels in Rust compile"
else
    for signals in card emulated; do
        # shellcheck disable=SC2046
        check "kernels in Rust with a mistake, $signals signals" wrong $signals "" $(names '^rust_')
        # shellcheck disable=SC2046
        check "their repaired twins, $signals signals" repaired $signals "" $(names '^rust_')
    done
fi
[ -z "${CHECK_ONLY:-}" ] || finish

# run SEED OPTION... -- PROGRAM...: the program's RANKS (default: 2), PER_NODE on each node (default: 1), under the check. Its reports go to reports.json.
run() {
    local seed=$1 options=() status=0
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    SOFTGPU_SEED=$((seed * 1000)) SOFTEFA_FAULTS="seed=$seed,reorder=64,delay_us=0..200" timeout --kill-after=5 300 "$dist/ferrogin" check --json "${options[@]}" -- \
        "$dist/ferrogin" run -n "${RANKS:-2}" -- sh -c 'FERROGIN_NODE=$((FERROGIN_RANK / ${PER_NODE:-1})) exec "$0" "$@"' "$@" >"$out/reports.json" 2>"$log" || status=$?
    cat "$out/reports.json" >>"$log"
    return $status
}

# Our own kernels and nccl_ep's, without mistakes.
for source in "$root"/examples/*.cu; do
    name=$(basename "$source" .cu)
    "$clang" -x cuda -std=c++17 --cuda-device-only --cuda-gpu-arch=sm_75 --cuda-feature=+ptx82 -nocudainc -nocudalib -O2 -gline-tables-only -S -DPTX= \
        -I"$dist/include" -include ferrogin/clang_cuda.h "$source" -o "$out/$name.ptx" >"$log" 2>&1 &&
        "$clang" -std=c++17 -x c++ -DPTX="{\"$out/$name.ptx\", \"$dist/cuda/ferrogin_device.ptx\"}" "$source" -I"$dist/gpu" -I"$dist/include" -o "$out/$name" \
            -L"$dist" -L"$dist/gpu" -lferrogin -lcuda -Wl,-rpath,"$dist" >"$log" 2>&1 &&
        run 1 -- "$out/$name" && [ ! -s "$out/reports.json" ] && pass "the example $name is silent" || fail "the example $name is silent"
done

# perf's kernels have no line information, but a file of exceptions.
FERROGIN_SIGNALS=card run 1 --exceptions "$root/src/perf/check-exceptions.txt" -- "$dist/ferrogin" perf put put-signal get -n 50 -b 64 -e 128 &&
    [ ! -s "$out/reports.json" ] && pass "perf is silent but for its exceptions" || fail "perf is silent but for its exceptions"

# The scenarios. Their checked-in kernels have no line information: those whose calls are inlined run with emulated signals, which the check knows all
# the same, or with gin.cu's compiled again.
scenarios() {
    local signals=$1 api=$2 name
    shift 2
    for name in "$@"; do
        # shellcheck disable=SC2086
        FERROGIN_SIGNALS=$signals timeout --kill-after=5 300 "$dist/ferrogin" check --json -- "$root/target/release/scenario-runner" --api $api --reps 2 \
            --only "$name" >"$out/reports.json" 2>"$log" && [ ! -s "$out/reports.json" ] || return 1
    done
}
if ! FERROGIN_DIST=$dist "${CARGO:-cargo}" build --release --locked --quiet --manifest-path "$root/Cargo.toml" -p scenario-runner >"$log" 2>&1 ||
    ! "$clang" -x cuda -std=c++17 --cuda-device-only --cuda-gpu-arch=sm_70 --cuda-feature=+ptx82 -nocudainc -nocudalib -O2 -gline-tables-only -S \
        -I"$dist/include" -include ferrogin/clang_cuda.h "$root/scenarios/scenario-kernels/gin.cu" -o "$out/gin.ptx" >"$log" 2>&1; then
    fail "the scenarios compile"
else
    export FERROGIN_DIST=$dist
    usual="value-signal aggregate put-signal get flush-reuse signal-reset signal-add threads sharing lanes flush-async contexts"
    workloads="barriers deepep deepep-indexed nccl-ep"
    # shellcheck disable=SC2086
    scenarios card c $usual && pass "the scenarios are silent" || fail "the scenarios are silent"
    scenarios card "cuda --gin $out/gin.ptx" sharing lanes && pass "the scenarios in C++ are silent" || fail "the scenarios in C++ are silent"
    for api in c cuda rust; do
        # shellcheck disable=SC2086
        scenarios emulated $api $workloads && pass "the workloads with api $api are silent" || fail "the workloads with api $api are silent"
    done
fi

# ep KIND EDITS...: compiles the package's kernels with these edits and DEFINES. Sets `ep`.
ep() {
    local kind=$1 headers=$out/headers
    shift
    ep=$out/ep-$kind
    # shellcheck disable=SC2086
    python3 "$root/tests/ep/patch.py" "$package" "$headers" "$@" >"$log" 2>&1 &&
        DIST=$dist "$root/tests/ep/compile.sh" "$root/examples/ep/$kind.cu" "$ep" "$headers" -gline-tables-only ${DEFINES:--DRANKS=2} >"$log" 2>&1
}

if ! package=$("$root/tests/ep/fetch.sh" "$root/.cache" 2>"$log"); then
    skip "nccl_ep's kernels: $(tail -n 1 "$log")"
    finish
fi
export FERROGIN_SIGNALS=emulated
on_ep() {
    local seed=$1
    run "$seed" --lenient --exceptions "$root/tests/ep/exceptions.txt" -- "$ep" kernels="$ep.ptx" device="$dist/cuda/ferrogin_device.ptx" rounds=2
}
# nccl_ep's race has to be named by its two lines with every seed.
ll_race() {
    local seed
    ep ll --without count-before-release || return 1
    for ((seed = 1; seed <= ${seeds:-2}; seed++)); do
        on_ep "$seed"
        grep -q '"kind":"race".*ll_ep.cuh:10\(10\|18\)".*ll_ep.cuh:10\(10\|18\)"' "$out/reports.json" || return 1
    done
}
if ll_race; then pass "nccl_ep's LL: its race is named"; else fail "nccl_ep's LL: its race is named"; fi
for kind in ll ht; do
    if ep $kind && on_ep 1 && [ ! -s "$out/reports.json" ]; then pass "nccl_ep's ${kind^^} is silent"; else fail "nccl_ep's ${kind^^} is silent"; fi
done
if ! package=$("$root/tests/ep/fetch.sh" "$root/.cache" deep_ep 2>"$log"); then
    skip "DeepEP's kernels: $(tail -n 1 "$log")"
elif DEFINES="-std=gnu++20 -DRANKS=4 -DNODES=2 -DTOPK=4" ep deepep && RANKS=4 PER_NODE=2 on_ep 1 && [ ! -s "$out/reports.json" ]; then
    pass "DeepEP, hybrid, 4 ranks, two per node, is silent"
else
    fail "DeepEP, hybrid, 4 ranks, two per node, is silent"
fi

finish
