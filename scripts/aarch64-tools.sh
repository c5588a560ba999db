# Sourced by bash in the root of the repository: finds tools that build for aarch64 Linux on another machine.
#
# aarch64_tools sets `cargo`, RUSTC, `options` (for cargo build) and the linker, or returns 1 with the reason in `why`.
# It uses the first of
#   cargo and rustc on PATH with the target's std (`rustup target add aarch64-unknown-linux-gnu`),
#   the same with std's source (`rustup component add rust-src`), from which std is built,
#   /usr/bin/cargo and /usr/bin/rustc with either (Debian: rustc-web, cargo-web, rust-web-src),
# with aarch64-linux-gnu-gcc as the linker (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross).
target=aarch64-unknown-linux-gnu
gnu=aarch64-linux-gnu
oldest=1.88

# Sets cargo, RUSTC and build_std if these tools can compile for the target.
try_tools() {
    command -v "$1" >/dev/null && command -v "$2" >/dev/null || return 1
    local version
    version=$("$2" --version 2>/dev/null | cut -d' ' -f2) || return 1
    [ "$(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ] || return 1
    cargo=$1
    export RUSTC=$2
    build_std=()
    compgen -G "$("$2" --print target-libdir --target "$target")/libstd-*" >/dev/null && return 0
    [ -f "$("$2" --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock" ] || return 1
    # Officially a nightly flag; stable compilers accept it too.
    export RUSTC_BOOTSTRAP=1
    build_std=(-Zbuild-std=std,panic_unwind)
}

aarch64_tools() {
    if ! try_tools "${CARGO:-cargo}" rustc && ! try_tools /usr/bin/cargo /usr/bin/rustc; then
        why="no Rust $oldest or newer here has std for $target or its source"
        return 1
    fi
    local program linked=yes
    program=$(mktemp)
    echo 'int main(void) { return 0; }' | "$gnu-gcc" -x c -o "$program" - 2>/dev/null || linked=
    rm -f "$program"
    if [ -z "$linked" ]; then
        why="no $gnu-gcc that links a program"
        return 1
    fi
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$gnu-gcc
    # The PTX compiler here is not part of the target.
    export FERROGIN_PTX=checked-in
    options=(--target "$target" ${build_std[@]+"${build_std[@]}"})
}
