#!/usr/bin/env bash
# Compiles the scenarios' kernels with nvcc for one GPU: images.sh CUDA SM OUT [RELEASE...]
#
# CUDA is the compiler's directory (tests/cuda/fetch-tools.sh prints it), SM the GPU, such as 90. OUT gets linked images
# for `scenario-runner --image`: gin.cubin, which uses the operations in ferrogin/gin.cuh, and for each RELEASE of
# NCCL's headers in .cache/, nccl-RELEASE.cubin, which uses ncclGin with ferrogin's backend.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cuda=$1 sm=$2 out=$3
shift 3
mkdir -p "$out"
out=$(cd "$out" && pwd)
parts=$(mktemp -d "$out/parts.XXXXXX")
trap 'rm -rf "$parts"' EXIT
export PATH=$cuda/bin:$PATH
# Without NCCL's other backends, which take most of the compile time.
compile=(nvcc -DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -std=c++17 -arch="sm_$sm" -rdc=true -cubin
    -Werror all-warnings -I"$root/ffi-headers/include")

# A kernel that calls the device code through a pointer needs as many registers as the device code, so the limit is the
# objects' own.
ptxas -c -maxrregcount=64 -arch="sm_$sm" "$root/device-kernels/ptx/ferrogin_device.ptx" -o "$parts/device.cubin"
ptxas -c -arch="sm_$sm" "$root/scenarios/scenario-kernels/ptx/scenarios.ptx" -o "$parts/scenarios.cubin"
build() {
    local name=$1
    shift
    "${compile[@]}" "$@" -o "$parts/$name.cubin"
    nvlink -arch="sm_$sm" "$parts/scenarios.cubin" "$parts/$name.cubin" "$parts/device.cubin" -o "$out/$name.cubin"
    # The linker silently ignores files that it doesn't recognize.
    if ! cuobjdump -res-usage "$out/$name.cubin" 2>&1 | grep 'Function scenario:' >/dev/null; then
        echo "error: $out/$name.cubin has no kernel" >&2
        return 1
    fi
}
jobs=()
build gin "$root/scenarios/scenario-kernels/gin.cu" &
jobs+=($!)
for release in "$@"; do
    build "nccl-$release" -isystem "$root/.cache/nccl-$release/include" "$root/scenarios/scenario-kernels/nccl.cu" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
