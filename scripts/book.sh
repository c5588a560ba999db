#!/usr/bin/env bash
# Builds the documentation as a book, target/book/index.html. mdBook's warnings are errors. Installs mdBook once, into
# .cache/. Exits with 3 and the reason if mdBook cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.5.4
mdbook=$PWD/.cache/mdbook-$version/bin/mdbook
log=target/book.log

say_why() {
  echo "book: $1" >&2
  exit 3
}

if [ ! -x "$mdbook" ]; then
  echo "book: installing mdBook $version into .cache/ (70 s of one core, once)" >&2
  mkdir -p .cache
  # Unoptimised, it builds in a third of the time, and still builds the book in half a second.
  env -u CARGO_TARGET_DIR CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=false timeout 600 \
    "${CARGO:-cargo}" install --quiet --locked --no-track --no-default-features --features search --root ".cache/mdbook-$version" \
    "mdbook@$version" >&2 || say_why "cargo could not install mdbook@$version; the lines above have the reason"
fi
command -v python3 >/dev/null || say_why "python3 is missing, which prepares the pages (scripts/book-preprocessor.py)"

mkdir -p target
status=0
MDBOOK_LOG=warn "$mdbook" build >"$log" 2>&1 || status=1
if [ "$status" -ne 0 ] || [ -s "$log" ]; then
  cat "$log" >&2
  echo "book: mdBook warns, or failed: see the lines above" >&2
  exit 1
fi
echo "book: $PWD/target/book/index.html"
