#!/usr/bin/env bash
# The fault campaign against what lies in DIST: run.sh DIST [OPTION...], options as of `cargo xtask faults`.
#
#   FAULT_SEEDS=N   as many seeds instead of 200
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "$1" && pwd)
shift
cd "$root"
exec "${CARGO:-cargo}" xtask faults --dist "$dist" --seeds "${FAULT_SEEDS:-200}" "$@"
