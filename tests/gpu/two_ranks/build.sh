#!/usr/bin/env bash
# Builds the two-rank test: build.sh [--software] [DIST]
#
# Uses nvcc, for NCCL 2.31.2 and 2.32.3, each with NCCL's own device code for EFA and with ferrogin's:
# target/gpu/two_ranks-RELEASE-nccl and two_ranks-RELEASE-ferrogin. The compiler and NCCL's headers and libraries are
# fetched from PyPI once (into .cache/). --software builds programs for the software GPU with clang instead:
# two_ranks-software-nccl, two_ranks-software-ferrogin, and two_ranks-software-proxy, which uses the RMA plugin. DIST
# (default: dist) is the output of `make build`.
# Prints the programs' paths. Exits with status 3, and the reason, if a compiler or package isn't available.
#
#   GPU_SM=N         machine code for this GPU, of another machine [this machine's; without one, 90, and without NCCL's libraries]
#   GPU_RELEASES=... only these NCCL releases
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
software=
[ "${1:-}" != --software ] || { software=1 && shift; }
dist=$(cd "${1:-$root/dist}" 2>/dev/null && pwd) || { echo "two_ranks: ${1:-dist} is missing: run make build" >&2 && exit 2; }
out=$root/target/gpu
mkdir -p "$out"

say_why() {
    echo "two_ranks: $1" >&2
    exit 3
}

if [ -n "$software" ]; then
    "$dist/ferrogin" ptx >"$out/ferrogin_device.ptx"
    for backend in ferrogin nccl proxy; do
        options=() host=()
        case $backend in
        nccl) options=(-DNCCL_OWN_BACKEND) ;;
        proxy)
            options=(-DTHROUGH_PROXY -UNCCL_GIN_PROXY_ENABLE -DNCCL_GIN_PROXY_ENABLE=1 -UNCCL_GIN_EFA_GDA_ENABLE -DNCCL_GIN_EFA_GDA_ENABLE=0)
            ;;
        esac
        kernels=$out/two_ranks-software-$backend.ptx
        status=0
        why=$("$root/scenarios/scenario-kernels/clang.sh" "$here/software.cu" "$kernels" -gline-tables-only "${options[@]}" 2>&1) || status=$?
        [ $status -ne 3 ] || say_why "$why"
        [ $status -eq 0 ] || { echo "$why" >&2 && exit 1; }
        if [ $backend = proxy ]; then
            # NCCL's headers need stand-ins for CUDA's, which software.cu gets from elsewhere.
            for source in "$here/proxy_ranks.cpp" "$root/tests/foreign/proxy.cpp"; do
                object=$out/$(basename "$source" .cpp).o
                "${CXX:-g++}" -std=c++17 -O1 -Wall -Wextra -DNCCL_OS_LINUX=1 -I"$root/tests/foreign/shim" -isystem "$root/.cache/nccl-2.32.3/include" \
                    -c "$source" -o "$object"
                host+=("$object")
            done
            host=(-DTHROUGH_PROXY -x none "${host[@]}" -pthread -ldl)
        fi
        "${CXX:-g++}" -std=c++17 -O1 -Wall -Wextra -x c++ "-DPTX={\"$kernels\", \"$out/ferrogin_device.ptx\"}" "$here/software.cu" \
            -I"$root/emulators/soft-gpu/tests" -I"$dist/include" -L"$dist" -L"$dist/gpu" -lferrogin -lcuda -Wl,-rpath,"$dist" \
            "${host[@]}" -o "${kernels%.ptx}"
        echo "${kernels%.ptx}"
    done
    exit
fi

# The library, apart from the headers, which other tests use too.
fetch_library() {
    local target=$root/.cache/libnccl-$1 work
    [ -f "$target/libnccl.so.2" ] && return
    work=$(mktemp -d "$root/.cache/fetch.XXXXXX")
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$work" "nvidia-nccl-cu13==$1" >"$out/pip.log" 2>&1 &&
        python3 -m zipfile -e "$work"/*.whl "$work/tree" && mkdir -p "$target" && mv "$work"/tree/nvidia/nccl/lib/libnccl.so.2 "$target/"
    local status=$?
    rm -rf "$work"
    return $status
}

cuda=$(bash "$root/tests/cuda/fetch-tools.sh" "$root/.cache") || exit
needs_library=${GPU_SM:-$(ldconfig -p | grep libcuda.so.1 || true)}
sm=${GPU_SM:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d . || true)}
sm=${sm:-90}
"$dist/ferrogin" ptx >"$out/ferrogin_device.ptx"
"$cuda/bin/nvcc" -dc -maxrregcount=64 -gencode "arch=compute_$sm,code=sm_$sm" "$out/ferrogin_device.ptx" -o "$out/device.o"
for release in ${GPU_RELEASES:-2.31.2 2.32.3}; do
    [ -z "$needs_library" ] || fetch_library "$release" || say_why "libnccl.so.2 of NCCL $release cannot be fetched: $(tail -n 1 "$out/pip.log")"
    for backend in ferrogin nccl; do
        options=()
        [ $backend = nccl ] || options=(-I"$root/ffi-headers/include" -include ferrogin/nccl_gin.cuh)
        program=$out/two_ranks-$release-$backend
        # Without NCCL's other backends, which take most of the compile time.
        "$cuda/bin/nvcc" -std=c++17 -arch="sm_$sm" -rdc=true -Werror all-warnings -DNCCL_GIN_EFA_GDA_ENABLE=1 -DNCCL_GIN_PROXY_ENABLE=0 \
            -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -I"$root/.cache/nccl-$release/include" "${options[@]}" "$here/nccl.cu" "$out/device.o" \
            -Xlinker -rpath="$root/.cache/libnccl-$release" -Xlinker --disable-new-dtags -o "$program"
        echo "$program"
    done
done
