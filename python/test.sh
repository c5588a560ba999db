#!/usr/bin/env bash
# Tests the Python package: test.sh [--check] [DIST] [ARGUMENTS OF PYTEST...]
#
# Builds the wheel from DIST (default: dist), installs it in its own environment (.cache/python/tests) with pinned packages from PyPI, and
# runs python/tests; with --check only python/tests/check, whose packages are large (.cache/python/check). Prints a line per test and a last
# line with the counts; exits with 1 if a test failed. Without python3-venv or PyPI it prints the reason and counts one skip.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/.." && pwd)
dist=$root/dist
environment=tests
selection=--ignore=tests/check
if [ "${1:-}" = --check ]; then
    environment=check
    selection=tests/check
    shift
fi
if [ $# -gt 0 ]; then
    dist=$1
    shift
fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

# Ends the run because something is unavailable (status 3) or failed.
give_up() {
    if [ "$1" -eq 3 ]; then
        echo "SKIP python package: $(tail -n 1 "$log/error")"
        echo "python: 0 passed, 0 failed, 1 skipped"
        exit 0
    fi
    cat "$log/error"
    echo "FAIL $2"
    echo "python: 0 passed, 1 failed, 0 skipped"
    exit 1
}

for file in libferrogin.so ferrogin; do
    if [ ! -f "$dist/$file" ]; then
        echo "$dist lacks $file: run make build, or give the directory" >"$log/error"
        give_up 1 "python package"
    fi
done
tests=$("$here/venv.sh" "$environment" "$here/requirements-$environment.txt" 2>"$log/error") || give_up $? "environment of the tests"
wheel=$("$here/wheel.sh" "$dist" "$log" 2>"$log/error") || give_up $? "wheel"
echo "PASS wheel: $(basename "$wheel") is of the platform that auditwheel finds"
"$tests/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel" >"$log/error" 2>&1 ||
    give_up 1 "installation of the wheel"
cd "$here" || exit 1
# The tests print the counts; the wheel counts as one more test.
"$tests/bin/python" -m pytest -q "$selection" "$@" 2>&1 | awk '
    /^python: [0-9]+ passed, / { $2 = $2 + 1; counts = $0; next }
    { print }
    END { print counts == "" ? "FAIL pytest\npython: 1 passed, 1 failed, 0 skipped" : counts }'
exit "${PIPESTATUS[0]}"
