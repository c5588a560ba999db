#!/usr/bin/env bash
# Instructions of mlx5 posts and polls against their budgets: check.sh [DIST]. DIST is not used: the bench links the crate.
#
# One line for each budget and a last one with the counts; status 1 when one is exceeded. Says aloud that nothing was
# counted where valgrind is missing.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
"${CARGO:-cargo}" bench --quiet --locked -p soft-mlx5 --bench instructions -- --check
