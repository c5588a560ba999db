#!/usr/bin/env bash
# Fetches the device code of nccl_ep or DeepEP V2 from PyPI: fetch.sh CACHE [nccl_ep|deep_ep]
#
# Places the headers of the package in CACHE/PACKAGE-VERSION/include and deletes the rest of the wheel. Does nothing if
# they exist. Prints the directory. Exits with status 3 if PyPI isn't reachable.
set -euo pipefail

cache=$1
case ${2:-nccl_ep} in
    nccl_ep) package=nccl-extensions version=0.1.0 headers=nccl/ep/include ;;
    deep_ep) package=sgl-deep-ep version=0.1.2.post1 headers=deep_ep/include ;;
    *)
        echo "usage: fetch.sh CACHE [nccl_ep|deep_ep]" >&2
        exit 2
        ;;
esac
target=$cache/$package-$version
if [ ! -d "$target/include" ]; then
    mkdir -p "$cache"
    # Several stages of a test run may fetch at the same time.
    exec 9>"$cache/fetch.lock"
    flock 9
fi
if [ ! -d "$target/include" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # The headers are the same in every wheel.
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --implementation cp --python-version 3.11 \
        --platform manylinux_2_28_x86_64 -d "$work" "$package==$version" 2>"$work/pip.log"; then
        tail -n 3 "$work/pip.log" >&2
        exit 3
    fi
    python3 - "$work" "$headers/" <<'PYTHON'
import pathlib
import sys
import zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as z:
    z.extractall(work, [n for n in z.namelist() if n.startswith(sys.argv[2]) and not n.endswith("/")])
PYTHON
    rm -rf "$target"
    mkdir -p "$target"
    mv "$work/$headers" "$target/include"
fi
echo "$target/include"
