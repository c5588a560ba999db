#!/usr/bin/env bash
# Compiles kernels with nvcc against ferrogin's CUDA C++ headers and counts their costs: run.sh [DIST]
#
# DIST (default: dist) holds the ferrogin tool and libferrogin_device.so. Fetches the compiler and NCCL's headers from
# PyPI once (into .cache/). Links and disassembles what it compiles, which needs no GPU; with a GPU, also runs the
# program. Prints a line per test and a final line with the counts; exits with status 1 if a test failed.
#
#   CUDA_REFRESH=1          writes the counts to sass.txt, the table of the fast path's costs
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=${1:-$root/dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
releases="2.31.2 2.32.3"
include=$root/ffi-headers/include
out=$root/target/cuda
log=$out/log

# check NAME COMMAND...: passes if the command does; otherwise prints its first errors.
check() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        pass "$name"
    else
        fail "$name: $(grep -iE 'error|fatal|refused|differ' "$log" | head -n 2 | tr '\n' ' ')"
        return 1
    fi
}

rm -rf "$out"
mkdir -p "$out"

# On the CPU, the header needs no CUDA.
on_the_cpu() {
    local flags=(-std=c++17 -O2 -Wall -Wextra -Werror -I"$include")
    "${CXX:-g++}" "${flags[@]}" -x c++ -c "$here/gin_kernel.cu" -o "$out/gin_kernel.host.o" &&
        "${CXX:-g++}" "${flags[@]}" "$here/host.cpp" "$out/gin_kernel.host.o" "$dist/libferrogin_device.so" \
            -Wl,-rpath,"$dist" -o "$out/host" &&
        "$out/host"
}
if ! command -v "${CXX:-g++}" >/dev/null; then
    skip "gin.cuh on the CPU: no ${CXX:-g++}"
    finish
elif [ ! -x "$dist/ferrogin" ] || [ ! -f "$dist/libferrogin_device.so" ]; then
    fail "$dist lacks ferrogin or libferrogin_device.so: run make build, or give the directory"
    finish
fi
check "gin.cuh on the CPU: two translation units, every operation refuses no context" on_the_cpu

cuda=$(bash "$here/fetch-tools.sh" "$root/.cache" 2>"$log")
case $? in
0) ;;
3)
    skip "kernels with nvcc: $(tail -n 1 "$log")"
    finish
    ;;
*)
    fail "fetching the compiler: $(tail -n 1 "$log")"
    finish
    ;;
esac
export PATH=$cuda/bin:$PATH
"$dist/ferrogin" ptx >"$out/ferrogin_device.ptx"

# Assembles the PTX that the tool prints, and the checked-in file if it differs. The fast path uses no stack. A function
# that calls others saves its return address and a few values, which ptxas counts as spilled; the C functions, their
# continuations, the slow path and the warp functions save more.
cd "$out" || exit 1
assemble() {
    ptxas -c -v -arch="$1" "$2" -o "$out/assembled.$1" >"$out/assembled.log" 2>&1 || cat "$out/assembled.log"
    awk '/Function properties/ { name = $NF; n++ }
         /bytes stack frame/ && name ~ /^fgin_fast_/ { fast++; if ($1 > 0) { print "error: " name ": " $0; bad = 1 } }
         /bytes stack frame/ && $5 > (name ~ /operation|slow_path|emulated|context4warp|^fgin_continue|^fgin_fallback|^fgin_warp_/ ? 400 : name ~ /capi|^fgin_/ ? 88 : 24) { print "error: " name ": " $0; bad = 1 }
         /error|fatal/ { bad = 1 }
         END { exit bad || n < 12 || fast < 3 }' "$out/assembled.log"
}
modules=("$out/ferrogin_device.ptx")
if cmp -s "$out/ferrogin_device.ptx" "$root/device-kernels/ptx/ferrogin_device.ptx"; then
    pass "PTX of the tool: the bytes of the checked-in file"
else
    modules+=("$root/device-kernels/ptx/ferrogin_device.ptx")
fi
for n in 75 80 90 100 103 120; do
    for ptx in "${modules[@]}"; do
        name="PTX $([ "$ptx" = "$out/ferrogin_device.ptx" ] && echo of the tool || echo checked in)"
        check "$name: assembled for sm_$n, fast path without stack" assemble "sm_$n" "$ptx"
    done
