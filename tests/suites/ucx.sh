#!/usr/bin/env bash
# Runs UCX's own tests of the transports SRD and UD, unmodified, on two software cards: ucx.sh [DIST]
#
# Builds UCX in .cache/suites first, unless that's done; this takes git, autoconf, automake, libtool, cmake, and a C++
# compiler. The tests run in groups, each in its own process. A group that meets the time limit is cut off, and its
# remaining tests count as not run. Prints UCX's line of each failed test and a final line with the counts; exits with
# status 1 if a test failed or did not run.
#
#   UCX=URL RDMA_CORE=URL   where to clone from, also a local directory [GitHub; rdma-core for its headers]
#   GTEST_FILTER=PATTERN    the tests [those of SRD and UD, except `excluded` below]
#   GROUP=N LIMIT=N         tests in a process [100], and its time limit in seconds [900]
#   SOFTEFA_FAULTS=LIST     faults of the cards [none]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd)
. "$root/tests/suites/common.sh"
# UCX's own job excludes them too: the first two fail on its mock as well, and a test of the third takes minutes.
excluded='*test_ucp_fault_tolerance*:*test_ucp_am_psn*:*test_ucp_perf.envelope*'

ucx() {
    git clone --depth 1 "${UCX:-https://github.com/openucx/ucx}" "$built/ucx"
    cd "$built/ucx"
    ./autogen.sh
    ./configure --enable-gtest --with-verbs="$built/verbs" --with-efa --without-mlx5 --without-rdmacm --without-knem \
        --without-gdrcopy --without-cuda --without-java --without-go --disable-doxygen-doc
    for part in src/ucm src/ucs src/uct src/ucp src/tools/vfs src/tools/info src/tools/perf; do
        make -j"$(nproc)" -C "$part"
    done
    # Optimised, the tests take most of an hour to compile.
    make -j"$(nproc)" -C test/gtest CXXFLAGS='-O0 -g0'
}

once verbs ucx
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOFTEFA_NICS=2 CLOUD_TYPE=aws
gtest=$built/ucx/test/gtest/gtest

# The list has a line for each fixture, which ends with a dot, and an indented one for each of its tests.
card "$gtest" --gtest_list_tests --gtest_filter="${GTEST_FILTER:-*ud*:srd/*-$excluded}" 2>"$work/errors" |
    awk '/^[^ ].*\.( |$)/ { fixture = $1 } /^  / { print fixture $1 }' >"$work/tests"
[ -s "$work/tests" ] || { cat "$work/errors"; echo "ucx: no test matches"; exit 1; }
split -l "${GROUP:-100}" -d -a 4 "$work/tests" "$work/group."
for group in "$work"/group.????; do
    card timeout --kill-after=5 "${LIMIT:-900}" "$gtest" --gtest_filter="$(paste -sd: "$group")" >"$group.log" 2>&1 ||
        [ $? -eq 1 ] || echo "cut off in $(grep '^\[ RUN' "$group.log" | tail -n 1)"
    grep '^\[  FAILED  \].*(.* ms)' "$group.log" || true
done

count() { cat "$work"/group.*.log | grep -c "^\[ *$1" || true; }
# A test that skips itself says so, and then counts as OK.
skipped=$(count 'SKIP \]') failed=$(count 'FAILED  \].*(.* ms)')
passed=$(($(count 'OK \].*(.* ms)') - skipped))
unrun=$(($(wc -l <"$work/tests") - passed - skipped - failed))
echo "ucx: $passed passed, $failed failed, $skipped skipped themselves, $unrun not run"
[ $((failed + unrun)) -eq 0 ]
