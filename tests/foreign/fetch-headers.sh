#!/usr/bin/env bash
# Fetches the headers and the device code's bitcode of one NCCL release from PyPI: fetch-headers.sh VERSION CACHE
#
# Places them in CACHE/nccl-VERSION/include and lib/libnccl_device.bc and deletes the rest of the wheel. Does nothing if
# they exist. Exits with status 3 if PyPI isn't reachable.
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "usage: fetch-headers.sh VERSION CACHE" >&2
    exit 2
fi
version=$1
cache=$2
target="$cache/nccl-$version"
[ -f "$target/include/nccl.h" ] && [ -f "$target/lib/libnccl_device.bc" ] && exit 0

mkdir -p "$cache"
# Several stages of a test run may fetch at the same time.
exec 9>"$cache/fetch.lock"
flock 9
[ -f "$target/include/nccl.h" ] && [ -f "$target/lib/libnccl_device.bc" ] && exit 0
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    -d "$work" "nvidia-nccl-cu13==$version" 2>"$work/pip.log"; then
    echo "no headers of NCCL $version: $(tail -n 1 "$work/pip.log")" >&2
    exit 3
fi
python3 - "$work" <<'PYTHON'
import pathlib
import sys
import zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as z:
    names = [n for n in z.namelist() if n.startswith("nvidia/nccl/include/") and not n.endswith("/")]
    if not names:
        sys.exit(f"{wheel.name} has no nvidia/nccl/include/")
    z.extractall(work, [*names, "nvidia/nccl/lib/libnccl_device.bc"])
PYTHON
rm -rf "$target"
mkdir -p "$target"
mv "$work/nvidia/nccl/include" "$work/nvidia/nccl/lib" "$target"
