#!/usr/bin/env bash
# Instructions of a post against their budgets: check.sh [DIST]. Doorbells per post depend on who runs when: see the bench. DIST is not used: the benches
# link the device code.
#
# One line for each budget and a last one with the counts; status 1 when one is exceeded. Says aloud what is left out
# where valgrind, PyPI or a C++ compiler is missing.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
for bench in posts; do
    "${CARGO:-cargo}" bench --quiet --locked -p ferrogin-bench --bench "$bench" -- --check >"$log" || status=1
    grep -vE '^[a-z]+: [0-9]+ passed' "$log" | tee -a "$log.all"
done
count() { grep -c "^$1 " "$log.all"; }
echo "benches: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
rm -f "$log.all"
exit $status
