#!/usr/bin/env bash
# The posting code under loom: models.sh [DIST]. DIST is not used.
#
# Built with --cfg loom into its own target directory, so that nothing else is rebuilt. Ends with libtest's count.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" RUST_BACKTRACE=0
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
# One model at a time: each interleaving maps stacks, and mapping threads of one process wait for each other.
exec "${CARGO:-cargo}" test --quiet --profile models --locked -p ferrogin-device-kernels --lib -- --test-threads=1 "${@:2}"
