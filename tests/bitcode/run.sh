#!/usr/bin/env bash
# Reads the device code's bitcode, ferrogin's and NCCL's, with LLVM 20 and 22: run.sh [DIST]
#
# Both LLVMs come with llvmlite from PyPI, each in its own environment (.cache/python/llvm20, llvm22). Links DIST/cuda/ferrogin_device.bc
# with kernels, runs them between two ranks on the software GPU, and shows what the optimizer does to the bitcode of NCCL 2.32.3. Then runs
# kernels that call NCCL's functions, compiled once: with NCCL's own bitcode, without its alias metadata, and with the one that
# ferrogin.nccl_bitcode makes from NCCL's package. Prints a line per test and a final line with the counts; exits with status 1 if a test
# failed. What isn't available counts as skipped.
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
older=2.31.2 release=2.32.3
faults=seed=3,reorder=64,reread=0.2,delay_us=0..200
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
export FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda

# check NAME COMMAND...: one test, which is a command that succeeds.
check() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        pass "$name"
    else
        fail "$name"
    fi
}

# ranks NUMBER PROGRAM ARGUMENT...: starts a Python program as a job on the software GPU.
ranks() {
    local number=$1
    shift
    SOFTEFA_FAULTS=$faults timeout --kill-after=5 600 "$dist/ferrogin" gpu -- "$dist/ferrogin" run -n "$number" -- "$environment/bin/python" "$@"
}

# compile RELEASE: compiles the kernels with NCCL's headers.
compile() {
    "$clang" -x cuda -std=gnu++17 --cuda-device-only --cuda-gpu-arch=sm_90 --cuda-feature=+ptx87 -nocudainc -nocudalib -O1 -fno-strict-aliasing \
        -emit-llvm -c -DNDEBUG -DNCCL_OS_LINUX=1 -I"$dist/include" -include ferrogin/clang_cuda.h -I"$dist/include/ferrogin/clang" \
        -isystem "$root/.cache/nccl-$1/include" "$here/kernels.cu" -o "$work/kernels-$1.bc"
}

# link RELEASE BITCODE PTX [OPTION...]
link() {
    "$environment/bin/python" "$here/link.py" "$work/kernels-$1.bc" "${@:2}"
}

# requests PTX BACKEND: the requests in another backend's queue.
requests() {
    timeout --kill-after=5 600 "$dist/ferrogin" gpu -- "$environment/bin/python" "$here/other_backend.py" "$@"
}

same_requests() {
    requests "$work/theirs.ptx" 2 >"$work/theirs.txt" && requests "$work/ours-$release.ptx" 2 >"$work/ours.txt" && [ -s "$work/ours.txt" ] &&
        diff "$work/theirs.txt" "$work/ours.txt"
}

# refuses TEXT COMMAND...: the command fails, and says the text.
refuses() {
    local status=0
    "${@:2}" >"$work/refusal" 2>&1 || status=$?
    cat "$work/refusal"
    [ $status -ne 0 ] && grep -qF "$1" "$work/refusal"
}

