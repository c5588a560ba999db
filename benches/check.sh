#!/usr/bin/env bash
# Runs the `gpu` bench briefly on DIST's software GPU: check.sh [DIST]. The other benches are not part of the check:
# what a post costs on a CPU says nothing about a GPU, and doorbells per post depend on the scheduler.
#
# Prints a line per result, then a line with the counts. Exits with 1 if any failed.
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
