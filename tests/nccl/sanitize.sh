#!/usr/bin/env bash
# Runs the plugin's tests with a sanitizer in the plugin, the software card and the tests: sanitize.sh [DIST] [address|thread]
#
# The script ignores DIST and builds everything into target/sanitize-KIND. `address` (the default) takes a minute or two. `thread`
# takes several minutes, because it also compiles the standard library, whose source must be installed (rustup component add
# rust-src). Prints a line per test and a final line with the counts; exits with status 1 if a test failed. If the toolchain has
# no sanitizer, it prints SKIP.
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
kind=address
for argument; do
    case $argument in
    address | thread) kind=$argument ;;
    esac
done

# skip_all WHY: ends the run.
skip_all() {
    skip "$kind sanitizer on the plugin: $1"
    finish sanitizers
}

cd "$root" || exit
host=$(rustc -vV | sed -n 's/^host: //p')
sysroot=$(rustc --print sysroot)
short=${kind:0:1}san
compgen -G "$sysroot/lib/rustlib/$host/lib/librustc*_rt.$short.a" >/dev/null ||
    skip_all "the Rust toolchain has no $short runtime for $host"
std=()
if [ "$kind" = thread ]; then
    [ -d "$sysroot/lib/rustlib/src/rust/library/std" ] || skip_all "the toolchain lacks the component rust-src"
    std=(-Zbuild-std)
fi

# RUSTC_BOOTSTRAP makes a stable compiler accept the unstable sanitizer flags. The test programs contain the runtime, which the
# plugin and the software card use once they are loaded.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Zsanitizer=$kind -Clink-arg=-Wl,--export-dynamic -Cforce-frame-pointers=yes"
export CARGO_TARGET_DIR=$root/target/sanitize-$kind
build=$CARGO_TARGET_DIR/$host/release
log=$(mktemp)
trap 'rm -f "$log"' EXIT

if ! cargo build --release --locked "${std[@]}" --target "$host" -p ferrogin-host-plugin -p softefa >"$log" 2>&1; then
    # cargo fetches the standard library's dependencies from the registry once.
    grep -qiE "download|network|resolve host" "$log" && skip_all "the crates of the standard library cannot be fetched"
    fail "$kind sanitizer: building"
    finish sanitizers
fi
export FERROGIN_DIST=$CARGO_TARGET_DIR/dist
mkdir -p "$FERROGIN_DIST"
cp "$build/libnccl_gin_ferrogin.so" "$FERROGIN_DIST/libnccl-gin-ferrogin.so"
cp "$build/libsoftefa_fi.so" "$FERROGIN_DIST/libsoftefa-fi.so"
if ! nm -D --undefined-only "$FERROGIN_DIST/libnccl-gin-ferrogin.so" | grep "__${short}_" >/dev/null; then
    fail "$kind sanitizer: the plugin is not instrumented"
    finish sanitizers
fi

# The tests count leaks themselves. The leak sanitizer is off, because it reports libfabric's own leaks.
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1 RUST_BACKTRACE=0
export FERROGIN_TEST_SETUPS=${FERROGIN_TEST_SETUPS:-20} FERROGIN_TEST_CYCLES=${FERROGIN_TEST_CYCLES:-100}
# Doc tests are excluded, because rustdoc compiles them without the sanitizer.
cargo test --release --locked "${std[@]}" --target "$host" -p ferrogin-host-plugin --lib --tests --no-fail-fast -- --include-ignored --test-threads=2 \
    >"$log" 2>&1
status=$?
# A failed test also prints its child process's lines, so only the first line for each test counts.
declare -A seen
while IFS= read -r line; do
    name=${line#test }
    name=${name%% ...*}
    case $line in
    "test "*" ... ok")
        # A SKIP line has the name without modules.
        [ -n "${seen[$name]:-}${seen[${name##*::}]:-}" ] && continue
        pass "$kind: $name" && seen[$name]=1
        ;;
    "test "*" ... FAILED")
        [ -n "${seen[$name]:-}" ] && continue
        say FAIL "$kind: $name" && seen[$name]=1
        ;;
    "SKIP "*)
        name=${line#SKIP }
        skip "$name" && seen[${name%%:*}]=1
        ;;
    *Sanitizer:* | *panicked* | "    #"[0-9]*) echo "$line" | cut -c1-200 ;;
    esac
done <"$log"
[ "$status" -eq 0 ] || [ "$failed" -gt 0 ] || fail "$kind sanitizer: cargo test ended with status $status"
finish sanitizers
