#!/usr/bin/env bash
# Runs `cargo xtask faults` with the plugin in DIST: run.sh DIST [OPTION...], with the options of that command.
#
#   FAULT_SEEDS=N   number of seeds [60]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "$1" && pwd)
shift
cd "$root"
exec "${CARGO:-cargo}" xtask faults --dist "$dist" --seeds "${FAULT_SEEDS:-60}" "$@"
