#!/usr/bin/env bash
# Stock Debian guests whose devices QEMU emulates behind its own IOMMUs. The module pooldma in kmod/
# gives these devices shadow buffers: see kmod/README.md and README.md.
#
#   tests/guest/pooldma.sh          build, run all cases, print a line each; exit code 0/1
#   tests/guest/pooldma.sh full     run only the cases whose names begin with this
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# The module maps a pool as a whole, with the coherent memory in it. The debug kernel's check of the
# DMA API reports this as two mappings of a cache line, which matters only if caches are not
# coherent. It also reports the mapping that the driver of the case `reached` leaves.
[[ " ${GUEST_KERNELS:-} " != *" debug "* ]] || append+=' dma_debug=off'

# QEMU's devices: a second virtio disk, an NVMe disk, and the educational device.
readonly VIRTIO=0000:00:06.0 NVME=0000:00:07.0 EDU=0000:00:0a.0
# disks [DRIVE-OPTIONS]: prints QEMU's options for the disks.
disks() {
    local virtio=virtio-blk-pci,drive=v,disable-legacy=on,iommu_platform=on,addr=6.0
    truncate -s 64M "$case/virtio" "$case/nvme"
    echo "-drive if=none,id=v,format=raw,file=$case/virtio${1:-} -device $virtio" \
        "-drive if=none,id=n,format=raw,file=$case/nvme${1:-}" \
        "-device nvme,drive=n,serial=n,addr=7.0"
}
# Prints QEMU's options for two network cards. The address 10.0.2.100:80 of the user network sends a
# file, and 10.0.2.100:9 receives one.
cards() {
    local kind give="guestfwd=tcp:10.0.2.100:80-cmd:$case/give"
    local take="guestfwd=tcp:10.0.2.100:9-cmd:$case/take"
    head -c 4000000 /dev/urandom >"$case/data"
    printf '#!/bin/sh\nexec cat %s\n' "$case/data" >"$case/give"
    for kind in e1000e virtio; do
        printf '#!/bin/sh\nexec cat >%s\n' "$case/$kind" >"$case/take-$kind"
    done
    chmod +x "$case/give" "$case"/take-*
    echo "-netdev user,id=e,$give,$take-e1000e -device e1000e,netdev=e,addr=8.0" \
        "-netdev user,id=w,$give,$take-virtio" \
        "-device virtio-net-pci,netdev=w,disable-legacy=on,iommu_platform=on,addr=9.0"
}
# pooled IOMMU PARAMETERS DEVICES OPTION...: boots a guest in which each device has a pool.
pooled() {
    local iommu=$1 parameters=$2 devices=$3
    shift 3
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" \
        --module-source "$repo/kmod" --check-kernel-log --iommu "$iommu" --module pooldma \
        --module-args "devices=all $parameters" --with-module dma_probe \
        --driver nvme --driver e1000e --qemu-args="$devices" "$@"
}

# counter ADDRESS NAME: prints a counter of a pool, the last one of the guest's output.
counter() { sed -n "s#^.*/$1:$2 \([0-9]*\)\r*\$#\1#p" "$log" | tail -n 1; }
# holds ADDRESS NAME OP NUMBER: compares a counter, and prints a failed comparison.
holds() {
    local value
    value=$(counter "$1" "$2")
    [[ $value ]] && [ "$value" "$3" "$4" ] && return
    echo "$2 of $1 is ${value:-missing}, not $3 $4"
    return 1
}
readonly COUNTERS='grep . /sys/kernel/debug/pooldma/*
dmesg | grep -i "dmar.*fault\|not mapped\|call trace" || echo clean'

# Makes a file system on each disk, and compares checksums after a remount. The kernel refuses to
# unload the module while drivers are bound. Without the module the disks have the same data.
readonly FILES='set -e
for d in vdb nvme0n1; do
    mke2fs /dev/$d >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/$d /m
    dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/$d; umount /m
    echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/$d /m; md5sum /m/f | cmp - /$d; umount /m
    echo same $d
    dd if=/dev/$d of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null