# with_nccl: the kernels with both files, NCCL's and the one made of it.
with_nccl() {
    local version functions name
    if ! clang=$("$environment/bin/python" -c 'import ferrogin.nccl_bitcode as made; print(made.find_clang())' 2>"$log"); then
        skip "kernels with NCCL's bitcode: $(tail -n 1 "$log")"
        return
    fi
    for version in "$older" "$release"; do
        [ "$version" = "$older" ] && functions=24 || functions=44
        check "kernels compiled with the headers of NCCL $version" compile "$version"
        check "a drop-in for NCCL $version" "$llvm20/bin/python" -m ferrogin.nccl_bitcode \
            --nccl "$root/.cache/nccl-$version" "$work/home-$version"
        "$llvm20/bin/python" "$here/drop_in.py" "$root/.cache/nccl-$version/lib/libnccl_device.bc" "$work/home-$version/lib/libnccl_device.bc" \
            $functions >"$log" 2>&1
        count "$log" $? "the drop-in for NCCL $version"
        check "kernels linked with the drop-in, NCCL $version" link "$version" "$work/home-$version/lib/libnccl_device.bc" "$work/ours-$version.ptx"
    done
    check "kernels linked with NCCL's bitcode, without !tbaa" link $release "$root/.cache/nccl-$release/lib/libnccl_device.bc" "$work/theirs.ptx" --strip-tbaa
    check "kernels linked with NCCL's untouched bitcode, -O1" link $release "$root/.cache/nccl-$release/lib/libnccl_device.bc" "$work/untouched.ptx" -O1
    check "NCCL's untouched bitcode, -O1, 2 ranks" ranks 2 "$here/gin_ranks.py" "$work/untouched.ptx"
    for number in 2 4; do
        check "NCCL's bitcode, $number ranks" ranks $number "$here/gin_ranks.py" "$work/theirs.ptx"
        check "the drop-in, $number ranks, card signals" ranks $number "$here/gin_ranks.py" "$work/ours-$release.ptx"
        FERROGIN_SIGNALS=emulated SOFTGPU_MEMORY=weak \
            check "the drop-in, $number ranks, emulated signals, weak memory" ranks $number "$here/gin_ranks.py" "$work/ours-$release.ptx" 1 1 va
    done
    check "NCCL's bitcode asserts that no signal is in memory" refuses 'EFA GDA: only INDEXED signals are supported' \
        ranks 2 "$here/gin_ranks.py" "$work/theirs.ptx" 1 1 va
    check "NCCL's bitcode, 2 nodes with 2 ranks" ranks 4 "$here/gin_ranks.py" "$work/theirs.ptx" 2 2
    FERROGIN_SIGNALS=emulated SOFTGPU_MEMORY=weak \
        check "the drop-in, 2 nodes with 2 ranks, emulated signals, weak memory" ranks 4 "$here/gin_ranks.py" "$work/ours-$release.ptx" 2 2
    check "the drop-in for NCCL $older, 2 ranks" ranks 2 "$here/gin_ranks.py" "$work/ours-$older.ptx"
    check "the proxy's requests are those of NCCL's bitcode" same_requests
    for name in 3 4; do
        check "backend $name ends the kernel with a line that names the drop-in" \
            refuses 'libnccl_device.bc by ferrogin has no GDAKI and no GPI backend' requests "$work/ours-$release.ptx" $name
    done
    mkdir "$work/refusals"
    "$llvm20/bin/python" "$here/refusals.py" "$work/refusals" "$root/.cache/nccl-$older" "$root/.cache/nccl-$release" >"$log" 2>&1
    count "$log" $? "refusals"
}

fetched=0
for version in $older $release; do
    bash "$root/tests/foreign/fetch-headers.sh" "$version" "$root/.cache" 2>"$log" && continue
    fetched=1
    skip "NCCL $version's bitcode: $(tail -n 1 "$log")"
done
wheel=$("$root/python/wheel.sh" "$dist" "$work" 2>"$log") || skip "kernels between two ranks: $(tail -n 1 "$log")"
for llvm in llvm20 llvm22; do
    if ! environment=$("$root/python/venv.sh" "$llvm" "$here/requirements-$llvm.txt" 2>"$log"); then
        skip "$llvm: $(tail -n 1 "$log")"
        continue
    fi
    "$environment/bin/python" "$here/ours.py" "$dist/cuda/ferrogin_device.bc" >"$log" 2>&1
    count "$log" $? "ferrogin's bitcode, $llvm"
    if [ -n "$wheel" ]; then
        check "$llvm, ferrogin's package is installed" "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-index \
            --no-deps --force-reinstall "$wheel"
        check "$llvm, a kernel sends an array to another rank's" ranks 2 "$here/two_ranks.py"
    fi
    [ $fetched -eq 0 ] || continue
    "$environment/bin/python" "$here/nccl.py" "$root/.cache/nccl-$release/lib/libnccl_device.bc" >"$log" 2>&1
    count "$log" $? "NCCL's bitcode, $llvm"
    [ "$llvm" = llvm20 ] && llvm20=$environment
done
# The drop-in is made with LLVM 20, which all later ones read; the kernels are linked with LLVM 22, because clang 22 compiles them.
[ $fetched -ne 0 ] || [ -z "$wheel" ] || [ -z "${llvm20:-}" ] || [ "$llvm" != llvm22 ] || with_nccl
finish
