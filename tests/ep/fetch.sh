#!/usr/bin/env bash
# Fetches the device code of nccl_ep from PyPI: fetch.sh CACHE
#
# Places the headers of the package nccl-extensions in CACHE/nccl-extensions-VERSION/include and deletes the rest of the wheel. Does nothing if
# they exist. Prints the directory. Exits with status 3 if PyPI isn't reachable.
set -euo pipefail

version=0.1.0
cache=$1
target=$cache/nccl-extensions-$version
if [ ! -f "$target/include/nccl_ep.h" ]; then
    mkdir -p "$cache"
    # Several stages of a test run may fetch at the same time.
    exec 9>"$cache/fetch.lock"
    flock 9
fi
if [ ! -f "$target/include/nccl_ep.h" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # The headers are the same in every wheel.
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --implementation cp --python-version 3.11 \
        --platform manylinux_2_28_x86_64 -d "$work" "nccl-extensions==$version" 2>"$work/pip.log"; then
        tail -n 3 "$work/pip.log" >&2
        exit 3
    fi
    python3 - "$work" <<'PYTHON'
import pathlib
import sys
import zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as z:
    z.extractall(work, [n for n in z.namelist() if n.startswith("nccl/ep/include/") and not n.endswith("/")])
PYTHON
    rm -rf "$target"
    mkdir -p "$target"
    mv "$work/nccl/ep/include" "$target/include"
fi
echo "$target/include"
