#!/usr/bin/env bash
# Runs all tests that need a GPU, as `make test-gpu` does: run.sh [DIST] [NAME...]
#
# DIST (default: dist) is the output of `make build`; two ranks share the GPU, and the software card takes the place of
# EFA. First come two values with the shipped PTX, then the two-rank test with NCCL's library (two_ranks/), then the
# scenarios, with the PTX and with machine code that nvcc makes from ferrogin/gin.cuh and ferrogin/nccl_gin.cuh: with
# both policies, all layouts and groups, on cards with faults, and under compute-sanitizer. The posting rate comes last
# (benches/gpu/run.sh). nvcc, NCCL and compute-sanitizer are fetched from PyPI (into .cache/) unless they're already
# there. Given names, runs only the tests whose names contain one of them.
#
# Prints a line per test, a line with the counts, and the report to send: target/gpu/ferrogin-gpu-report.tar.gz, with
# each test's output, which also stays in target/gpu/logs/. Exits with status 1 if a test failed, and 3, with the
# reason, if no GPU here can run them.
#
#   GPU_SCENARIOS=PROGRAM   scenario-runner [target/release/scenario-runner]
#   GPU_REPS=N              repetitions of each step [60]
#   GPU_PREBUILT=1          on a machine without nvcc or a network: uses what another machine built, the machine code in target/gpu/images
#                           (images.sh), and the two-rank programs and NCCL's libraries (GPU_SM=N two_ranks/build.sh)
#   SOFTWARE_GPU=1          on DIST's software GPU: without machine code and compute-sanitizer, and the two-rank test without NCCL's library
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
[ $# -gt 0 ] && shift
names=("$@")
scenarios=${GPU_SCENARIOS:-$root/target/release/scenario-runner}
reps=${GPU_REPS:-60}
out=$root/target/gpu
logs=$out/logs
report=$out/ferrogin-gpu-report.tar.gz
began=$SECONDS
releases="2.31.2 2.32.3"
# compute-sanitizer from the compiler's release.
sanitizer_version=13.0.85
summary=$logs/summary.txt

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
rm -rf "$logs"
mkdir -p "$logs"
echo "test-gpu: $machine" | tee "$summary"
nvidia-smi >"$logs/nvidia-smi.txt" 2>&1
# A DIST without the tool will do.
has_tool() { [ -x "$dist/ferrogin" ]; }
if has_tool; then "$dist/ferrogin" doctor --json >"$logs/doctor.json" 2>"$logs/doctor.txt"; fi

# run NAME [SETTING=VALUE...] -- OPTION...: the ranks must pass all scenarios that the options select.
run() {
    local name=$1 settings=() log
    shift
    while [ "$1" != -- ]; do settings+=("$1") && shift; done
    shift
    wanted "$name" || return
    log=$logs/${name//[^a-zA-Z0-9.]/-}.txt
    if env "${settings[@]}" timeout -k 10 600 "${below[@]}" "$scenarios" --reps "$reps" "$@" >"$log" 2>&1; then
        pass "$name: $(grep -c '\] PASS ' "$log") scenarios"
    else
        fail "$name: status $?: $(grep -m 1 -E 'scenario-runner: |ERROR SUMMARY|========= [A-Z]' "$log"); see $log"
    fi
}
below=()

# ends NAME SETTING TEXT OPTION...: the ranks must fail in time, with this text.
ends() {
    local name=$1 setting=$2 text=$3 log
    shift 3
    wanted "$name" || return
    log=$logs/${name//[^a-zA-Z0-9.]/-}.txt
    if env "$setting" timeout -k 10 120 "$scenarios" --reps 200 "$@" >"$log" 2>&1; then
        fail "$name: the ranks pass; see $log"
    elif grep -qE "$text" "$log"; then
        pass "$name"
    else
        fail "$name: no line has '$text'; see $log"
    fi
}

# All tests for one build of the kernels: its name, the API, and the build's options.
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

# The shortest check comes first.
usual=$reps reps=10
run "first values, PTX" -- --api c --only value-poll --only value-signal
reps=$usual

# With names, only if one of them asks for it.
sm=$(sed -n 's/.*compute capability \([0-9]*\)\.\([0-9]*\).*/\1\2/p' <<<"$machine")
if wanted two_ranks; then
    GPU_SM=$sm "$here/two_ranks/run.sh" "$dist" >"$logs/two_ranks.txt" 2>&1
    count "$logs/two_ranks.txt" $? two_ranks
fi

build "PTX, gin.h" c
build "PTX, gin.cuh" cuda
build "PTX, Rust" rust
for api in c cuda rust; do
    ends "PTX, api $api, failed requests" SOFTEFA_FAULTS=error_every=2 "completed a work request in error|aborted by the host" --api "$api" --only flood
    ends "PTX, api $api, late card" SOFTEFA_FAULTS=delay_us=3000000..3000000 "waited for 1, still at 0" --api "$api" --only value-signal --deadline 1
    ends "PTX, api $api, dead card" SOFTEFA_FAULTS=die_after=20 "completed a work request in error|aborted by the host|waited for" --api "$api" --only flood --deadline 20
done

if [ -n "${SOFTWARE_GPU:-}" ]; then
    ! wanted "machine code" || skip "machine code of nvcc: the software GPU executes PTX"
    ! wanted compute-sanitizer || skip "compute-sanitizer: it needs a GPU"
else
    # shellcheck disable=SC2086
    if [ -z "${GPU_PREBUILT:-}" ]; then
        rm -rf "$out/images"
        if ! cuda=$(bash "$root/tests/cuda/fetch-tools.sh" "$root/.cache" 2>"$logs/tools.txt"); then
            skip "machine code of nvcc: $(tail -n 1 "$logs/tools.txt")"
        elif ! bash "$here/images.sh" "$cuda" "$sm" "$out/images" $releases >"$logs/images.txt" 2>&1; then
            fail "nvcc for sm_$sm: $(grep -m 1 -iE 'error|fatal' "$logs/images.txt")"
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
                "nvidia-cuda-sanitizer-api==$sanitizer_version" >"$logs/pip.txt" 2>&1 &&
                python3 -m zipfile -e "$work"/*.whl "$work/tree" && chmod +x "$work"/tree/nvidia/cu13/bin/compute-sanitizer &&
                mv "$work/tree/nvidia/cu13" "$tree"
            rm -rf "$work"
        fi
        [ -x "$tree/bin/compute-sanitizer" ] && sanitizer=$tree/bin/compute-sanitizer injection=(--injection-path "$tree/lib")
    fi
    if [ -z "$sanitizer" ]; then
        skip "compute-sanitizer: none is installed, and none came from PyPI: $(tail -n 1 "$logs/pip.txt" 2>/dev/null)"
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
fi

# The bench prints its figures. They would mean nothing on the software GPU, so there it only counts posts.
if wanted "posting rate" && [ -z "${GPU_BENCH:-}" ] && ! command -v "${CARGO:-cargo}" >/dev/null; then
    skip "posting rate: no cargo on this machine, and no GPU_BENCH (benches/gpu/run.sh)"
elif wanted "posting rate"; then
    FERROGIN_DIST=$dist "$root/benches/gpu/run.sh" ${SOFTWARE_GPU:+--check} >"$logs/posting-rate.txt" 2>&1
    status=$?
    why=$(sed -n 's/^SKIP gpu: //p' "$logs/posting-rate.txt")
    case $status in
    0) if [ -n "$why" ]; then skip "posting rate: $why"; else pass "posting rate, NCCL's device code beside ferrogin's"; fi ;;
    3) skip "posting rate: $(tail -n 1 "$logs/posting-rate.txt")" ;;
    *) fail "posting rate: status $status: $(tail -n 1 "$logs/posting-rate.txt")" ;;
    esac
    [ -n "${SOFTWARE_GPU:-}" ] || cat "$logs/posting-rate.txt"
fi
echo "test-gpu: $passed passed, $failed failed, $skipped skipped, in $((SECONDS - began)) s" | tee -a "$summary"
has_tool && "$dist/ferrogin" pack "$logs" --output "$report" && echo "Please send $report, also if all passed: docs/hardware.md"
[ "$failed" -eq 0 ]
