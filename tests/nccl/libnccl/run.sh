#!/usr/bin/env bash
# The real libnccl with the plugin, two ranks on one GPU: run.sh [DIST]
#
# DIST (default: dist) has libnccl-gin-ferrogin.so and libsoftefa-fi.so. For NCCL 2.31.2 and 2.32.3 the script fetches compiler and
# headers (tests/cuda/fetch-tools.sh) and compiles two_ranks.cu, which needs no GPU. On a machine with a GPU it fetches the library
# from PyPI (into .cache/) and runs the program over the software card. A run passes if NCCL loads and selects the plugin and all
# data arrives. Prints a line for each run and a last line with the counts; status 1 if a run failed. Prints SKIP for a missing
# requirement. The logs stay in target/libnccl/.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
out=$root/target/libnccl
passed=0 failed=0 skipped=0

say() {
    echo "$1 $2"
    case $1 in
    PASS) passed=$((passed + 1)) ;;
    FAIL) failed=$((failed + 1)) ;;
    SKIP) skipped=$((skipped + 1)) ;;
    esac
}

finish() {
    echo "libnccl: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

# The library, in the directory of the headers that the other tests share.
fetch_library() {
    local version=$1 target=$root/.cache/libnccl-$1 work
    [ -f "$target/libnccl.so.2" ] && return
    work=$(mktemp -d "$root/.cache/fetch.XXXXXX")
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$work" \
        "nvidia-nccl-cu13==$version" >"$out/pip.log" 2>&1 &&
        python3 -m zipfile -e "$work"/*.whl "$work/tree" &&
        mkdir -p "$target" && mv "$work"/tree/nvidia/nccl/lib/libnccl.so.2 "$target/"
    local status=$?
    rm -rf "$work"
    return $status
}

mkdir -p "$out"
if ! cuda=$(bash "$root/tests/cuda/fetch-tools.sh" "$root/.cache" 2>"$out/tools.log"); then
    say SKIP "libnccl with the plugin: $(tail -n 1 "$out/tools.log")"
    finish
fi
for version in 2.31.2 2.32.3; do
    name="libnccl $version"
    object=$out/two_ranks-$version.o
    if "$cuda/bin/nvcc" -std=c++17 -arch=sm_90 -I"$root/.cache/nccl-$version/include" -c "$here/two_ranks.cu" \
        -o "$object" >"$out/compile-$version.log" 2>&1; then
        say PASS "$name: the program compiles"
    else
        say FAIL "$name: $(grep -m 1 -i error "$out/compile-$version.log")"
        continue
    fi
    if ! ldconfig -p | grep libcuda.so.1 >/dev/null; then
        say SKIP "$name: two ranks on a GPU: no CUDA driver on this machine"
        continue
    fi
    if ! fetch_library "$version"; then
        say SKIP "$name: two ranks on a GPU: the library cannot be fetched: $(tail -n 1 "$out/pip.log")"
        continue
    fi
    library=$root/.cache/libnccl-$version
    if ! "$cuda/bin/nvcc" -arch=sm_90 -cudart shared "$object" "$library/libnccl.so.2" -o "$out/two_ranks-$version" \
        >"$out/link-$version.log" 2>&1; then
        say FAIL "$name: linking: $(head -n 1 "$out/link-$version.log")"
        continue
    fi
    log=$out/run-$version.log
    LD_LIBRARY_PATH=$library:$cuda/lib NCCL_GIN_PLUGIN=$dist/libnccl-gin-ferrogin.so NCCL_GIN_TYPE=5 \
        NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_SYM_GIN_KERNELS_ENABLE=0 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET \
        FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda timeout 180 "$out/two_ranks-$version" >"$log" 2>&1
    status=$?
    if [ $status -eq 77 ]; then
        say SKIP "$name: two ranks on a GPU: no GPU on this machine"
    elif [ $status -ne 0 ]; then
        tail -n 20 "$log"
        say FAIL "$name: two ranks on a GPU: status $status: $(grep -m 1 -E 'WARN|^rank' "$log")"
    elif ! grep 'GIN/ferrogin: rank 0 of 2' "$log" >/dev/null; then
        say FAIL "$name: the data arrived, but not by way of the plugin"
    else
        say PASS "$name: two ranks on a GPU, over the plugin and the software card"
    fi
done
finish
