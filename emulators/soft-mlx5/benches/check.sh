#!/usr/bin/env bash
# Instructions of mlx5 posts and polls against their budgets: check.sh [DIST]. DIST is not used: the bench links the crate.
#
# Prints one line for each budget and a last one with the counts; status 1 when a budget is exceeded. Without valgrind it prints
# SKIP and the reason.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
"${CARGO:-cargo}" bench --quiet --locked -p soft-mlx5 --bench instructions -- --check
