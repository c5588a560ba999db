#!/usr/bin/env bash
# Builds the book and checks the links in its pages: run.sh [DIST]; DIST isn't used. tests/all/docs.rs checks the links and code in the
# Markdown itself. Prints a line per test; exits with status 1 if a test failed.
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
cd "$root" || exit 1
scripts/book.sh
case $? in
0) pass "the book is built without a warning" ;;
3) skip "the book: mdBook cannot be installed here" && finish ;;
*) fail "the book is not built without a warning" && finish ;;
esac
log=$(mktemp)
trap 'rm -f "$log"' EXIT
python3 tests/book/links.py target/book >"$log"
count "$log" $? "links of the book"
finish
