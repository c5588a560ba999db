#!/usr/bin/env bash
# The real libnccl with the plugin, two ranks on one GPU: run.sh [DIST]
#
# DIST (default: dist) has libnccl-gin-ferrogin.so, libsoftefa-fi.so and the ferrogin tool. For NCCL 2.31.2 and 2.32.3 the script fetches
# compiler and headers (tests/cuda/fetch-tools.sh) and compiles nccl.cu twice, with NCCL's own EFA backend and with ferrogin's, which
# needs no GPU. On a machine with a GPU it fetches the library from PyPI (into .cache/) and runs both programs over the software card. A run
# passes if NCCL loads and selects the plugin and all data arrives. Prints a line for each run and a last line with the counts; status 1 if a
# run failed. Prints SKIP for a missing requirement. The logs stay in target/libnccl/.
#
#   LIBNCCL_RELEASES=...   only these releases
#   LIBNCCL_SM=N           machine code for this GPU [90]
#   LIBNCCL_LINK=1         links the programs with the library also where no GPU is
#   LIBNCCL_PREBUILT=1     runs the programs of target/libnccl/ and the libraries of .cache/ that another machine left there, and fetches nothing
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
out=$root/target/libnccl
sm=${LIBNCCL_SM:-90}
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
prebuilt=${LIBNCCL_PREBUILT:-}
if [ -z "$prebuilt" ] && ! cuda=$(bash "$root/tests/cuda/fetch-tools.sh" "$root/.cache" 2>"$out/tools.log"); then
    say SKIP "libnccl with the plugin: $(tail -n 1 "$out/tools.log")"
    finish
fi
[ -n "$prebuilt" ] || "$dist/ferrogin" ptx >"$out/ferrogin_device.ptx"
if [ -z "$prebuilt" ] && ! "$cuda/bin/nvcc" -dc -maxrregcount=64 -gencode "arch=compute_$sm,code=sm_$sm" "$out/ferrogin_device.ptx" -o "$out/device.o" \
    >"$out/device.log" 2>&1; then
    say FAIL "libnccl: the device code: $(head -n 1 "$out/device.log")"
    finish
fi

has_driver() {
    ldconfig -p | grep libcuda.so.1 >/dev/null
}

# compile VERSION BACKEND [OPTION...]: the program, with its device code linked, but without libnccl.
compile() {
    local object=$out/two_ranks-$1-$2.o
    "$cuda/bin/nvcc" -std=c++17 -arch="sm_$sm" -rdc=true -DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -DNCCL_GIN_EFA_GDA_ENABLE=1 \
        -I"$root/.cache/nccl-$1/include" "${@:3}" -dc "$here/nccl.cu" -o "$object" >"$out/compile-$1-$2.log" 2>&1 &&
        "$cuda/bin/nvcc" -arch="sm_$sm" -dlink "$object" "$out/device.o" -o "$out/linked.o" >>"$out/compile-$1-$2.log" 2>&1
}

# run VERSION BACKEND LOG [SETTING...]: the two ranks.
run() {
    env LD_LIBRARY_PATH="$root/.cache/libnccl-$1" NCCL_GIN_PLUGIN="$dist/libnccl-gin-ferrogin.so" NCCL_GIN_TYPE=5 \
        NCCL_SYM_GIN_KERNELS_ENABLE=0 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda \
        "${@:4}" timeout 180 "$out/two_ranks-$1-$2" >"$3" 2>&1
}

for version in ${LIBNCCL_RELEASES:-2.31.2 2.32.3}; do
    for backend in nccl ferrogin; do
        name="libnccl $version, backend of $backend"
        program=$out/two_ranks-$version-$backend
        if [ -n "$prebuilt" ]; then
            if [ ! -x "$program" ] || [ ! -f "$root/.cache/libnccl-$version/libnccl.so.2" ]; then
                say SKIP "$name: two ranks on a GPU: $program or .cache/libnccl-$version/libnccl.so.2 is missing"
                continue
            fi
        else
            options=()
            [ $backend = nccl ] || options=(-I"$root/ffi-headers/include" -include ferrogin/nccl_gin.cuh)
            if compile "$version" $backend "${options[@]}"; then
                say PASS "$name: the program compiles"
            else
                say FAIL "$name: $(grep -m 1 -i error "$out/compile-$version-$backend.log")"
                continue
            fi
            if [ -z "${LIBNCCL_LINK:-}" ] && ! has_driver; then
                say SKIP "$name: two ranks on a GPU: no CUDA driver on this machine"
                continue
            fi
            if ! fetch_library "$version"; then
                say SKIP "$name: two ranks on a GPU: the library cannot be fetched: $(tail -n 1 "$out/pip.log")"
                continue
            fi
            if ! "$cuda/bin/nvcc" -arch="sm_$sm" -rdc=true "$program.o" "$out/device.o" \
                -Xlinker "$root/.cache/libnccl-$version/libnccl.so.2" \
                -o "$program" >"$out/link.log" 2>&1; then
                say FAIL "$name: linking: $(head -n 1 "$out/link.log")"
                continue
            fi
            if ! has_driver; then
                say SKIP "$name: two ranks on a GPU: linked, but no CUDA driver is on this machine"
                continue
            fi
        fi
        log=$out/run-$version-$backend.log
        run "$version" $backend "$log" NCCL_MULTI_RANK_GPU_ENABLE=1
        status=$?
        if [ $status -eq 77 ]; then
            say SKIP "$name: two ranks on a GPU: no GPU on this machine"
            continue
        elif [ $status -ne 0 ]; then
            tail -n 20 "$log"
            say FAIL "$name: two ranks on a GPU: status $status: $(grep -m 1 -E 'WARN|^rank' "$log")"
        elif ! grep 'GIN/ferrogin: rank 0 of 2' "$log" >/dev/null; then
            say FAIL "$name: the data arrived, but not by way of the plugin"
        else
            say PASS "$name: two ranks on a GPU, over the plugin and the software card"
        fi
        [ $backend = nccl ] || continue
        run "$version" $backend "$log.refused" CUDA_VISIBLE_DEVICES=0
        if grep 'set NCCL_MULTI_RANK_GPU_ENABLE=1' "$log.refused" >/dev/null; then
            say PASS "libnccl $version: two ranks on one GPU without the setting are refused with the cure"
        else
            say FAIL "libnccl $version: two ranks on one GPU without the setting: $(tail -n 1 "$log.refused")"
        fi
    done
done
finish
