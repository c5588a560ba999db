#!/usr/bin/env bash
# Compiles CUDA C++ with NCCL's headers to PTX, without CUDA's headers: clang.sh FILE OUT [OPTION...]
#
# The headers are those of NCCL 2.32.3, which tests/foreign/fetch-headers.sh fetches from PyPI once (into .cache/). Exits with 3 and the
# reason if they are unavailable, or if there is no clang 22.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
file=$1 out=$2
shift 2
release=2.32.3
clang=$("$root/scripts/clang-22.sh" clang)
"$root/tests/foreign/fetch-headers.sh" $release "$root/.cache"
# gnu++17, because NCCL's headers use typeof; without NCCL's other backends.
exec "$clang" -x cuda -std=gnu++17 --cuda-device-only --cuda-gpu-arch=sm_70 --cuda-feature=+ptx82 -nocudainc -nocudalib -O2 -S -DNDEBUG \
    -DNCCL_OS_LINUX=1 -DNCCL_GIN_EFA_GDA_ENABLE=1 -DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 \
    -I"$root/ffi-headers/include" -include ferrogin/clang_cuda.h -I"$root/ffi-headers/include/ferrogin/clang" -isystem "$root/.cache/nccl-$release/include" "$@" "$file" -o "$out"
