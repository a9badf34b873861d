#!/bin/busybox sh
# The only process of a guest behind an IOMMU. It uses every device, leaves the trace since boot on
# the disk `results`, which does not use the IOMMU, prints `ready`, and keeps its mappings.
#
# A line `FAIL WHY` on the console reports that a device was not used.

/bin/busybox --install -s /bin
export PATH=/bin
T=/sys/kernel/tracing
# The devices behind the IOMMU.
DEVICES="0000:00:04.0 0000:00:05.0 0000:00:06.0 0000:00:07.0 0000:00:08.0"
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tracefs tracefs $T

fail() { echo "FAIL $*"; }
# try SECONDS CONDITION...: waits for a device, which appears a little after its driver.
try() {
    local left=$(($1 * 20))
    shift
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        usleep 50000
    done
}
# Prints the virtio disk with this serial number.
disk() {
    for one in /sys/block/vd*; do
        [ "$(cat "$one/serial" 2>/dev/null)" = "$1" ] && echo "/dev/${one##*/}"
    done
}
has_disk() { [ -b "$(disk "$1")" ]; }
# Reads with small and with large requests, and writes.
use_disk() {
    dd if="$1" of=/dev/null bs=4k count=60 iflag=direct 2>/dev/null &&
        dd if="$1" of=/dev/null bs=256k skip=4 count=8 iflag=direct 2>/dev/null &&
        dd if=/dev/zero of="$1" bs=64k count=8 conv=fsync 2>/dev/null || fail "$1"
}
# The networks of the cards are separate and have the same addresses, so only one card has an
# address at a time. The card stays up without it.
use_card() {
    local card="$1"
    ip link set "$card" up
    try 20 grep -q 1 "/sys/class/net/$card/carrier" || fail "$card: no carrier"
    ip addr add 10.0.2.15/24 dev "$card"
    ping -c 5 -i 0.1 -s 1400 -W 5 10.0.2.2 >/dev/null || fail "$card: no answer"
    ip addr del 10.0.2.15/24 dev "$card"
}
# Records with the command while the guest reads the NVMe disk. Another instance of the tracer
# records the same events. Both results go to the disk `results`, at these offsets in MiB.
RECORDING=16
CONTROL=24
record() {
    local i=$T/instances/control event
    mkdir $i
    for event in dma iommu/map iommu/unmap; do echo 1 >$i/events/$event/enable; done
    ringfence trace record --buffer 8 -o /tmp/recording -- \
        dd if=/dev/nvme0n1 of=/dev/null bs=4k count=100 iflag=direct ||
        fail "the command does not record"
    for event in dma iommu/map iommu/unmap; do echo 0 >$i/events/$event/enable; done
    save $i/trace $CONTROL
    rmdir $i
    ringfence trace info /tmp/recording
    save /tmp/recording $RECORDING
}
save() {
    dd if="$1" of="$(disk results)" bs=1M seek="$2" conv=fsync 2>/dev/null ||
        fail "$1 is not saved"
}
events() { wc -l <$T/trace; }
# Succeeds if no event happened in half a second. The kernel's deferred work then has ended.
quiet() {
    local before
    before=$(events)
    usleep 500000
    [ "$before" = "$(events)" ]
}

# Kernels without a DMA layer for IOMMUs write no tables. On these kernels a module maps pages for
# the devices after their drivers have released them: pages to read, to write, and for both. Marks
# in the trace name device and permissions.
map_pages() {
    local device permissions
    insmod /modules/map_pages.ko || fail "map_pages does not load"
    for device in $DEVICES; do
        echo "$device" >"/sys/bus/pci/devices/$device/driver/unbind" || fail "$device: unbind"
        for permissions in 1 2 3; do
            echo "$device $permissions" >$T/trace_marker
            echo "$device $permissions" >/sys/module/map_pages/parameters/device ||
                fail "$device: no pages mapped"
        done
    done
    dmesg | grep 'map_pages: '
}

while read -r module; do
    insmod "/modules/$module.ko" || fail "$module does not load"
done </modules/order
echo "kernel $(uname -r)"
try 20 [ -b /dev/nvme0n1 ] || fail "no NVMe disk"
try 20 has_disk workload || fail "no virtio disk"
try 20 has_disk results || fail "no disk for results"
try 20 [ -b /dev/sda ] || fail "no SATA disk"
use_disk /dev/nvme0n1
use_disk "$(disk workload)"
use_disk /dev/sda
cards=0
for card in /sys/class/net/eth*; do
    use_card "${card##*/}"
    cards=$((cards + 1))
done
[ $cards = 2 ] || fail "$cards network cards"
[ ! -x /bin/ringfence ] || record
for group in /sys/kernel/iommu_groups/*; do
    echo "group $(cat "$group/type")" "$group"/devices/*
done
[ ! -e /modules/map_pages.ko ] || map_pages
try 30 quiet || fail "the devices do not become idle"
grep -q "entries-in-buffer" $T/trace && sed -n 's/^# \(entries-in.*\)/\1/p' $T/trace
dd if=$T/trace of="$(disk results)" bs=64k conv=fsync 2>/dev/null || fail "the trace is not saved"
echo ready
while :; do sleep 1000; done
