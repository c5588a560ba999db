#!/usr/bin/env bash
# Makes a virtual environment with pinned packages: venv.sh NAME REQUIREMENTS. Prints its directory.
#
# The environment is in .cache/python/NAME; the script does nothing if REQUIREMENTS hasn't changed. Exits with 3 and the
# reason if something is unavailable. PYTHON=... chooses another interpreter.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
target=$root/.cache/python/$1

say_why() {
    echo "venv: $1" >&2
    exit 3
}

cmp -s "$2" "$target/requirements.txt" && "$target/bin/python" -c '' 2>/dev/null && { echo "$target" && exit; }
command -v "$python" >/dev/null || say_why "no $python"
"$python" -c 'import ensurepip, venv' 2>/dev/null || say_why "no venv module (Debian: python3-venv)"
rm -rf "$target"
mkdir -p "$target"
"$python" -m venv "$target"
echo "venv: fetching the packages of $2 from PyPI" >&2
log=$target/pip.log
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: -r "$2" >"$log" 2>&1 ||
    say_why "pip install failed: $(grep -v '^WARNING' "$log" | tail -n 1)"
cp "$2" "$target/requirements.txt"
echo "$target"
