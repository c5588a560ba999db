#!/usr/bin/env bash
# Compiles the kernels of the `gpu` bench: build.sh OUT [SM]
#
# With SM (such as 90), nvcc from PyPI (tests/cuda/fetch-tools.sh) compiles and links them to machine code; otherwise
# clang 22 makes PTX. Writes gin, nccl, own and parts to OUT. Exits with 3 and the reason if a compiler or NCCL's
# headers are unavailable.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=$1 sm=${2:-}
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -f "$out"/*.cubin "$out"/*.ptx
if [ -n "$sm" ]; then
    cuda=$("$root/tests/cuda/fetch-tools.sh" "$root/.cache") || exit 3
    export PATH=$cuda/bin:$PATH
    parts=$(mktemp -d "$out/parts.XXXXXX")
    trap 'rm -rf "$parts"' EXIT
    ptxas -c -maxrregcount=64 -arch="sm_$sm" "$root/device-kernels/ptx/ferrogin_device.ptx" -o "$parts/device.cubin"
fi
build() {
    local name=$1 file=$2
    shift 2
    if [ -z "$sm" ]; then
        "$root/scenarios/scenario-kernels/clang.sh" "$here/$file" "$out/$name.ptx" "$@"
        return
    fi
    nvcc -std=c++17 -arch="sm_$sm" -rdc=true -cubin -DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -DNDEBUG \
        -I"$root/ffi-headers/include" -isystem "$root/.cache/nccl-2.32.3/include" "$@" "$here/$file" -o "$parts/$name.cubin"
    nvlink -arch="sm_$sm" "$parts/$name.cubin" "$parts/device.cubin" -o "$out/$name.cubin"
    # nvlink silently ignores input it doesn't recognise.
    if ! cuobjdump -res-usage "$out/$name.cubin" 2>&1 | grep 'Function p[a-z]*:' >/dev/null; then
        echo "error: $out/$name.cubin has no kernel" >&2
        return 1
    fi
}
jobs=()
build gin posts.cu & jobs+=($!)
build nccl posts.cu -DBY_NCCL & jobs+=($!)
build own posts.cu -DBY_NCCL -DNCCL_OWN_BACKEND & jobs+=($!)
build parts parts.cu & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done
