#!/usr/bin/env bash
# Makes a release's tarballs in target/release-tarballs/, for x86-64 and aarch64: release.sh [--snapshot]
#
# A tarball contains what `make install` installs, stripped, and the documents. The script checks the tree and the ELF
# files in each tarball, and that the tarball for this machine's processor runs the demo from an empty directory. With
# --snapshot, the tree may have uncommitted changes and unreleased lines in CHANGELOG.md, and the machine may lack the
# cross compiler.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/aarch64-tools.sh
snapshot=
case ${1:-} in
--snapshot) snapshot=-snapshot ;;
?*) echo "usage: release.sh [--snapshot]" >&2 && exit 2 ;;
esac
fail() {
    echo "release: $*" >&2
    exit 1
}
target_dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$target_dir/release-build
out=$target_dir/release-tarballs
log=$work/log
time=$(git log -1 --format=%ct)
mkdir -p "$work" "$out"
# What a program may load at start; everything else, such as libfabric and the CUDA driver, is loaded on use.
libraries='libc\.so\.6|libm\.so\.6|libgcc_s\.so\.1|ld-linux-x86-64\.so\.2|ld-linux-aarch64\.so\.1'

# Runs a command, and prints its output only if it fails.
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2 && fail "failed: $*"; }; }

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
others=$(grep -E '^[a-z0-9-]+ = \{ path = ' Cargo.toml | grep -vF "version = \"$version\"" || true)
[ -z "$others" ] || fail "all packages are released together as $version, but Cargo.toml has: $others"
quietly "${CARGO:-cargo}" test --release --locked -p ferrogin --test all checked_in_ptx_has_hash_of_its_sources
if [ -z "$snapshot" ]; then
    [ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed, so no tag would name this tree"
    # The lines in sections whose titles begin with $1.
    section() { awk -v title="## [$1]" '/^## / { on = index($0, title) == 1 } on && /^- /' CHANGELOG.md; }
    [ -z "$(section Unreleased)" ] || fail "CHANGELOG.md has lines under [Unreleased]: name the section [$version] - YYYY-MM-DD"
    [ -n "$(section "$version")" ] || fail "CHANGELOG.md has no section [$version] with lines"
    grep -qE "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md || fail "the section [$version] of CHANGELOG.md has no date"
fi
echo "release: the tree of version $version can be released"

# build ARCH WORK: runs `make build` on the tree in the current directory, into WORK. The files don't depend on where
# the repository and cargo's own files are.
build() {
    local dist=$2/$1/dist cargo_home=${CARGO_HOME:-$HOME/.cargo}
    rm -rf "$dist"
    unset MAKEFLAGS MAKELEVEL MFLAGS BUILD_FLAGS RELEASE
    export CARGO_TARGET_DIR=$2/target FERROGIN_PTX=checked-in CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=false
    export RUSTFLAGS="--remap-path-prefix=$PWD=. --remap-path-prefix=$cargo_home=cargo"
    if [ "$1" = "$(uname -m)" ]; then
        quietly make --no-print-directory build DIST="$dist"
    else
        aarch64_tools || fail "$why"
        CC=$gnu-gcc quietly make --no-print-directory build DIST="$dist" CARGO="$cargo" BUILD_FLAGS="${options[*]}" \
            RELEASE="$CARGO_TARGET_DIR/$target/release"
    fi
}

# check_elf FILE MACHINE PREFIX: checks the file, and prints the oldest glibc that has its symbols.
check_elf() {
    local text loads
    text=$(LC_ALL=C "$3readelf" --wide --file-header --dynamic --version-info --section-headers "$1")
    grep -qE "Machine:.*$2" <<<"$text" || fail "$1 is not for $2"
    ! grep -qE '\.debug_info|\.symtab' <<<"$text" || fail "$1 is not stripped"
    ! grep -qE '\((RPATH|RUNPATH)\)' <<<"$text" || fail "$1 has a library path of the machine that built it"
    loads=$(sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p' <<<"$text" | grep -vxE "$libraries" || true)
    [ -z "$loads" ] || fail "$1 loads at start what a machine may lack: $loads"
    sed -n '/Flags: WEAK/d; s/.*Name: GLIBC_\([0-9.]*\) .*/\1/p' <<<"$text" | sort -uV | tail -n 1
}

# tarball ARCH MACHINE PREFIX: builds, checks and packs.
tarball() {
    local arch=$1 name=ferrogin-$version$snapshot-linux-$1 stage=$work/$1/stage file glibc=0 needs documented
    (build "$arch" "$work")
    rm -rf "$stage"
    quietly env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory install DIST="$work/$arch/dist" DESTDIR="$stage" PREFIX="/$name" LIBDIR="/$name/lib"
    local tree=$stage/$name
    cp README.md LICENSE CHANGELOG.md "$tree"
    local files=() paths
    while IFS= read -r file; do files+=("$file"); done < <(find "$tree/bin" "$tree/lib" -maxdepth 1 -type f | sort)
    [ ${#files[@]} -ge 5 ] || fail "$tree has ${#files[@]} libraries and programs, and not 5"
    quietly "$3strip" --strip-unneeded "${files[@]}"
    for file in "${files[@]}"; do
        needs=$(check_elf "$file" "$2" "$3")
        glibc=$(printf '%s\n' "$glibc" "$needs" | sort -V | tail -n 1)
    done
    documented=$(sed -n "s/^|.*-linux-$arch\.tar\.gz.*| *\([0-9.]*\) *|$/\1/p" docs/packages.md)
    [ "$documented" = "$glibc" ] || fail "the $arch tarball needs glibc $glibc, and docs/packages.md says $documented"
    paths=$(grep -rlF -e "$PWD" -e "${CARGO_HOME:-$HOME/.cargo}" -e "$(rustc --print sysroot)" "$tree" || true)
    [ -z "$paths" ] || fail "these files have paths of the machine that built them: $paths"
    cat >"$tree/REQUIRES" <<END
Linux on $arch
glibc $glibc or newer, and libgcc_s.so.1 (Debian and Ubuntu: libgcc-s1; others: libgcc)
libfabric 1.17 or newer for the software card; 2.6 or newer for EFA cards
END
    # The same files give the same bytes.
    chmod -R u=rwX,go=rX "$tree"
    tar --create --format=ustar --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner -C "$stage" "$name" |
        gzip --no-name --best >"$out/$name.tar.gz"
    (cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256" && sha256sum --check --quiet "$name.tar.gz.sha256")
    try_out "$arch" "$name"
    echo "$out/$name.tar.gz"
}

# same_elsewhere ARCH: builds a copy of the tree in another directory, and compares the files byte by byte.
same_elsewhere() {
    local copy=$work/elsewhere/a-copy-of-the-tree
    rm -rf "$work/elsewhere"
    mkdir -p "$copy"
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference --target-directory="$copy"
    (cd "$copy" && build "$1" "$work/elsewhere")
    quietly diff -r --no-dereference "$work/$1/dist" "$work/elsewhere/$1/dist"
    rm -rf "$work/elsewhere"
    echo "release: a build for $1 in another directory made the same files"
}

# try_out ARCH NAME: runs the unpacked tool with nothing from this tree in its environment: the demo, or as much as an
# emulator can.
try_out() {
    local place=$work/$1/unpacked variable
    rm -rf "$place"
    mkdir "$place"
    tar --extract --gzip --file "$out/$2.tar.gz" --directory "$place"
    (
        cd "$place"
        for variable in $(compgen -e); do
            case $variable in FERROGIN_LIBFABRIC) ;; FERROGIN_* | SOFTEFA_* | FI_* | NCCL_* | LD_LIBRARY_PATH) unset "$variable" ;; esac
        done
        if [ "$1" = "$(uname -m)" ]; then
            FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cpu quietly "$2/bin/ferrogin" demo
            echo "release: $2: the demo passed in an empty directory"
        elif command -v qemu-aarch64 >/dev/null; then
            quietly qemu-aarch64 -L /usr/aarch64-linux-gnu "$2/bin/ferrogin" --version
            echo "release: $2: the tool prints its version in an emulator"
        else
            echo "SKIP run of $2: no qemu-aarch64"
        fi
    )
    rm -rf "$place"
}

case $(uname -m) in
x86_64)
    tarball x86_64 X86-64 ''
    same_elsewhere x86_64
    if (aarch64_tools); then
        tarball aarch64 AArch64 aarch64-linux-gnu-
    else
        aarch64_tools || [ -n "$snapshot" ] || fail "a release has both tarballs: $why"
        echo "SKIP tarball for aarch64: $why"
    fi
    ;;
aarch64) [ -n "$snapshot" ] || fail "a release has both tarballs: make it on x86-64" && tarball aarch64 AArch64 '' ;;
*) fail "tarballs are made on x86-64 or aarch64" ;;
esac
