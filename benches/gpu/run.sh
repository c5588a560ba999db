#!/usr/bin/env bash
# Measures posts from GPU kernels, with ferrogin's device code and NCCL's: run.sh [--check]
#
# On a machine with a GPU it compiles the kernels with nvcc (benches/gpu/build.sh) and prints medians, spread and
# ratios. With --check it compiles them with clang and runs a few posts of each kind on FERROGIN_DIST's software GPU
# (default: dist). The bench must then run and the cards must count every post; it prints no figures, which would mean
# nothing on a software GPU.
#
#   GPU_BENCH=PROGRAM   on a machine without cargo, nvcc or a network: the bench as `cargo bench -p ferrogin-benches --bench gpu --no-run` leaves it
#                       in target/release/deps, with the kernels that `benches/gpu/build.sh target/gpu-bench/nvcc SM` left
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dist=${FERROGIN_DIST:-$root/dist}
cd "$root"
bench=("${CARGO:-cargo}" bench --quiet --locked -p ferrogin-benches --bench gpu --)
if [ "${1:-}" = --check ]; then
    if [ ! -f "$dist/gpu/libcuda.so.1" ]; then
        echo "SKIP gpu: $dist has no software GPU: run make build"
        exit 0
    fi
    status=0
    why=$("$here/build.sh" "$root/target/gpu-bench/check" 2>&1) || status=$?
    if [ $status -eq 3 ]; then
        echo "SKIP gpu: $why"
        exit 0
    elif [ $status -ne 0 ]; then
        echo "FAIL gpu: the kernels do not compile: $why"
        exit 1
    fi
    LD_LIBRARY_PATH=$dist/gpu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} SOFTGPU_WATCHDOG=60 "${bench[@]}" --check --modules "$root/target/gpu-bench/check"
    exit
fi
if [ -n "${GPU_BENCH:-}" ]; then
    echo "benches/gpu/run.sh"
    exec "$GPU_BENCH" --modules "$root/target/gpu-bench/nvcc"
fi
if ! machine=$("${CARGO:-cargo}" run --quiet --release --locked -p scenario-runner -- --gpu 2>&1); then
    echo "benches/gpu: ${machine#scenario-runner: }" >&2
    exit 3
fi
echo "$machine; benches/gpu/run.sh"
"$here/build.sh" "$root/target/gpu-bench/nvcc" "$(sed -n 's/.*compute capability \([0-9]*\)\.\([0-9]*\).*/\1\2/p' <<<"$machine")"
"${bench[@]}" --modules "$root/target/gpu-bench/nvcc"
