#!/bin/sh
# Makes libibverbs.so.1 and libefa.so.1 of the static library: emulators/soft-verbs/link.sh libsoft_verbs.a DIRECTORY
# It also writes what programs read of the cards in sysfs into DIRECTORY/sysfs.
set -eu
archive=$1
out=$2
here=$(dirname "$0")
cards=64

mkdir -p "$out"
# Programs unload the library, and the card's thread must not lose its code: nodelete.
${CC:-cc} -shared -o "$out/libibverbs.so.1" -Wl,-soname,libibverbs.so.1 -Wl,-z,nodelete,-z,defs,--gc-sections \
    -Wl,--version-script="$here/symbols.map" -Wl,--whole-archive "$archive" -Wl,--no-whole-archive -lgcc_s -lpthread -ldl -lm -lc
ln -sf libibverbs.so.1 "$out/libefa.so.1"

sys=$out/sysfs
rm -rf "$sys"
mkdir -p "$sys/class/infiniband" "$sys/class/infiniband_verbs" "$sys/bus/pci/drivers/efa"
echo 6 >"$sys/class/infiniband_verbs/abi_version"
n=0
while [ $n -lt $cards ]; do
    pci=$(printf '0000:%02x:00.0' $((n + 16)))
    device=$sys/devices/pci0000:00/$pci
    card=$device/infiniband/rdmap${n}s0
    mkdir -p "$card/ports/1/gids" "$device/infiniband_verbs/uverbs$n"
    ln -s ../../../bus/pci/drivers/efa "$device/driver"
    # The name of the link's target is the PCI address.
    ln -s "../../../$pci" "$card/device"
    echo 0x1d0f >"$device/vendor"
    echo 0xefa3 >"$device/device"
    echo '1: unspecified' >"$card/node_type"
    echo '4: ACTIVE' >"$card/ports/1/state"
    echo "rdmap${n}s0" >"$device/infiniband_verbs/uverbs$n/ibdev"
    echo 1 >"$device/infiniband_verbs/uverbs$n/abi_version"
    ln -s "../../../$pci" "$device/infiniband_verbs/uverbs$n/device"
    ln -s "../../devices/pci0000:00/$pci/infiniband/rdmap${n}s0" "$sys/class/infiniband/rdmap${n}s0"
    ln -s "../../devices/pci0000:00/$pci/infiniband_verbs/uverbs$n" "$sys/class/infiniband_verbs/uverbs$n"
    n=$((n + 1))
done
