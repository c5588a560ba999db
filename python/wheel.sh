#!/usr/bin/env bash
# Builds the Python wheel: wheel.sh [DIST] [OUT]. Prints its path.
#
# DIST (default: dist) is what `make build` made; OUT (default: DIST) gets the wheel. The wheel has the stripped
# libraries and the tool, the headers, the checked-in PTX and bitcode, and the objects of `make ptx` if DIST/cuda has
# those made from the same sources. Its platform tag is that of the libraries, with the oldest glibc that has all
# symbols they use. Fetches the build backend from PyPI once (into .cache/). Exits with 3 and the reason if something is
# unavailable.
#
#   STRIP=aarch64-linux-gnu-strip   for another processor's libraries
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd)
out=${2:-$dist}
strip=${STRIP:-strip}
libraries=(libferrogin.so libnccl-gin-ferrogin.so libsoftefa-fi.so libferrogin_device.so)

# say_why REASON [STATUS]
say_why() {
    echo "wheel: $1" >&2
    exit "${2:-3}"
}

for file in "${libraries[@]}" ferrogin gpu/libcuda.so.1 verbs/libibverbs.so.1; do
    [ -f "$dist/$file" ] || say_why "$dist/$file is missing: run make build first" 1
done
for program in python3 "$strip" readelf; do
    command -v "$program" >/dev/null || say_why "no $program"
done
tools=$("$here/venv.sh" wheel "$here/requirements-wheel.txt")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files=$work/files wheels=$work/wheels
mkdir -p "$files"/{bin,cuda,include,lib} "$out"

# pip doesn't copy links, so the library has the name that programs load, and a linker script the name that they link.
"$strip" --strip-unneeded "$dist/libferrogin.so" -o "$files/lib/libferrogin.so.0"
echo 'INPUT(-l:libferrogin.so.0)' >"$files/lib/libferrogin.so"
for library in "${libraries[@]:1}"; do
    "$strip" --strip-unneeded "$dist/$library" -o "$files/lib/$library"
done
# Where `ferrogin gpu` and `ferrogin verbs` look for them. A wheel has no links, so `ferrogin verbs` makes the ones
# listed in `links`.
mkdir "$files/lib/ferrogin"
cp -RP "$dist/gpu" "$dist/verbs" "$files/lib/ferrogin/"
rm "$files/lib/ferrogin/gpu/libcuda.so"
(cd "$files/lib/ferrogin/verbs" && find . -type l -printf '%P\t%l\n' | sort >links && find . -type l -delete)
"$strip" --strip-unneeded "$files/lib/ferrogin/gpu/libcuda.so.1" "$files/lib/ferrogin/verbs/libibverbs.so.1"
"$strip" "$dist/ferrogin" -o "$files/bin/ferrogin"
chmod 755 "$files"/bin/ferrogin "$files"/lib/*.so* "$files"/lib/ferrogin/*/*.so.1
cp -R "$root/ffi-headers/include/ferrogin" "$files/include/"
cp "$root"/device-kernels/ptx/ferrogin_device.{ptx,bc} "$files/cuda/"
source_of() { sed -n 's|^// source: ||p;20q' "$1"; }
if [ ! -f "$dist/cuda/ferrogin_device.o" ]; then
    echo "wheel: without CUDA objects: make ptx makes them" >&2
elif [ "$(source_of "$dist/cuda/ferrogin_device.ptx")" != "$(source_of "$root/device-kernels/ptx/ferrogin_device.ptx")" ]; then
    echo "wheel: without CUDA objects: those in $dist/cuda are of other sources than the PTX; make ptx makes them again" >&2
else
    cp "$dist"/cuda/ferrogin_device*.o "$files/cuda/"
fi

case $(readelf -h "$files/lib/libferrogin.so.0" | sed -n 's/.*Machine: *//p') in
*X86-64*) machine=x86_64 ;;
AArch64) machine=aarch64 ;;
*) say_why "$dist/libferrogin.so is for a processor without a wheel" ;;
esac
glibc=$(readelf --version-info "${libraries[@]/#/$dist/}" "$dist/ferrogin" | grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -n 1)
[ -n "$glibc" ] || say_why "the libraries name no version of glibc" 1
platform=manylinux_2_${glibc#GLIBC_2.}_$machine

cd "$here"
FERROGIN_WHEEL_FILES=$files FERROGIN_WHEEL_PLATFORM=$platform SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-1577836800} \
    "$tools/bin/python" -m hatchling build --target wheel --directory "$wheels" >&2
wheel=$(echo "$wheels"/*.whl)
"$tools/bin/auditwheel" show "$wheel" >"$work/audit" 2>&1 || say_why "auditwheel does not read the wheel: $(tail -n 1 "$work/audit")" 1
# auditwheel prints the oldest platform that the wheel runs on.
grep -q "\"$platform\"" "$work/audit" || say_why "auditwheel does not find the wheel to be of $platform: $(tr '\n' ' ' <"$work/audit")" 1
mv "$wheel" "$out/"
echo "$out/$(basename "$wheel")"
