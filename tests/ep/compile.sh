#!/usr/bin/env bash
# Compiles a program with kernels of nccl_ep: compile.sh FILE OUT HEADERS [OPTION...]
#
# HEADERS is nccl_ep's include directory, as patch.py leaves it. Writes OUT.ptx with the kernels and OUT with the rest,
# which links the libraries in DIST (default: dist). Exits with 3 and the reason if there is no clang 22, or NCCL's
# headers are unavailable.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "${DIST:-$root/dist}" && pwd)
file=$1 out=$2 headers=$3
shift 3
nccl=$root/.cache/nccl-2.32.3/include
clang=$("$root/scripts/clang-22.sh" clang++)
"$root/tests/foreign/fetch-headers.sh" 2.32.3 "$root/.cache"
# gnu++17, because NCCL's headers use typeof; of NCCL's backends only the one that ferrogin replaces.
compile=("$clang" -x cuda -std=gnu++17 -nocudainc -nocudalib -O2 -DNDEBUG -Wno-pass-failed -DNCCL_OS_LINUX=1 -DNCCL_GIN_EFA_GDA_ENABLE=1
    -DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -I"$dist/include" -include ferrogin/clang_cuda.h
    -I"$dist/include/ferrogin/clang" -I"$dist/gpu" -isystem "$nccl" -isystem "$headers" -isystem "$headers/nccl_ep" "$@" "$file")
"${compile[@]}" --cuda-device-only --cuda-gpu-arch=sm_90 --cuda-feature=+ptx86 -S -o "$out.ptx"
"${compile[@]}" --cuda-host-only --no-offload-new-driver -o "$out" -L"$dist" -L"$dist/gpu" -lferrogin -lcuda -Wl,-rpath,"$dist"
