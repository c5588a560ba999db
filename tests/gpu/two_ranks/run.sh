#!/usr/bin/env bash
# Runs the two-rank test over the software card: run.sh [DIST]
#
# Builds the programs (build.sh) and runs each; without a CUDA driver, only builds them. The ranks have a GPU each, or share one. A run
# passes if every phase passes on both ranks, through the plugin. Prints a line per phase and a final line with the counts; exits with
# status 1 if something failed. Each run's output stays in target/gpu/logs/.
#
#   FERROGIN_PROVIDER=efa   over EFA cards
#   GPU_PREBUILT=1          uses the programs in target/gpu/ and the libraries in .cache/ that another machine left, and fetches nothing
#   SOFTWARE_GPU=1          runs the programs for the software GPU, on it
set -uo pipefail

. "$(dirname "$0")/../../counts.sh"
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
out=$root/target/gpu
mkdir -p "$out/logs"

# start PROGRAM: starts two ranks with mpirun or, if there is none, as a script would.
start() {
    if command -v mpirun >/dev/null; then
        local options=()
        if mpirun --version 2>&1 | grep -q 'Open MPI'; then options=(--oversubscribe); fi
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun "${options[@]}" -np 2 "$1"
        return
    fi
    local one status=0
    FERROGIN_RANK=1 FERROGIN_NRANKS=2 "$1" &
    one=$!
    FERROGIN_RANK=0 FERROGIN_NRANKS=2 "$1" || status=$?
    wait "$one" || status=$?
    return $status
}

export FERROGIN_PROVIDER=${FERROGIN_PROVIDER:-softefa} NCCL_GIN_PLUGIN=$dist/libnccl-gin-ferrogin.so NCCL_MULTI_RANK_GPU_ENABLE=1
programs=()
if [ -n "${GPU_PREBUILT:-}" ]; then
    for program in "$out"/two_ranks-[0-9]*[a-z]; do [ ! -x "$program" ] || programs+=("$program"); done
    [ ${#programs[@]} -gt 0 ] || skip "two ranks: target/gpu/ has no programs of build.sh"
else
    built=$("$here/build.sh" ${SOFTWARE_GPU:+--software} "$dist" 2>"$out/logs/build.txt")
    status=$?
    while read -r program; do [ -z "$program" ] || programs+=("$program"); done <<<"$built"
    if [ $status -eq 3 ]; then
        skip "two ranks: $(tail -n 1 "$out/logs/build.txt")"
    elif [ $status -ne 0 ]; then
        fail "two ranks: $(grep -m 1 -iE 'error|fatal' "$out/logs/build.txt" || tail -n 1 "$out/logs/build.txt")"
    fi
fi
for program in "${programs[@]}"; do
    name=$(basename "$program") log=$out/logs/$(basename "$program").txt
    if [ -n "${SOFTWARE_GPU:-}" ]; then
        # The software GPU's clock counts instructions, so a phase's limit is long there; its watchdog ends a kernel that waits in vain.
        export LD_LIBRARY_PATH=$dist/gpu FERROGIN_DEVICE=cuda SOFTGPU_WATCHDOG=${SOFTGPU_WATCHDOG:-120}
    elif ! ldconfig -p | grep libcuda.so.1 >/dev/null; then
        pass "$name: the program compiles"
        skip "$name on a GPU: no CUDA driver on this machine"
        continue
    fi
    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET start "$program" >"$log" 2>&1
    status=$?
    while read -r word line; do say "$word" "$name, $line"; done < <(grep -E '^(PASS|FAIL) ' "$log")
    if [ $status -eq 3 ]; then
        skip "$name: $(grep -m 1 '^two_ranks: ' "$log")"
    elif [ $status -ne 0 ]; then
        fail "$name: status $status: $(grep -m 1 -E '^FAIL|WARN' "$log" || tail -n 1 "$log"); see $log"
    elif [ -z "${SOFTWARE_GPU:-}" ] && ! grep -q 'GIN/ferrogin: rank 0 of 2' "$log"; then
        fail "$name: the data arrived, but not by way of the plugin; see $log"
    fi
done
finish
