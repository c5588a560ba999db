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
passed=1 failed=0 skipped=0 status=0

# Installs the wheel in an environment and runs its tests, without the line of counts, which it adds up: run_in ENVIRONMENT ARGUMENTS...
run_in() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel" >"$log/error" 2>&1 ||
        give_up 1 "installation of the wheel"
    "$1/bin/python" -m pytest -q "${@:2}" 2>&1 | awk -v counts="$log/counts" '
        /^python: [0-9]+ passed, / { print $2, $4, $6 > counts; next }
        { print }'
    [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
    read -r -a more <"$log/counts" || { echo "FAIL pytest" && more=(0 1 0); }
    passed=$((passed + more[0])) failed=$((failed + more[1])) skipped=$((skipped + more[2]))
    rm -f "$log/counts"
}

# Prints an interpreter without a global lock.
find_free_threaded() {
    for python in ${PYTHON_FREE_THREADED:-python3.14t python3.13t}; do
        "$python" -c 'import sys; sys.exit(sys._is_gil_enabled())' 2>/dev/null && echo "$python" && return
    done
    return 1
}

# Skips the tests without a global lock: the reason.
skip_free_threaded() {
    echo "SKIP python without a global lock: $1"
    skipped=$((skipped + 1))
}

cd "$here" || exit 1
run_in "$tests" "$selection" "$@"
if [ "$environment" = tests ]; then
    if ! python=$(find_free_threaded); then
        skip_free_threaded "there is no python3.14t or python3.13t, nor PYTHON_FREE_THREADED; CONTRIBUTING.md says how to build one"
    elif ! threaded=$(PYTHON=$python "$here/venv.sh" free-threaded "$here/requirements-free-threaded.txt" 2>"$log/error"); then
        skip_free_threaded "$(tail -n 1 "$log/error")"
    else
        run_in "$threaded" "$selection" --ignore=tests/test_package.py "$@"
    fi
fi
echo "python: $passed passed, $failed failed, $skipped skipped"
exit "$status"
