#!/usr/bin/env bash
# Packages what `make build` and `make install` produce, for this machine's processor: packages.sh DIST OUT
#
# Makes a .deb if dpkg-deb is installed and an .rpm if rpmbuild is; prints their paths, or SKIP with the reason. The
# same files give the same package: all times are the commit's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -eq 2 ] || { echo "usage: packages.sh DIST OUT" >&2 && exit 2; }
dist=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$root/Cargo.toml")
SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
summary="GPU-initiated networking for AWS EFA"
about="A NCCL GIN plugin, the host and device libraries, a software EFA card and a software GPU."

# The newest glibc symbol that a library or the tool needs.
needs_glibc() {
    find "$work/stage" -type f \( -name '*.so*' -o -path '*/bin/*' \) -exec readelf --wide --version-info {} + |
        sed -n '/Flags: WEAK/d; s/.*Name: GLIBC_\([0-9.]*\) .*/\1/p' | sort -uV | tail -n 1
}

# stage LIBDIR: installs below $work/stage, stripped.
stage() {
    rm -rf "$work/stage"
    env -u MAKEFLAGS -u MAKELEVEL make --no-print-directory -C "$root" install DIST="$dist" DESTDIR="$work/stage" PREFIX=/usr LIBDIR="$1" >"$work/log" 2>&1 ||
        { cat "$work/log" >&2 && exit 1; }
    find "$work/stage" -type f \( -name '*.so*' -o -path '*/bin/*' \) -exec strip --strip-unneeded {} +
}

if command -v dpkg-deb >/dev/null; then
    stage "/usr/lib/$(uname -m)-linux-gnu"
    arch=$(dpkg --print-architecture)
    glibc=$(needs_glibc)
    # Debian's name for the licence and the notices of all crates.
    cat "$root/LICENSE" "$root/THIRD-PARTY-NOTICES.txt" >"$work/stage/usr/share/doc/ferrogin/copyright"
    chmod 644 "$work/stage/usr/share/doc/ferrogin/copyright"
    mkdir "$work/stage/DEBIAN"
    cat >"$work/stage/DEBIAN/control" <<END
Package: ferrogin
Version: $version
Architecture: $arch
Maintainer: ferrogin <ferrogin@users.noreply.github.com>
Section: net
Priority: optional
Homepage: https://github.com/ferrogin/ferrogin
Depends: libc6 (>= $glibc), libgcc-s1
Recommends: libfabric1 (>= 1.17)
Description: $summary
 $about
END
    echo "activate-noawait ldconfig" >"$work/stage/DEBIAN/triggers"
    dpkg-deb --root-owner-group --build "$work/stage" "$out/ferrogin_${version}_$arch.deb" >"$work/log"
    echo "$out/ferrogin_${version}_$arch.deb"
else
    echo "SKIP .deb: dpkg-deb is not installed"
fi

if command -v rpmbuild >/dev/null; then
    stage /usr/lib64
    glibc=$(needs_glibc)
    find "$work/stage" ! -type d -printf '/%P\n' | sort >"$work/files"
    # Only the package owns these. The directories of libraries, programs and man pages belong to the system.
    find "$work/stage" -type d -path '*ferrogin*' -printf '%%dir /%P\n' | sort >>"$work/files"
    cat >"$work/ferrogin.spec" <<END
Name: ferrogin
Version: $version
Release: 1
Summary: $summary
License: Apache-2.0
URL: https://github.com/ferrogin/ferrogin
Requires: glibc >= $glibc, libgcc
Recommends: libfabric >= 1.17
AutoReqProv: no
%description
$about
%install
mkdir -p %{buildroot} && cp -a $work/stage/. %{buildroot}
%post -p /sbin/ldconfig
%postun -p /sbin/ldconfig
%files -f $work/files
END
    rpmbuild -bb --quiet --define "_topdir $work/rpm" --define "_rpmdir $out" --define '_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' \
        --define '_build_id_links none' --define '__os_install_post %{nil}' --define 'debug_package %{nil}' --define '_buildhost ferrogin' \
        --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' "$work/ferrogin.spec" >"$work/log" 2>&1 ||
        { cat "$work/log" >&2 && exit 1; }
    echo "$out/ferrogin-$version-1.$(uname -m).rpm"
else
    echo "SKIP .rpm: rpmbuild is not installed"
fi
