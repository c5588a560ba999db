#!/usr/bin/env bash
# Instructions of a post against their budgets: check.sh [DIST]. DIST is not used: the bench links the device code.
#
# One line for each budget and a last one with the counts; status 1 when one is exceeded. Says aloud what is left out
# where valgrind, PyPI or a C++ compiler is missing.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
"${CARGO:-cargo}" bench --quiet --locked -p ferrogin-bench --bench posts -- --check
