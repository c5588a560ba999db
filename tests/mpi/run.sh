#!/usr/bin/env bash
# Runs tests/mpi/smoke.c on the software card under other projects' MPIs: run.sh [DIST]
#
# The MPIs are MPICH (PyPI: mpich), Open MPI with its mtl ofi (Debian: openmpi-bin, libopenmpi-dev) and Intel MPI (PyPI:
# impi-rt), which runs the program built with MPICH's compiler, as both have the same ABI. mpi4py (PyPI) runs smoke.py
# under MPICH, and Intel MPI its own benchmarks (IMB), which check no data. PyPI packages are installed once into
# .cache/mpi/. Each MPI runs two ranks, without faults and with those below; ranks may reach each other only through the
# card. Open MPI also runs on two hosts, which are network namespaces. MPICH also runs the first lines of
# docs/card-in-ci.md. All MPIs also run over libfabric's own provider efa, on the card below verbs. Prints a line per
# test and a final line with the counts; exits with status 1 if a test failed. A run that doesn't finish in time fails.
# An MPI that isn't available counts as skipped.
#
#   FERROGIN_SOAK=1   50 runs each instead of one
#   MPI_RUNS=N        N runs each
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
soak=${FERROGIN_SOAK:-0}
runs=${MPI_RUNS:-$([ "$soak" = 1 ] && echo 50 || echo 1)}
faults=seed=3,reorder=32,reread=0.2
limit=300 # seconds per run; on an idle machine, a run takes less than one
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
unset SOFTEFA_FAULTS SOFTEFA_NICS SOFTEFA_WIRE SOFTEFA_IFADDR
export FI_PROVIDER_PATH=$dist FI_PROVIDER=softefa
# Makes MPICH and Intel MPI send every message through libfabric. Open MPI's options below do the same.
export MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1 I_MPI_FABRICS=ofi I_MPI_OFI_PROVIDER=softefa
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
openmpi_options=(--oversubscribe --mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include softefa --mca osc pt2pt --mca btl self)

# compile NAME COMPILER: makes $work/NAME.
compile() {
    "$2" -std=gnu11 -O1 -Wall -Wextra -Werror -o "$work/$1" "$here/smoke.c" >"$log" 2>&1 && return
    fail "$1: the program does not compile"
    return 1
}

# What a complete run prints.
expected='all data right'

# repeat NAME COMMAND...: the command must print that in every run.
repeat() {
    local name=$1 run status
    shift
    for run in $(seq "$runs"); do
        timeout --kill-after=5 "$limit" "$@" >"$log" 2>&1
        status=$?
        if [ "$status" -ne 0 ] || ! grep -q "$expected" "$log"; then
            [ "$status" -ne 124 ] || status="no end after $limit s"
            fail "$name, run $run of $runs: status $status"
            return
        fi
    done
    pass "$name, $runs runs"
}

# both NAME COMMAND...: without faults and with them.
both() {
    local name=$1
    shift
    repeat "$name" "$@"
    repeat "$name, $faults" env SOFTEFA_FAULTS=$faults "$@"
    # The card refuses this setting, so a command that opens it fails at once. Its message isn't looked for: mpiexec may
    # drop what a rank printed before the job is aborted.
    local code=0
    SOFTEFA_NICS=none timeout --kill-after=5 "$limit" "$@" >"$log" 2>&1 || code=$?
    case $code in
        0 | 124 | 137) fail "$name: the messages do not go through the card" ;;
    esac
}

# below_verbs NAME COMMAND...: the same over libfabric's own provider efa, from the MPI's own libfabric if it has one.
# The provider's shared memory is off, as it would bypass the card between ranks on one host.
below_verbs() {
    both "$1, efa below verbs" env -u FI_PROVIDER_PATH FI_PROVIDER=efa FI_EFA_ENABLE_SHM_TRANSFER=0 "$dist/ferrogin" verbs -- "${@:2}"
}

# reads_pci NAME: succeeds if `ferrogin verbs` shows the cards' PCI devices, which this MPI reads.
reads_pci() {
    "$dist/ferrogin" verbs -- sh -c 'test -e /sys/bus/pci/devices/$(basename $(readlink -f /sys/class/infiniband/rdmap0s0/device))' 2>/dev/null && return
    skip "$1, efa below verbs: \`ferrogin verbs\` shows no PCI device of the card in /sys/bus/pci, and this MPI reads it"
    return 1
}