done
'$COUNTERS'
! rmmod pooldma 2>/dev/null; echo refused
for d in 4 6 7; do echo 0000:00:0$d.0 >/sys/bus/pci/devices/0000:00:0$d.0/driver/unbind; done
n=0; until rmmod pooldma 2>/dev/null; do n=$((n + 1)); [ $n -lt 50 ]; usleep 100000; done
echo unloaded
bind() {
    for d in 4 6; do echo 0000:00:0$d.0 >/sys/bus/pci/drivers/virtio-pci/bind; done
    echo 0000:00:07.0 >/sys/bus/pci/drivers/nvme/bind
}
bind; while [ ! -b /dev/vdb ] || [ ! -b /dev/nvme0n1 ]; do usleep 100000; done
for d in vdb nvme0n1; do mount -t ext4 /dev/$d /m; md5sum /m/f | cmp - /$d; umount /m; done
echo native
insmod /modules/pooldma.ko devices=all
while [ ! -b /dev/vdb ] || [ ! -b /dev/nvme0n1 ]; do usleep 100000; done
for d in vdb nvme0n1; do mount -t ext4 /dev/$d /m; md5sum /m/f | cmp - /$d; umount /m; done
echo again'
files() {
    local iommu=$1
    shift
    pooled "$iommu" "" "$(disks)" "$@" -- sh -c "$FILES" || return 1
    log_has '^same vdb' && log_has '^same nvme0n1' && log_has '^clean' && log_has '^refused' &&
        log_has '^unloaded' && log_has '^native' && log_has '^again' || return 1
    for device in $VIRTIO $NVME; do
        holds $device maps -gt 1000 && holds $device bad -eq 0 && holds $device full -eq 0 ||
            return 1
    done
    echo "$(counter $VIRTIO maps) and $(counter $NVME maps) maps" >"$case/note"
}

# A device with 28 address bits tries what it reaches. Its driver leaves a mapping, so the module
# stays. The last unmap copies the data, also after the device was removed from its bus.
readonly REACHED='insmod /modules/dma_probe.ko; device=/sys/bus/pci/devices/'$EDU'
'$COUNTERS'
echo '$EDU' >$device/driver/unbind; echo '$EDU' >/sys/bus/pci/drivers/dma_probe/bind && echo wrong
[ ! "$REMOVED" ] || echo 1 >$device/remove
for d in 4; do echo 0000:00:0$d.0 >/sys/bus/pci/devices/0000:00:0$d.0/driver/unbind; done
rmmod pooldma 2>/dev/null || echo refused
rmmod dma_probe; dmesg | grep "dma_probe: \|pooldma: \|call trace"
n=0; until rmmod pooldma 2>/dev/null; do n=$((n + 1)); [ $n -lt 50 ] || exit 1; usleep 100000; done
echo unloaded'
reached() {
    local removed=$1
    shift
    pooled qemu-intel "" "-device edu,addr=a.0" "$@" -- \
        sh -c "REMOVED=$removed; $REACHED" || return 1
    [[ $(grep -c 'dma_probe: .*: ok' "$log") -ge 18 ]] &&
        ! grep 'dma_probe: .*FAIL' "$log" && log_has 'a mapping outlives its driver: ok' &&
        log_has '^refused' && log_has 'has left 1 mappings' && log_has '^unloaded' &&
        log_has '^clean' && holds $EDU bytes -gt 0 && holds $EDU live -eq 1
}

# The guest removes a disk while it works, and adds it again.
readonly REPLUGGED='set -e
dd if=/dev/urandom of=/dev/vdb bs=64k count=16 2>/dev/null; sync
dd if=/dev/vdb bs=64k count=16 2>/dev/null | md5sum >/tmp/before
for n in 1 2 3; do
    dd if=/dev/vdb of=/dev/null bs=4k count=100000 iflag=direct 2>/dev/null & usleep 300000
    echo 1 >/sys/bus/pci/devices/'$VIRTIO'/remove; wait; [ ! -e /dev/vdb ]
    echo 1 >/sys/bus/pci/rescan; while [ ! -b /dev/vdb ]; do usleep 100000; done
