#!/usr/bin/env bash
# Assembles the device code: objects.sh CUDA PTX OUT
#
# CUDA is the compiler's directory (fetch-tools.sh prints it), PTX the module that `ferrogin ptx` prints. OUT gets a
# copy of it, ferrogin_device.sm_N.o for each architecture, and ferrogin_device.o for all of them: relocatable objects
# that nvcc links with kernels compiled with -rdc=true.
set -euo pipefail

if [ $# -ne 3 ]; then
    echo "usage: objects.sh CUDA PTX OUT" >&2
    exit 2
fi
cuda=$1 ptx=$2 out=$3
# A kernel of 1024 threads has 64 registers per thread, and so do the functions that it may call.
limit=-maxrregcount=64
# 75 is the oldest that ptxas 13 supports; the PTX itself needs 70.
architectures=(75 80 90 100 103 120)

mkdir -p "$out"
[ "$ptx" -ef "$out/ferrogin_device.ptx" ] || cp "$ptx" "$out/ferrogin_device.ptx"
cd "$out"
export PATH=$cuda/bin:$PATH
all=()
for n in "${architectures[@]}"; do
    nvcc -dc $limit -gencode "arch=compute_$n,code=sm_$n" ferrogin_device.ptx -o "ferrogin_device.sm_$n.o"
    all+=(-gencode "arch=compute_$n,code=sm_$n")
done
nvcc -dc $limit "${all[@]}" ferrogin_device.ptx -o ferrogin_device.o
