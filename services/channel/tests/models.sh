#!/usr/bin/env bash
# Checks how a channel's thread is woken under loom: models.sh [DIST]. DIST is not used.
#
# Builds with --cfg loom into its own target directory, which leaves the other builds alone. Ends with libtest's count.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" RUST_BACKTRACE=0
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
exec "${CARGO:-cargo}" test --quiet --profile models --locked -p ferrogin-channel --lib parker "${@:2}"
