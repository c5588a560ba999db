#!/usr/bin/env bash
# Builds the packages with scripts/packages.sh, installs each below an empty directory, and removes it again: run.sh DIST
set -euo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(realpath "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log

# try NAME COMMAND...
try() {
    if "${@:2}" >"$log" 2>&1; then pass "$1"; else fail "$1"; fi
}

# What the package leaves below $work/root, apart from the package manager's own files.
left() { (cd "$work/root" && find . ! -type d -name '*ferrogin*' ! -path './var/*'); }

installed() {
    test -f "$work/root/usr/share/man/man1/ferrogin.1" && test -f "$work/root/usr/share/doc/ferrogin/LICENSE" &&
        "$work/root/usr/bin/ferrogin" --version
}

deb() {
    dpkg-deb --field "$1" Depends | grep -E 'libc6 \(>= 2\.[0-9]+\)' && dpkg-deb --contents "$1" | grep 'doc/ferrogin/copyright$' &&
    mkdir -p "$work/root/var/lib/dpkg/info" "$work/root/var/lib/dpkg/updates" && : >"$work/root/var/lib/dpkg/status" &&
        dpkg --root="$work/root" --force-depends --install "$1" && installed && dpkg --root="$work/root" --purge ferrogin
}

rpm_package() {
    local rpm=(rpm --root "$work/root" --nodeps --noscripts)
    rpm --query --package --requires "$1" | grep -E '^glibc >= 2\.[0-9]+$' &&
    "${rpm[@]}" --install "$1" && installed && "${rpm[@]}" --erase ferrogin
}

for run in first second; do
    "$root/scripts/packages.sh" "$dist" "$work/$run" >"$work/$run.log" 2>"$log" || fail "packages, $run run"
done
grep '^SKIP' "$work/first.log" | sed 's/^SKIP //' >"$work/skips" || true
while read -r why; do skip "$why"; done <"$work/skips"
for package in "$work"/first/*; do
    [ -f "$package" ] || continue
    name=$(basename "$package")
    try "$name is the same twice" cmp "$package" "$work/second/$name"
    rm -rf "$work/root" && mkdir "$work/root"
    case $name in
    *.deb) [ "$(id -u)" = 0 ] && try "$name is installed and removed" deb "$package" || skip "$name is installed: only root can" ;;
    *.rpm) [ "$(id -u)" = 0 ] && try "$name is installed and removed" rpm_package "$package" || skip "$name is installed: only root can" ;;
    esac
    left >"$log"
    if [ -s "$log" ]; then fail "$name leaves nothing"; else pass "$name leaves nothing"; fi
done
finish
