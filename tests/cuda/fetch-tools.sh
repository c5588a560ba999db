#!/usr/bin/env bash
# Fetches the CUDA compiler and NCCL's headers from PyPI: fetch-tools.sh [CACHE]
#
# CACHE (default: the repository's .cache) gets cuda-13.0.88/ (nvcc, ptxas, nvlink, cuobjdump, nvdisasm, cudart) and
# nccl-2.31.2/, nccl-2.32.3/ (headers). Leaves alone what is already there, and everything outside CACHE. Prints the
# compiler's directory. Exits with status 3, and the reason, if something isn't available.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${1:-$(cd "$here/../.." && pwd)/.cache}
version=13.0.88
target=$cache/cuda-$version

# The disassemblers were first published for 13.2; they read what 13.0 writes.
packages=(
    "nvidia-cuda-nvcc==$version"
    "nvidia-nvvm==$version"
    "nvidia-cuda-crt==$version"
    "nvidia-cuda-cccl==13.0.85"
    "nvidia-cuda-runtime==13.0.96"
    "nvidia-cuda-nvdisasm==13.2.51"
    "nvidia-cuda-cuobjdump==13.2.51"
)

say_why() {
    echo "fetch-tools: $1" >&2
    exit 3
}

case $(uname -m) in
x86_64 | aarch64) ;;
*) say_why "only for x86_64 and aarch64, and this is $(uname -m)" ;;
esac
command -v python3 >/dev/null || say_why "no python3"
mkdir -p "$cache"

if [ ! -f "$target/complete" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "fetch-tools: fetching CUDA $version from PyPI (110 MB)" >&2
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        -d "$work" "${packages[@]}" 2>"$work/pip.log"; then
        say_why "pip download failed: $(tail -n 1 "$work/pip.log")"
    fi
    for wheel in "$work"/*.whl; do
        python3 -m zipfile -e "$wheel" "$work/tree"
    done
    tree=$work/tree/nvidia/cu13
    chmod +x "$tree"/bin/* "$tree"/nvvm/bin/* 2>/dev/null || true
    # The names that nvcc and the linker expect.
    ln -sfn lib "$tree/lib64"
    for library in "$tree"/lib/lib*.so.*; do
        ln -sf "$(basename "$library")" "${library%.so.*}.so"
    done
    "$tree/bin/ptxas" --version >/dev/null || say_why "ptxas does not run here"
    touch "$tree/complete"
    rm -rf "$target"
    mv "$tree" "$target"
fi

for release in 2.31.2 2.32.3; do
    if ! why=$(bash "$here/../foreign/fetch-headers.sh" "$release" "$cache" 2>&1); then
        say_why "NCCL $release: $why"
    fi
done
echo "$target"
