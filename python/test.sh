#!/usr/bin/env bash
# Tests the Python package: test.sh [--check] [DIST] [ARGUMENTS OF PYTEST...]
#
# Builds the wheel from DIST (default: dist), installs it in its own environment (.cache/python/tests) with pinned packages from PyPI, and
# runs python/tests; with --check only python/tests/check, whose packages are large (.cache/python/check). Prints a line per test and a last
# line with the counts; exits with 1 if a test failed. Without python3-venv or PyPI it prints the reason and counts one skip.
set -uo pipefail

. "$(dirname "$0")/../tests/counts.sh"
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
work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT

# Ends the run because something is unavailable (status 3) or failed.
give_up() {
    if [ "$1" -eq 3 ]; then skip "python package: $(tail -n 1 "$log")"; else fail "$2"; fi
    finish
}

for file in libferrogin.so ferrogin; do
    if [ ! -f "$dist/$file" ]; then
        echo "$dist lacks $file: run make build, or give the directory" >"$log"
        give_up 1 "python package"
    fi
done
tests=$("$here/venv.sh" "$environment" "$here/requirements-$environment.txt" 2>"$log") || give_up $? "environment of the tests"
wheel=$("$here/wheel.sh" "$dist" "$work" 2>"$log") || give_up $? "wheel"
pass "wheel: $(basename "$wheel") is of the platform that auditwheel finds"

# run_in ENVIRONMENT ARGUMENTS...: installs the wheel in an environment and runs its tests.
run_in() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel" >"$log" 2>&1 ||
        give_up 1 "installation of the wheel"
    "$1/bin/python" -m pytest -q "${@:2}" >"$log" 2>&1
    count "$log" $? pytest
}

# Prints an interpreter without a global lock.
find_free_threaded() {
    for python in ${PYTHON_FREE_THREADED:-python3.14t python3.13t}; do
        "$python" -c 'import sys; sys.exit(sys._is_gil_enabled())' 2>/dev/null && echo "$python" && return
    done
    return 1
}

cd "$here" || exit 1
run_in "$tests" "$selection" "$@"
if [ "$environment" = tests ]; then
    if ! python=$(find_free_threaded); then
        skip "python without a global lock: there is no python3.14t or python3.13t, nor PYTHON_FREE_THREADED; CONTRIBUTING.md says how to build one"
    elif ! threaded=$(PYTHON=$python "$here/venv.sh" free-threaded "$here/requirements-free-threaded.txt" 2>"$log"); then
        skip "python without a global lock: $(tail -n 1 "$log")"
    else
        run_in "$threaded" "$selection" --ignore=tests/test_package.py "$@"
    fi
fi
finish
