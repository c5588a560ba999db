#!/usr/bin/env bash
# The wake-up of a channel's thread under loom: models.sh [DIST]. DIST is not used.
#
# Built with --cfg loom into a target directory of its own, which keeps the other builds. Ends with libtest's count.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" RUST_BACKTRACE=0
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
exec "${CARGO:-cargo}" test --quiet --profile models --locked -p ferrogin-channel --lib parker "${@:2}"
