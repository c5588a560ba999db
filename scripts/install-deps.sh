#!/usr/bin/env bash
# Installs missing packages with apt-get, and prints its commands. Usage: install-deps.sh demo|test|check
set -euo pipefail

purpose=${1:?usage: install-deps.sh demo|test|check}
required=()
wanted=()
# Needed only by the aarch64 check, and not available under these names everywhere.
cross=()
# Debian's Rust with std's source, which reproduces the checked-in PTX byte for byte and builds std for aarch64.
rust=()
# clang, which compiles ferrogin/gin.cuh for the scenarios; not every system has this release.
clang=()
# The assembler that makes the checked-in bitcode.
assembler=()

has_library() { ldconfig -p 2>/dev/null | grep -q "$1 "; }
PATH=$PATH:/sbin:/usr/sbin

command -v cc >/dev/null || required+=(gcc libc6-dev)
if [ -z "${FERROGIN_LIBFABRIC:-}" ]; then
  has_library libfabric.so.1 || required+=(libfabric1)
fi

if [ "$purpose" != demo ]; then
  command -v c++ >/dev/null || required+=(g++)
  command -v python3 >/dev/null || wanted+=(python3)
  python3 -m pip --version >/dev/null 2>&1 || wanted+=(python3-pip)
  python3 -c 'import ensurepip, venv' 2>/dev/null || wanted+=(python3-venv)
  command -v readelf >/dev/null || wanted+=(binutils)
  command -v mpirun >/dev/null || wanted+=(openmpi-bin)
  command -v ip >/dev/null || wanted+=(iproute2)
  command -v fi_info >/dev/null || wanted+=(libfabric-bin)
  command -v ibv_devinfo >/dev/null || wanted+=(ibverbs-utils)
  [ -f /usr/include/infiniband/efadv.h ] || wanted+=(libibverbs-dev)
  [ -f /usr/include/rdma/fabric.h ] || wanted+=(libfabric-dev)
  command -v pkg-config >/dev/null || wanted+=(pkg-config)
  command -v cmake >/dev/null || wanted+=(cmake)
fi

if [ "$purpose" = check ]; then
  command -v rpmbuild >/dev/null || wanted+=(rpm)
  # openmpi-bin has mpicc, but not the headers.
  [ -f "$(mpicc --showme:incdirs 2>/dev/null | cut -d ' ' -f 1)/mpi.h" ] || wanted+=(libopenmpi-dev)
  command -v ib_send_lat >/dev/null || wanted+=(perftest)
  command -v lstopo-no-graphics >/dev/null || wanted+=(hwloc-nox)
  /usr/bin/python3 -c 'import pyverbs' 2>/dev/null || wanted+=(python3-pyverbs)
  command -v valgrind >/dev/null || wanted+=(valgrind)
  # Any of the three compiles the header; clang-22 reproduces the checked-in kernels byte for byte.
  command -v clang-22 >/dev/null || command -v clang-19 >/dev/null || command -v clang >/dev/null || clang=(clang-22)
  if [ "$(uname -m)" = x86_64 ]; then
    command -v aarch64-linux-gnu-gcc >/dev/null || cross+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    command -v qemu-aarch64 >/dev/null || cross+=(qemu-user)
  fi
  # True if this compiler has std's source.
  has_source() { [ -f "$("$1" --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library/core/src/lib.rs" ]; }
  made_by=$(sed -n 's|^// compiler: ||p;20q' "$(dirname "$0")/../device-kernels/ptx/ferrogin_device.ptx")
  command -v llvm-as-19 >/dev/null || assembler=(llvm-19)
  if ! { [ "$(rustc --version 2>/dev/null)" = "$made_by" ] && has_source rustc; } &&
     ! { [ -x /usr/bin/cargo ] && has_source /usr/bin/rustc; }; then
    rust=(rustc-web cargo-web rust-web-src)
  fi
fi

if ! command -v cargo >/dev/null; then
  echo 'install-deps: cargo is missing. Install Rust 1.88 or newer (for example with rustup) and try again.' >&2
  exit 1
fi

missing=("${required[@]}" "${wanted[@]}")
optional=("${cross[@]}" "${rust[@]}" "${clang[@]}" "${assembler[@]}")
[ $((${#missing[@]} + ${#optional[@]})) -eq 0 ] && exit 0

no_rust='without a Rust that has the source of std, the test of the PTX compares the hash of the sources and skips the bytes'
# The script fails without a required package. Tests that need an optional one are skipped with a message.
give_up() {
  echo "install-deps: $1. Please install: ${missing[*]} ${optional[*]}" >&2
  [ ${#rust[@]} -eq 0 ] || echo "install-deps: $no_rust" >&2
  [ ${#required[@]} -eq 0 ] || exit 1
  exit 0
}

command -v apt-get >/dev/null || give_up 'there is no apt-get here'
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || give_up 'not root, and there is no sudo'
  as_root=(sudo)
fi

export DEBIAN_FRONTEND=noninteractive
install_all() {
  local install=("${as_root[@]}" apt-get install -y --no-install-recommends --no-remove "$@")
  echo "install-deps: missing for $purpose: $*"
  echo "install-deps: running: ${install[*]}"
  "${install[@]}" >/dev/null 2>&1 && return
  echo 'install-deps: apt-get failed; updating the package lists for another attempt'
  "${as_root[@]}" apt-get update >/dev/null && "${install[@]}"
}
[ ${#missing[@]} -eq 0 ] || install_all "${missing[@]}" || give_up 'apt-get failed'
[ ${#cross[@]} -eq 0 ] || install_all "${cross[@]}" ||
  echo 'install-deps: going on without; the check for aarch64 says what it leaves out'
[ ${#clang[@]} -eq 0 ] || install_all "${clang[@]}" || echo 'install-deps: going on without; the test of gin.cuh with clang is skipped'
[ ${#assembler[@]} -eq 0 ] || install_all "${assembler[@]}" || echo 'install-deps: going on without; the bytes of the bitcode are not compared'
# apt-get refuses these packages if another system rustc is installed.
[ ${#rust[@]} -eq 0 ] || install_all "${rust[@]}" || echo "install-deps: going on without; $no_rust"
echo 'install-deps: done'
