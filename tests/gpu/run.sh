#!/usr/bin/env bash
# All tests that need a GPU, as `make test-gpu` runs them: run.sh [DIST] [NAME...]
#
# DIST (default: dist) is what `make build` made. The ranks share the first GPU. The scenarios run as kernels over the software card: from
# the PTX that ships, and from machine code that nvcc makes of ferrogin/gin.cuh and of ferrogin/nccl_gin.cuh; on both policies, all layouts
# and groups, on cards with faults, and below compute-sanitizer. Then two ranks run with the real libnccl (tests/gpu/two_ranks/run.sh).
# nvcc, NCCL and compute-sanitizer come from PyPI (into .cache/) unless they are there. With names, only tests whose names contain one.
#
# Prints a line for each test and a last line with the counts; the status is 1 if a test failed, and 3 with the reason if there is no GPU
# that could run them. The output of each test stays in target/gpu/.
#
#   GPU_SCENARIOS=PROGRAM   scenario-runner [target/release/scenario-runner]
#   GPU_REPS=N              repetitions of each step [60]
#   GPU_PREBUILT=1          on a machine without nvcc or a network: the machine code in target/gpu/images (tests/gpu/images.sh), and the programs
#                           and libraries of libnccl (LIBNCCL_LINK=1 tests/gpu/two_ranks/run.sh), as another machine left them
#   SOFTWARE_GPU=1          on the software GPU of DIST, for a test of this script: without machine code, compute-sanitizer and libnccl
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
[ $# -gt 0 ] && shift
names=("$@")
scenarios=${GPU_SCENARIOS:-$root/target/release/scenario-runner}
reps=${GPU_REPS:-60}
out=$root/target/gpu
releases="2.31.2 2.32.3"
# compute-sanitizer of the compiler's release.
sanitizer_version=13.0.85
passed=0 failed=0 skipped=0

pass() {
    echo "PASS $1"
    passed=$((passed + 1))
}

fail() {
    echo "FAIL $1"
    failed=$((failed + 1))
}

skip() {
    echo "SKIP $1"
    skipped=$((skipped + 1))
}

wanted() {
    local name
    [ ${#names[@]} -eq 0 ] && return
    for name in "${names[@]}"; do [[ $1 == *"$name"* ]] && return; done
    return 1
}

for file in "$scenarios" "$dist/libnccl-gin-ferrogin.so" "$dist/libsoftefa-fi.so"; do
    if [ ! -f "$file" ]; then
        echo "test-gpu: $file is missing: run make test-gpu, or make build and cargo build --release -p scenario-runner" >&2
        exit 2
    fi
done
export FERROGIN_DIST=$dist FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda
unset NCCL_GIN_PLUGIN SOFTEFA_FAULTS SOFTEFA_WIRE FERROGIN_POST
[ -z "${SOFTWARE_GPU:-}" ] || export LD_LIBRARY_PATH=$dist/gpu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} SOFTGPU_WATCHDOG=${SOFTGPU_WATCHDOG:-120}
if ! machine=$("$scenarios" --gpu 2>&1); then
    echo "test-gpu: no test ran: ${machine#scenario-runner: }" >&2
    exit 3
fi
echo "test-gpu: $machine"
mkdir -p "$out"

# run NAME [SETTING=VALUE...] -- OPTION...: the ranks pass all scenarios that the options choose.
run() {
    local name=$1 settings=() log
    shift
    while [ "$1" != -- ]; do settings+=("$1") && shift; done
    shift
    wanted "$name" || return
    log=$out/${name//[^a-zA-Z0-9.]/-}.log
    if env "${settings[@]}" timeout -k 10 600 "${below[@]}" "$scenarios" --reps "$reps" "$@" >"$log" 2>&1; then
        pass "$name: $(grep -c '\] PASS ' "$log") scenarios"
    else
        fail "$name: status $?: $(grep -m 1 -E 'scenario-runner: |ERROR SUMMARY|========= [A-Z]' "$log"); see $log"
    fi
}
below=()

# ends NAME SETTING TEXT OPTION...: the ranks fail, within their time, with the text.
ends() {
    local name=$1 setting=$2 text=$3 log
    shift 3
    wanted "$name" || return
    log=$out/${name//[^a-zA-Z0-9.]/-}.log
    if env "$setting" timeout -k 10 120 "$scenarios" --reps 200 "$@" >"$log" 2>&1; then
        fail "$name: the ranks pass; see $log"
    elif grep -qE "$text" "$log"; then
        pass "$name"
    else
        fail "$name: no line has '$text'; see $log"
    fi
}

# All tests of one build of the kernels: its name, the API, and the options for the build.
build() {
    local name=$1 options=(--api "$2" "${@:3}") threads layout
    for threads in one tile warp block; do
        run "$name, groups of $threads" -- "${options[@]}" --threads "$threads"
    done
    for layout in 0 1; do
        run "$name, layout $layout" -- "${options[@]}" --backend-version "$layout"
    done
    run "$name, policy locked" FERROGIN_POST=locked -- "${options[@]}"
    run "$name, all programs in one block" -- "${options[@]}" --threads warp --packed --only threads --only sharing
    run "$name, 132 blocks on one endpoint" -- "${options[@]}" --lanes 132 --only value-storm
    run "$name, 132 blocks on one endpoint, policy locked" FERROGIN_POST=locked -- "${options[@]}" --lanes 132 --only value-storm
    run "$name, four ranks" -- "${options[@]}" --ranks 4
    run "$name, card without order" SOFTEFA_FAULTS="seed=7,reorder=32,delay_us=0..200,reread=0.2,sq_size=16,max_batch=4" -- "${options[@]}"
    run "$name, card without 128-byte requests over tcp" SOFTEFA_WIRE=tcp SOFTEFA_FAULTS=qp_caps=0 -- "${options[@]}"
}

build "PTX, gin.h" c
build "PTX, gin.cuh" cuda
build "PTX, Rust" rust
for api in c cuda rust; do
    ends "PTX, api $api, failed requests" SOFTEFA_FAULTS=error_every=2 "completed a work request in error|aborted by the host" --api "$api" --only flood
    ends "PTX, api $api, late card" SOFTEFA_FAULTS=delay_us=3000000..3000000 "waited for 1, still at 0" --api "$api" --only value-signal --deadline 1
    ends "PTX, api $api, dead card" SOFTEFA_FAULTS=die_after=20 "completed a work request in error|aborted by the host|waited for" --api "$api" --only flood --deadline 20
done

if [ -n "${SOFTWARE_GPU:-}" ]; then
    skip "machine code of nvcc: the software GPU executes PTX"
    skip "compute-sanitizer: it needs a GPU"
    skip "libnccl: NVIDIA's runtime library does not run on the software GPU"
else
    sm=$(sed -n 's/.*compute capability \([0-9]*\)\.\([0-9]*\).*/\1\2/p' <<<"$machine")
    # shellcheck disable=SC2086
    if [ -z "${GPU_PREBUILT:-}" ]; then
        rm -rf "$out/images"
        if ! cuda=$(bash "$root/tests/cuda/fetch-tools.sh" "$root/.cache" 2>"$out/tools.log"); then
            skip "machine code of nvcc: $(tail -n 1 "$out/tools.log")"
        elif ! bash "$here/images.sh" "$cuda" "$sm" "$out/images" $releases >"$out/images.log" 2>&1; then
            fail "nvcc for sm_$sm: $(grep -m 1 -iE 'error|fatal' "$out/images.log")"
        fi
    fi
    for image in "$out"/images/*.cubin; do
        [ -f "$image" ] || continue
        name=$(basename "$image" .cubin)
        case $name in
        gin) build "nvcc, gin.cuh" cuda --image "$image" ;;
        nccl-*) build "nvcc, nccl_gin.cuh of NCCL ${name#nccl-}" cuda --image "$image" ;;
        esac
    done

    sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null)
    injection=()
    if [ -z "$sanitizer" ]; then
        tree=$root/.cache/compute-sanitizer-$sanitizer_version
        if [ ! -x "$tree/bin/compute-sanitizer" ] && [ -z "${GPU_PREBUILT:-}" ]; then
            work=$(mktemp -d "$root/.cache/fetch.XXXXXX")
            python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$work" \
                "nvidia-cuda-sanitizer-api==$sanitizer_version" >"$out/pip.log" 2>&1 &&
                python3 -m zipfile -e "$work"/*.whl "$work/tree" && chmod +x "$work"/tree/nvidia/cu13/bin/compute-sanitizer &&
                mv "$work/tree/nvidia/cu13" "$tree"
            rm -rf "$work"
        fi
        [ -x "$tree/bin/compute-sanitizer" ] && sanitizer=$tree/bin/compute-sanitizer injection=(--injection-path "$tree/lib")
    fi
    if [ -z "$sanitizer" ]; then
        skip "compute-sanitizer: none is installed, and none came from PyPI: $(tail -n 1 "$out/pip.log" 2>/dev/null)"
    else
        usual=$reps
        reps=5
        for tool in memcheck racecheck; do
            below=("$sanitizer" --tool "$tool" --target-processes all --error-exitcode 99 "${injection[@]}")
            for group in one warp block; do
                run "$tool, gin.h, groups of $group" -- --api c --threads "$group" --deadline 300
            done
            run "$tool, gin.cuh" -- --api cuda --threads warp --deadline 300
            [ ! -f "$out/images/nccl-2.32.3.cubin" ] ||
                run "$tool, nccl_gin.cuh" -- --api cuda --image "$out/images/nccl-2.32.3.cubin" --deadline 300
        done
        below=()
        reps=$usual
    fi

    if wanted libnccl; then
        while IFS= read -r line; do
            case $line in
            "PASS "*) pass "${line#PASS }" ;;
            "FAIL "*) fail "${line#FAIL }" ;;
            "SKIP "*) skip "${line#SKIP }" ;;
            *) echo "$line" ;;
            esac
        done < <(LIBNCCL_SM=$sm LIBNCCL_PREBUILT=${GPU_PREBUILT:-} "$root/tests/gpu/two_ranks/run.sh" "$dist")
    fi
fi
echo "test-gpu: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
