#!/usr/bin/env bash
# Compiles a program with kernels of nccl_ep: compile.sh FILE OUT HEADERS [OPTION...]
#
# HEADERS is nccl_ep's include directory, as patch.py leaves it. Writes OUT.ptx with the kernels and OUT with the rest,
# which links the libraries in DIST (default: dist). With -DTHROUGH_PROXY, kernels use NCCL's proxy and the RMA plugin.
# Exits with 3 and the reason if there is no clang 22, or NCCL's headers are unavailable.
#
#   KERNELS_ONLY=1   only OUT.ptx
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "${DIST:-$root/dist}" && pwd)
file=$1 out=$2 headers=$3
shift 3
nccl=$root/.cache/nccl-2.32.3/include
clang=$("$root/scripts/clang-22.sh" clang++)
"$root/tests/foreign/fetch-headers.sh" 2.32.3 "$root/.cache"
# gnu++17, because NCCL's headers use typeof; of NCCL's backends only the one that ferrogin replaces, or its proxy.
backends=(-DNCCL_GIN_EFA_GDA_ENABLE=1 -DNCCL_GIN_PROXY_ENABLE=0) proxy=()
if [[ " $* " == *" -DTHROUGH_PROXY "* ]]; then
    backends=(-DNCCL_GIN_EFA_GDA_ENABLE=0 -DNCCL_GIN_PROXY_ENABLE=1)
    proxy=("$out.proxy.o" "$out.proxy_ranks.o" -ldl -pthread)
fi
compile=("$clang" -x cuda -std=gnu++17 -nocudainc -nocudalib -O2 -DNDEBUG -Wno-pass-failed -DNCCL_OS_LINUX=1 "${backends[@]}"
    -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -I"$dist/include" -include ferrogin/clang_cuda.h
    -I"$dist/include/ferrogin/clang" -I"$dist/gpu" -I"$root/tests/gpu/two_ranks" -isystem "$nccl" -isystem "$headers" -isystem "$headers/nccl_ep" "$@")
"${compile[@]}" "$file" --cuda-device-only --cuda-gpu-arch=sm_90 --cuda-feature=+ptx86 -S -o "$out.ptx" &
kernels=$!
trap 'wait "$kernels"' EXIT # which also ends the script if the host part fails
if [ -z "${KERNELS_ONLY:-}" ]; then
    if [ ${#proxy[@]} -gt 0 ]; then
        for source in "$root/tests/foreign/proxy.cpp" "$root/tests/gpu/two_ranks/proxy_ranks.cpp"; do
            "$clang" -std=c++17 -O1 -DNCCL_OS_LINUX=1 -I"$root/tests/foreign/shim" -isystem "$nccl" -c "$source" -o "$out.$(basename "$source" .cpp).o"
        done
    fi
    "${compile[@]}" "$file" --cuda-host-only --no-offload-new-driver -c -o "$out.o"
    "$clang" "$out.o" "${proxy[@]}" -o "$out" -L"$dist" -L"$dist/gpu" -lferrogin -lcuda -Wl,-rpath,"$dist"
fi
wait "$kernels"