done

# Lanes of a warp that post together: each operation has one reservation, made by the leader, and all lanes' requests;
# the function that the leader then calls has one fence and one doorbell, followed by a fence.
lanes_share_a_doorbell() {
    PYTHONPATH=$here python3 -c '
import re, sass, sys
shapes = {name: sass.shape(code) for name, code in sass.instructions("nvdisasm", sys.argv[1]).items() if name.startswith("fgin_warp_") or "8ring_run" in name}
posts = [shape for name, shape in shapes.items() if name.startswith("fgin_warp_")]
rings = [shape for name, shape in shapes.items() if "8ring_run" in name]
good = len(posts) == 3 and all(re.fullmatch(r"A W\d+", shape) for shape in posts)
good = good and len(rings) == 1 and re.fullmatch(r"F D F( A)+", rings[0])
sys.exit(0 if good else f"error: {shapes}")' "$out/assembled.sm_90"
}
check "lanes of a warp: one reservation, one fence and one doorbell" lanes_share_a_doorbell
check "relocatable objects" "$here/objects.sh" "$cuda" "$out/ferrogin_device.ptx" "$out/objects"
object=$out/objects/ferrogin_device.sm_90.o

# A kernel in PTX, linked with the module's object as another language would do it.
linked_ptx() {
    ptxas -c -arch=sm_90 "$here/refuse.ptx" -o refuse.cubin && nvlink -arch=sm_90 refuse.cubin "$object" -o refused.cubin
}
check "a kernel in PTX linked with the object" linked_ptx

# The scenarios' kernels: rustc compiles the programs, and clang, as well as nvcc, their calls to gin.cuh.
kernels=$root/scenarios/scenario-kernels
scenario_kernels() {
    local part=$out/scenarios.$1
    ptxas -c -arch="sm_$1" "$kernels/ptx/scenarios.ptx" -o "$part.cubin" &&
        ptxas -c -arch="sm_$1" "$kernels/ptx/gin.ptx" -o "$part.gin.cubin" &&
        nvlink -arch="sm_$1" "$part.cubin" "$part.gin.cubin" "$out/objects/ferrogin_device.sm_$1.o" -o "$part.linked"
}
for n in 75 90; do
    check "kernels of the scenarios: assembled and linked with the object for sm_$n" scenario_kernels "$n"
done

compile=(nvcc -std=c++17 -arch=sm_90 -rdc=true -Werror all-warnings -I"$include")

check "kernels of the scenarios with nvcc, by gin.cuh and nccl_gin.cuh: linked for sm_90" \
    "$root/tests/gpu/images.sh" "$cuda" 90 "$out/images" 2.32.3

check "kernels of the bench on a GPU, with nvcc for sm_90" "$root/benches/gpu/build.sh" "$out/bench" 90

# A program whose kernel the driver links: nvcc makes the PTX, as docs/kernels.md says.
example_as_ptx() {
    nvcc -ptx -rdc=true -std=c++17 -arch=sm_90 -DPTX= -I"$include" "$root/examples/$1.cu" -o "$1.ptx" &&
        ptxas -c -arch=sm_90 "$1.ptx" -o "$1.cubin" && nvlink -arch=sm_90 "$1.cubin" "$object" -o "$1.linked"
}
for name in ring moe; do
    check "examples/$name.cu: to PTX, assembled and linked" example_as_ptx "$name"
done

# Programs: kernels in both styles, and main, each in its own translation unit.
check "kernels of gin.cuh" "${compile[@]}" -dc "$here/gin_kernel.cu" -o gin.o
program() {
    local nccl=(-I"$root/.cache/nccl-$1/include")
    "${compile[@]}" "${nccl[@]}" -dc -include ferrogin/nccl_gin.cuh "$here/nccl_kernel.cu" -o "nccl.$1.o" &&
        "${compile[@]}" "${nccl[@]}" -dc "$here/program.cu" -o "program.$1.o" &&
        "${compile[@]}" "program.$1.o" gin.o "nccl.$1.o" "$object" -o "program.$1"
}
for release in $releases; do
    check "NCCL $release: kernels of both headers compiled and linked for sm_90 in one program" program "$release" ||
        continue
    "./program.$release" >"$log" 2>&1
    case $? in
    0) pass "NCCL $release: the program on this GPU" ;;
    77) skip "NCCL $release: the program on a GPU: there is none here" ;;
    *) fail "NCCL $release: the program on this GPU: $(tail -n 1 "$log")" ;;
    esac