done
dd if=/dev/vdb bs=64k count=16 2>/dev/null | md5sum | cmp - /tmp/before; echo same
'$COUNTERS'; dmesg | grep -i "already present" || echo one'
replugged() {
    pooled qemu-intel "" "$(disks)" "$@" -- sh -c "$REPLUGGED" || return 1
    log_has '^same' && log_has '^clean' && log_has '^one' &&
        holds $VIRTIO maps -gt 0 && holds $VIRTIO bad -eq 0
}

# Pools of 8 MiB. The disks are slow, so that reads need more than a pool at once, even in a guest
# that gets little CPU time. Maps fail, drivers retry, and all data is correct.
readonly FULL='set -e
dd if=/dev/urandom of=/data bs=1M count=4 2>/dev/null; md5sum </data >/sum
for d in vdb nvme0n1; do dd if=/data of=/dev/$d bs=1M oflag=direct 2>/dev/null; done
for n in $(seq 3); do
    for d in vdb nvme0n1; do
        dd if=/dev/$d bs=4M count=1 iflag=direct 2>/dev/null | md5sum | cmp - /sum &
        jobs="$jobs $!"
    done
done
for job in $jobs; do wait $job; done; echo same
'$COUNTERS
full() {
    pooled qemu-intel mib=8 "$(disks ,throttling.iops-total=4)" "$@" -- sh -c "$FULL" || return 1
    log_has '^same' && log_has '^clean' &&
        holds $VIRTIO bad -eq 0 && holds $NVME bad -eq 0 || return 1
    (($(counter $VIRTIO full) + $(counter $NVME full) > 0)) ||
        { echo "no map found a pool full"; return 1; }
    echo "$(counter $VIRTIO full) and $(counter $NVME full) maps found the pools full" >"$case/note"
}

# Transfers data in both directions over both cards, one after the other.
readonly NETWORK='set -e
for card in /sys/class/net/eth*; do
    name=${card##*/}; driver=$(readlink -f $card/device/driver); driver=${driver##*/}
    ip link set $name up
    while [ "$(cat $card/carrier)" != 1 ]; do usleep 100000; done
    ip addr add 10.0.2.15/24 dev $name; echo given $driver $(nc 10.0.2.100 80 </dev/null | md5sum)
    dd if=/dev/urandom of=/mine bs=64k count=16 2>/dev/null; echo taken $driver $(md5sum </mine)
    timeout 20 nc 10.0.2.100 9 </mine || true; usleep 500000
    ip addr del 10.0.2.15/24 dev $name; ip link set $name down
done
'$COUNTERS
network() {
    local driver sum
    pooled qemu-intel "" "$(cards)" "$@" -- sh -c "$NETWORK" || return 1
    sum=$(md5sum <"$case/data")
    for driver in e1000e virtio; do
        log_has "^given ${driver/virtio/virtio_net} ${sum%% *}" || return 1
        sum_taken=$(md5sum <"$case/$driver")
        log_has "^taken ${driver/virtio/virtio_net} ${sum_taken%% *}" || return 1
    done
    for device in 0000:00:08.0 0000:00:09.0; do
        holds $device maps -gt 500 && holds $device bad -eq 0 || return 1
    done
    log_has '^clean'
}

choose_kernels --module pooldma --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files, VT-d: $kernel" files qemu-intel --kernel "$kernel"
    try "files, VT-d, lazy, two CPUs: $kernel" files qemu-intel --lazy --cpus 2 --kernel "$kernel"
    try "files, virtio-iommu: $kernel" files qemu-virtio --kernel "$kernel"
    try "reached: $kernel" reached "" --kernel "$kernel"
    try "reached, unplugged: $kernel" reached 1 --kernel "$kernel"
    try "replugged while the disk works: $kernel" replugged --kernel "$kernel"
    try "full: $kernel" full --kernel "$kernel"
    try "network: $kernel" network --cpus 2 --kernel "$kernel"
done
all_passed
