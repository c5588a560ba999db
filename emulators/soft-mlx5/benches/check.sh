#!/usr/bin/env bash
# Checks instruction counts of mlx5 posts and polls against their budgets: check.sh [DIST]. DIST is unused: the bench
# links the crate.
#
# Prints one line per budget and a last one with the totals; exits with status 1 if a budget is exceeded. Without
# valgrind, it prints SKIP and the reason.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
"${CARGO:-cargo}" bench --quiet --locked -p soft-mlx5 --bench instructions -- --check
