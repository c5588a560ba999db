#!/usr/bin/env bash
# A short run of the bench `gpu` on the software GPU of DIST: check.sh [DIST]. The other benches are not part of a check: what a post
# costs a CPU says nothing of a GPU, and doorbells per post depend on the scheduler.
#
# Prints one line for each result and a last line with the counts; the status is 1 when one failed.
set -uo pipefail

dist=${1:-dist}
[ -d "$dist" ] && dist=$(cd "$dist" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
FERROGIN_DIST=$dist benches/gpu/run.sh --check >"$log" || status=1
grep -E '^(PASS|FAIL|SKIP) ' "$log"
count() { grep -c "^$1 " "$log"; }
echo "benches: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
exit $status