# The page's lines run as written, in a directory like another project's.
documented() {
    mkdir "$work/ci" && cp -R "$dist" "$work/ci/dist" && cp "$1" "$work/ci/your-program"
    awk '/^```sh$/ { inside = 1; next } inside && /^```$/ { exit } inside' "$root/docs/card-in-ci.md" >"$work/lines"
    [ "$(wc -l <"$work/lines")" -eq 3 ] || { cp "$work/lines" "$log"; fail "docs/card-in-ci.md: three lines"; return; }
    (cd "$work/ci" && unset FI_PROVIDER FI_PROVIDER_PATH && PATH=$2/bin:$PATH timeout "$limit" bash -e "$work/lines") >"$log" 2>&1
    if grep -q 'all data right' "$log"; then pass "docs/card-in-ci.md"; else fail "docs/card-in-ci.md"; fi
}

if [ ! -f "$dist/libsoftefa-fi.so" ]; then
    echo "FAIL MPIs: $dist has no libsoftefa-fi.so; run make build first"
    echo "mpi: 0 passed, 1 failed, 0 skipped"
    exit 1
fi

if ! command -v mpirun >/dev/null || ! mpirun --version 2>&1 | grep -q 'Open MPI'; then
    skip "Open MPI: no mpirun of it on PATH (Debian: openmpi-bin)"
elif ! include=$(mpicc --showme:incdirs 2>/dev/null) || [ ! -f "${include%% *}/mpi.h" ]; then
    skip "Open MPI: its compiler has no headers (Debian: libopenmpi-dev)"
elif compile openmpi mpicc; then
    both "$(mpirun --version 2>&1 | head -n 1)" mpirun "${openmpi_options[@]}" -np 2 "$work/openmpi"
    if unshare --user --map-root-user --net bash "$here/two_hosts.sh" "$work" true >"$log" 2>&1; then
        repeat "$(mpirun --version 2>&1 | head -n 1), two hosts" \
            unshare --user --map-root-user --net bash "$here/two_hosts.sh" "$work" mpirun "${openmpi_options[@]}" -np 2 "$work/openmpi"
    else
        skip "Open MPI, two hosts: this machine allows no network namespaces with a pair of interfaces, or has no \`ip\`"
    fi
    below_verbs "$(mpirun --version 2>&1 | head -n 1)" mpirun "${openmpi_options[@]/softefa/efa}" -np 2 "$work/openmpi"
fi

if environment mpi mpich mpich && compile mpich "$place/bin/mpicc"; then
    mpich=$place
    version="MPICH $("$mpich/bin/mpichversion" | awk '/Version/ { print $3 }')"
    both "$version" "$mpich/bin/mpiexec" -n 2 "$work/mpich"
    if ! command -v lstopo-no-graphics >/dev/null; then
        skip "$version, efa below verbs: no lstopo-no-graphics (Debian: hwloc-nox)"
    elif reads_pci "$version"; then
        # The hwloc in MPICH's wheel sees no PCI devices, not even real ones, and MPICH then aborts.
        below_verbs "$version" sh -c 'lstopo-no-graphics --force --of xml "$0" && HWLOC_XMLFILE=$0 HWLOC_THISSYSTEM=1 exec "$@"' "$work/topology.xml" \
            "$mpich/bin/mpiexec" -n 2 "$work/mpich"
    fi
    documented "$work/mpich" "$mpich"
    if environment mpi mpi4py mpi4py; then
        both mpi4py env "LD_LIBRARY_PATH=$mpich/lib" "$mpich/bin/mpiexec" -n 2 "$place/bin/python" "$here/smoke.py"
    fi
    if environment mpi impi-rt impi-rt; then
        intel=(env "PATH=$place/bin:$PATH" "I_MPI_ROOT=$place")
        both "Intel MPI" "${intel[@]}" "LD_LIBRARY_PATH=$place/lib" "$place/bin/mpiexec" -n 2 "$work/mpich"
        reads_pci "Intel MPI" && LD_LIBRARY_PATH=$place/lib below_verbs "Intel MPI" "${intel[@]}" I_MPI_OFI_PROVIDER=efa "$place/bin/mpiexec" -n 2 "$work/mpich"
        expected='All processes entering MPI_Finalize'
        both "Intel MPI's IMB-MPI1" "${intel[@]}" "LD_LIBRARY_PATH=$place/lib" "$place/bin/mpiexec" -n 2 \
            "$place/bin/IMB-MPI1" -iter 20 -npmin 2 -msglog 18 PingPong Exchange Allreduce Alltoall Bcast
        both "Intel MPI's IMB-RMA" "${intel[@]}" "LD_LIBRARY_PATH=$place/lib" "$place/bin/mpiexec" -n 2 \
            "$place/bin/IMB-RMA" -iter 20 -npmin 2 -msglog 16 Unidir_put Bidir_get Accumulate
    fi
fi
finish
