#!/bin/sh
# Links libibverbs.so.1, libefa.so.1 and their development symlinks: emulators/soft-verbs/link.sh libsoft_verbs.a DIRECTORY
# Also writes the sysfs files that programs read about the cards, into DIRECTORY/sysfs.
set -eu
archive=$1
out=$2
here=$(dirname "$0")
cards=64

mkdir -p "$out"
# nodelete: programs unload the library while the card's thread still runs its code.
${CC:-cc} -shared -o "$out/libibverbs.so.1" -Wl,-soname,libibverbs.so.1 -Wl,-z,nodelete,-z,defs,--gc-sections \
    -Wl,--version-script="$here/symbols.map" -Wl,--whole-archive "$archive" -Wl,--no-whole-archive -lgcc_s -lpthread -ldl -lm -lc
ln -sf libibverbs.so.1 "$out/libefa.so.1"
# Found by -libverbs, and by dlopen with the short name.
ln -sf libibverbs.so.1 "$out/libibverbs.so"
ln -sf libefa.so.1 "$out/libefa.so"

sys=$out/sysfs
rm -rf "$sys"
mkdir -p "$sys/class/infiniband" "$sys/class/infiniband_verbs" "$sys/class/pci_bus" "$sys/bus/pci/drivers/efa" "$sys/bus/pci/devices"
echo 6 >"$sys/class/infiniband_verbs/abi_version"
n=0
while [ $n -lt $cards ]; do
    address=$(printf '0000:%02x:00.0' $((n + 16)))
    pci=$sys/devices/pci0000:00/$address
    bus=$(printf '0000:%02x' $((n + 16)))
    card=$pci/infiniband/rdmap${n}s0
    verbs=$pci/infiniband_verbs/uverbs$n
    mkdir -p "$card/ports/1/gids" "$card/ports/1/hw_counters" "$verbs"
    ln -s "../../../bus/pci/drivers/efa" "$pci/driver"
    # Programs take the PCI address from the name of the symlink's target.
    ln -s "../../../$address" "$card/device"
    ln -s "../../../$address" "$verbs/device"
    ln -s "../../../devices/pci0000:00/$address" "$sys/bus/pci/devices/$address"
    echo 0x1d0f | tee "$pci/vendor" >"$pci/subsystem_vendor"
    echo 0xefa3 | tee "$pci/device" >"$pci/subsystem_device"
    echo 0x020000 >"$pci/class"
    echo 0x00 >"$pci/revision"
    echo 8.0 GT/s PCIe | tee "$pci/current_link_speed" >"$pci/max_link_speed"
    echo 16 | tee "$pci/current_link_width" >"$pci/max_link_width"
    # `ferrogin verbs` fills this in, since it knows the machine.
    echo -1 >"$pci/numa_node"
    # Each BAR's first address, last address and flags. The card needs none of the six BARs, and no ROM.
    zero=0x0000000000000000
    for _ in 0 1 2 3 4 5 6; do echo $zero $zero $zero; done >"$pci/resource"
    # Configuration space: ids, command and status, class; subsystem ids at 0x2c; at 0x34 the offset of the PCI Express capability, which
    # holds the link's speed and width (8 GT/s, 16 lanes) at 0x4c and 0x52.
    {
        printf '\017\035\243\357\006\004\020\000\000\000\000\002'
        head -c 32 /dev/zero
        printf '\017\035\243\357\000\000\000\000\100'
        head -c 11 /dev/zero
        printf '\020\000\002\000\000\000\000\000\000\000\000\000\003\001\000\000\000\000\003\001'
        head -c 172 /dev/zero
    } >"$pci/config"
    echo '1: unspecified' >"$card/node_type"
    # `ferrogin verbs` fills in the first one, which identifies the host.
    echo 0000:0000:0000:0000 | tee "$card/node_guid" >"$card/sys_image_guid"
    echo "softefa$n" >"$card/node_desc"
    # Programs find a card's directory two above its bus.
    mkdir -p "$sys/devices/pci0000:00/pci_bus/$bus"
    ln -s "../../devices/pci0000:00/pci_bus/$bus" "$sys/class/pci_bus/$bus"
    echo '4: ACTIVE' >"$card/ports/1/state"
    echo "rdmap${n}s0" >"$verbs/ibdev"
    echo 1 >"$verbs/abi_version"
    ln -s "../../devices/pci0000:00/$address/infiniband/rdmap${n}s0" "$sys/class/infiniband/rdmap${n}s0"
    ln -s "../../devices/pci0000:00/$address/infiniband_verbs/uverbs$n" "$sys/class/infiniband_verbs/uverbs$n"
    n=$((n + 1))
done