done
# The program for the real libnccl, with NCCL's backend and with ferrogin's; runs if there is a GPU.
GPU_RELEASES=2.32.3 "$root/tests/gpu/two_ranks/run.sh" "$dist" >"$log"
count "$log" $? "the program for NCCL"
for release in $releases; do
    check "NCCL $release: the layouts of its queue structs" "${compile[@]}" -I"$root/.cache/nccl-$release/include" -dc \
        "$here/layout.cu" -o layout.o
done

# Every CUDA block in README.md and the manual.
awk -v out="$out/manual" '/^```cuda/ { file = out (++n) ".cu"; print "// " FILENAME > file; next } /^```/ { file = "" } file { print > file }' \
    "$root/README.md" "$root"/docs/*.md
for block in manual*.cu; do
    page=$(sed -n "1s|^// $root/||p" "$block")
    check "$page, $block" "${compile[@]}" -I"$root/.cache/nccl-2.32.3/include" -dc "$block" -o manual.o
done

# The examples, with host code and kernel in one source.
two_ranks() {
    local rank status=0 ranks=()
    for rank in 0 1; do
        FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda FERROGIN_RANK=$rank FERROGIN_NRANKS=2 timeout 120 "$1" &
        ranks+=($!)
    done
    for rank in "${ranks[@]}"; do wait "$rank" || status=1; done
    return $status
}
for example in "$root"/examples/*.cu; do
    name=$(basename "$example" .cu)
    check "examples/$name.cu" "${compile[@]}" "$example" "$object" -L"$dist" -lferrogin -Xlinker -rpath="$dist" -o "$name" ||
        continue
    if [ -e /dev/nvidia0 ]; then
        check "examples/$name.cu on this GPU, two ranks" two_ranks "./$name"
    else
        skip "examples/$name.cu on a GPU: there is none here"
    fi
done

# Sources that must not compile.
messages=(
    [1]="putValue writes 1, 2, 4 or 8 bytes"
    [2]="the remote action must be None or a signal"
    [3]="the local action must be None or CounterInc"
    [4]="putValue writes 1, 2, 4 or 8 bytes"
    [5]="include <ferrogin/nccl_gin.cuh> before <nccl_device.h>"
)
for i in "${!messages[@]}"; do
    name="refused when compiled: ${messages[i]}"
    if "${compile[@]}" -I"$root/.cache/nccl-2.32.3/include" -DREFUSED="$i" -dc "$here/refused.cu" -o refused.o \
        >"$log" 2>&1; then
        fail "$name: it compiles"
    elif grep -qF "${messages[i]}" "$log"; then
        pass "$name"
    else
        fail "$name: $(grep -i error "$log" | head -n 1)"
    fi
done

# The costs of a post and a flush, next to NCCL's own backend: kernel, instructions, registers, stack, spilled, loads
# before the reservation and after the mark, shape, and instructions and stack with everything that a call can reach
# (see sass.py).
cubin() {
    nvcc -std=c++17 -arch=sm_90 -rdc=true -cubin -Xptxas -v "${@:2}" -o "$1.cubin" >"$1.log" 2>&1 &&
        nvlink -arch=sm_90 "$1.cubin" "$object" -o "$1.linked" >>"$1.link" 2>&1
}
only_efa=(-DNCCL_GIN_PROXY_ENABLE=0 -DNCCL_GIN_GDAKI_ENABLE=0 -DNCCL_GIN_GPI_ENABLE=0 -DONLY_POSTS)
costs() {
    local nccl=("${only_efa[@]}" -I"$root/.cache/nccl-2.32.3/include" "$here/nccl_kernel.cu")
    cubin gin -I"$include" "$here/gin_kernel.cu" && cubin nccl -I"$include" -include ferrogin/nccl_gin.cuh "${nccl[@]}" &&
        cubin own "${nccl[@]}" || return 1
    {
        for mode in gin cta thread; do
            printf "${mode}_%s " put_value put_value_plain put put_plain signal
        done | xargs python3 "$here/sass.py" nvdisasm gin.cubin gin.log gin.linked
        python3 "$here/sass.py" nvdisasm gin.cubin gin.log gin.linked gin_flush
        python3 "$here/sass.py" nvdisasm nccl.cubin nccl.log nccl.linked nccl_put_value nccl_put nccl_flush
        python3 "$here/sass.py" nvdisasm own.cubin own.log own.linked nccl_put_value nccl_put nccl_flush | sed 's/^nccl/own_nccl/'
    } >sass.txt
}
# The limits are what we promise; the table has the last counts.
within_limits() {
    awk -F '\t' '$1 ~ /^(gin|cta)_(put|signal)/ {
                     posts++
                     within += $2 <= ($1 ~ /signal/ ? 220 : $1 ~ /value/ ? 240 : 265) && $3 <= 48 && $4 == 0 && $5 == 0 && $6 <= 3 && $7 == 0
                     within -= $8 !~ /^A W[0-9]+ F A D F A$/
                 }
                 { mode = $1; sub(/_.*/, "", mode); name = substr($1, length(mode) + 2) }
                 mode == "gin" { of_gpu[name] = $2 }
                 mode == "cta" { within -= $2 > of_gpu[name] }
                 $1 == "nccl_put_value" { posts++; within += $2 <= 350 && $3 <= 48 && $4 == 0 && $5 == 0 }
                 $1 ~ /^(gin|nccl)_flush/ { flushes++; within_flush += $4 == 0 && $5 == 0 && $9 <= 300 && $10 == 0 }
                 END { exit posts != 11 || within != 11 || flushes != 2 || within_flush != 2 }' sass.txt
}
if check "kernels disassembled" costs; then
    sed 's/^/    /' sass.txt
    if within_limits; then
        pass "posts: instructions, 48 registers, no stack, 3 dependent loads before the reservation, none after the mark, 2 fences; flushes: 300 instructions with callees, no stack"
    else
        fail "posts or flushes are over their limits: $(grep -E '^(gin|nccl)_' sass.txt | tr '\n' ' ')"
    fi
    if [ -n "${CUDA_REFRESH:-}" ]; then
        cp sass.txt "$here/sass.txt"
    elif cmp -s sass.txt "$here/sass.txt"; then
        pass "posting costs what tests/cuda/sass.txt says"
    else
        fail "posting costs other than tests/cuda/sass.txt says; CUDA_REFRESH=1 writes it: $(diff sass.txt "$here/sass.txt" |
            head -n 3 | tr '\n' ' ')"
    fi
