#!/usr/bin/env bash
# Instructions of a post against their budgets, and a short run of the bench `gpu` on the software GPU of DIST: check.sh [DIST]. The bench
# `doorbells` has no budget, because doorbells per post depend on the scheduler.
#
# Prints one line for each budget and a last line with the counts; the status is 1 when a budget is exceeded. Where valgrind, PyPI
# or a C++ compiler is missing, a SKIP line names what is left out.
set -uo pipefail

dist=${1:-dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
for bench in posts; do
    "${CARGO:-cargo}" bench --quiet --locked -p ferrogin-benches --bench "$bench" -- --check >"$log" || status=1
    grep -vE '^[a-z]+: [0-9]+ passed' "$log" | tee -a "$log.all"
done
FERROGIN_DIST=$dist benches/gpu/run.sh --check >"$log" || status=1
grep -E '^(PASS|FAIL|SKIP) ' "$log" | tee -a "$log.all"
count() { grep -c "^$1 " "$log.all"; }
echo "benches: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
rm -f "$log.all"
exit $status
