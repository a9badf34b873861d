#!/usr/bin/env bash
# Stock Debian guests with devices behind the ring IOMMU, driven by the module riommu in kmod/: see
# docs/RIOMMU-DEVICE.md and README.md.
#
#   tests/guest/riommu.sh                        build, boot all cases, a line each; exit code 0/1
#   tests/guest/riommu.sh errant                 only the cases whose names begin so
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

behind() { limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" --module-source "$repo/kmod" --iommu riommu "$@"; }

# counter RING/NAME [DEVICE]: a counter of the module, as the guest printed it last.
counter() { sed -n "s#^.*/${2:-0000:00:04.0}/$1:\([0-9]*\)\r*\$#\1#p" "$log" | tail -n 1; }
# holds RING/NAME OP NUMBER [DEVICE]: compares a counter, and prints a failed comparison.
holds() {
    local value
    value=$(counter "$1" ${4:-})
    [[ $value ]] && [ "$value" "$2" "$3" ] && return
    echo "$1 is ${value:-not there}, not $2 $3"
    return 1
}
# sound: no map found a ring full, and no unmap was of what is not mapped.
sound() {
    local ring
    for ring in read write both; do
        holds $ring/full -eq 0 "$@" && holds $ring/bad -eq 0 "$@" || return 1
    done
}

# Makes a file system, writes, and compares checksums after a remount. Then unloads the module: the
# disk has no driver, and works again after the module is loaded.
readonly FILES='set -e
mke2fs /dev/vda >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/vda /m
dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo same
dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null
grep -r . /sys/kernel/debug/riommu
rmmod riommu; [ ! -e /dev/vda ]; [ ! -e /sys/bus/pci/devices/0000:00:04.0/driver ]; echo unloaded
insmod /modules/riommu.ko; echo 0000:00:04.0 >/sys/bus/pci/drivers/virtio-pci/bind
while [ ! -b /dev/vda ]; do usleep 100000; done
mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo again'
files() {
    behind "$@" --metrics -- sh -c "$FILES$MASTER" || return 1
    said '^same' && said '^unloaded' && said '^again' && said '^mastered' && said 'ringfence_faults_total{device="riommu"} 0' &&
        holds read/maps -gt 1000 && holds write/maps -gt 1000 && sound || return 1
    # Each unmap is one invalidation, and none is left.
    [[ $(counter write/maps) == $(counter write/unmaps) && $(counter write/unmaps) == $(counter write/invalidations) ]] || return 1
    echo "$(counter read/maps) and $(counter write/maps) maps" >"$case/note"
}

# Errant accesses of the disk are stopped, and the guest's own log names device, address and access.
readonly READS='for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; usleep 500000; dmesg'
errant() {
    behind "$@" --inject-dma stray:dead0000,after-unmap,write-read-only,read-write-only --metrics -- \
        sh -c "$READS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class access at
    for class in stray after-unmap write-read-only read-write-only; do
        access=write
        [[ $class != read-write-only ]] || access=read
        at=$(sed -n "s/^ringfence: blk: injected $access ($class) at \(0x[0-9a-f]*\): stopped\$/\1/p" "$log")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        said "0000:00:04.0 was stopped: a $access at $at" || return 1
    done
    said 'ringfence_faults_total{device="riommu"} 4' && said 'ringfence_injected_permitted_total{device="blk"} 0'
}

# A device faults as fast as it can: the guest continues, and its log is not flooded. While a read
# waits for the disk, whose thread causes the storm, the guest counts sleeps of 10 ms. Then it
# prints the number of faults that it has handled, and the time in hundredths of a second.
readonly STORMED='now() { read up _ </proc/uptime; echo ${up%.*}${up#*.}; }
faults() { cat /sys/kernel/debug/riommu/*/faults; }
from=$(now); before=$(faults); naps=0; dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null &
while kill -0 $! 2>/dev/null; do usleep 10000; naps=$((naps + 1)); done
echo "storm: $(($(faults) - before)) faults, $naps naps, $(($(now) - from)) hundredths, $(dmesg | grep -c "was stopped") lines"'
stormed() {
    local seen naps hundredths lines faults
    behind "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$STORMED" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(sed -n 's/^ringfence_faults_total{device="riommu"} \([0-9]*\)$/\1/p' "$log")
    read -r seen naps hundredths lines <<<"$(sed -n 's/^storm: \([0-9]*\) faults, \([0-9]*\) naps, \([0-9]*\) hundredths, \([0-9]*\) lines.*/\1 \2 \3 \4/p' "$log")"
    echo "$faults faults in $hundredths hundredths of a second: $seen looked at, $lines lines logged, $naps naps" >"$case/note"
    # At most 64 faults in 10 ms, and 10 lines in 5 s.
    ((faults >= 1000000 && hundredths > 0 && naps * 10 >= hundredths && seen <= 64 * hundredths + 128 && lines <= 10 + hundredths / 50))
}

# The disk is removed from the guest's bus while it works, and is added again: it is behind the
# module as before, and its counters continue.
readonly REPLUGGED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync; dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
for n in 1 2 3; do
    dd if=/dev/vda of=/dev/null bs=4k count=100000 iflag=direct 2>/dev/null & usleep 300000
    echo 1 >/sys/bus/pci/devices/0000:00:04.0/remove; wait; [ ! -e /dev/vda ]
    echo 1 >/sys/bus/pci/rescan
    while [ ! -b /dev/vda ]; do usleep 100000; done
done
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum | cmp - /tmp/before; echo same
grep -r . /sys/kernel/debug/riommu; dmesg | grep -i "already present\|not mapped" || echo clean
rmmod riommu; echo unloaded'
replugged() {
    behind "$@" --metrics -- sh -c "$REPLUGGED" || return 1
    said '^same' && said '^clean' && said '^unloaded' && said 'ringfence_faults_total{device="riommu"} 0' && sound
}

# A resume would reset the IOMMU: the module refuses the suspend, and the guest continues.
readonly SUSPENDED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync; dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
echo devices >/sys/power/pm_test
if echo freeze >/sys/power/state; then echo slept; fi 2>/dev/null
dmesg | grep "cannot be suspended"
dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null | md5sum | cmp - /tmp/before; echo same'
suspended() {
    behind "$@" -- sh -c "$SUSPENDED" && said 'cannot be suspended' && ! said '^slept' && said '^same'
}

# Rings with few slots, and requests of at most 16 pages: maps fail until unmaps free slots, the
# driver retries, and all data is correct.
full() {
    local few=${FILES/count=200/count=40}
    behind --module-args "slots=24" "$@" --metrics -- sh -c "echo 64 >/sys/block/vda/queue/max_sectors_kb; ${few/count=1000/count=100}" || return 1
    said '^same' && said '^again' && said 'ringfence_faults_total{device="riommu"} 0' && holds read/bad -eq 0 && holds write/bad -eq 0 || return 1
    (($(counter read/full) + $(counter write/full) > 10)) || return 1
    echo "$(counter read/full) and $(counter write/full) maps found the ring full" >"$case/note"
}

# Transfers data between two guests through the rings.
network() {
    talk riommu 'grep -r . /sys/kernel/debug/riommu' -- behind "$@" &&
        holds read/maps -gt 1000 0000:00:05.0 && sound 0000:00:05.0
}

choose_kernels --iommu riommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files: $kernel" files --kernel "$kernel"
    try "files: $kernel, two processors" files --kernel "$kernel" --cpus 2
    try "errant DMAs stopped and named: $kernel" errant --kernel "$kernel"
    try "replugged while it works: $kernel" replugged --kernel "$kernel"
    try "suspended is refused: $kernel" suspended --kernel "$kernel"
    try "full: $kernel" full --kernel "$kernel"
    try "stormed: $kernel" stormed --kernel "$kernel"
    try "network between guests: $kernel" network --kernel "$kernel"
done
all_passed