fi

# NCCL's device code, unchanged, over ferrogin on the CPU: the clients in tests/foreign with ferrogin's backend, which
# post through the functions that kernels inline. 2.31's generic code differs little, so it runs only some of the
# scenarios. Values go through the pool with 2.31, and inline with 2.32.
declare -A scenarios=(
    [2.31.2]="put_value_signal signal_add counters aggregate"
    [2.32.3]="put put_signal put_value put_value_signal get windows signal_add counters reset barrier contexts asymmetric \
        aggregate flush wrap small_queue threads warp bad_arguments peer_dies"
)
for release in $releases; do
    built=$out/foreign-$release
    link=-Wl,--no-as-needed,$dist/libferrogin_device.so,-rpath,$dist
    if ! make --no-print-directory -s -j2 -C "$root" -f tests/foreign/Makefile RELEASE="$release" OUT="$built" \
        HEADERS="$root/.cache/nccl-$release/include" CXXFLAGS="-O2 -DFOREIGN_FERROGIN -DFGIN_FAST_PATH_CALLS -I$include $link" \
        "$built/foreign" >"$log" 2>&1; then
        fail "NCCL $release over ferrogin on the CPU: $(grep -E 'error|undefined' "$log" | head -n 1)"
        continue
    fi
    for scenario in ${scenarios[$release]}; do
        FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cpu "$built/foreign" "$dist/libnccl-gin-ferrogin.so" --ranks 2 \
            --scenario "$scenario" >"$out/scenario" 2>&1
        status=$?
        grep -E '^(PASS|FAIL|SKIP) ' "$out/scenario" || echo "FAIL NCCL $release, $scenario: status $status"
    done >"$log"
    count "$log" 0 "NCCL $release over ferrogin" "over ferrogin: "
done
finish
