#!/usr/bin/env bash
# Stock Debian guests with an NVMe disk that `ringfence` serves, behind each of its IOMMUs: see
# docs/GUEST.md and README.md.
#
#   tests/guest/nvme.sh             build, run all cases, print a line each; exit code 0/1
#   tests/guest/nvme.sh errant      run only the cases whose names begin with this
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

run() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" \
        --module-source "$repo/kmod" --check-kernel-log "$@"
}
# boot_guest IOMMU OPTION...: boots a guest whose disk has an NVMe interface.
boot_guest() {
    local iommu=$1
    shift
    run --iommu "$iommu" --disk bus=nvme "$@"
}
# fault_counter IOMMU: prints the device of the counter of stopped accesses.
fault_counter() { case $1 in virtio) echo iommu ;; *) echo "$1" ;; esac; }

# Makes a file system, writes on two CPUs at the same time, and compares checksums after a remount.
# Each CPU has a queue pair, and takes the interrupts of this pair.
readonly FILES='set -e
mke2fs /dev/nvme0n1 >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/nvme0n1 /m
for cpu in 0 1; do
    taskset $((1 << cpu)) dd if=/dev/urandom of=/m/$cpu bs=64k count=160 conv=fsync 2>/dev/null &
done; wait; md5sum /m/0 /m/1 >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/nvme0n1 /m
md5sum /m/0 /m/1 | cmp - /tmp/before; umount /m; echo same
dd if=/dev/nvme0n1 of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null
dd if=/dev/nvme0n1 of=/dev/null bs=1M count=16 iflag=direct 2>/dev/null
for queue in 0 1 2; do
    awk -v name="nvme0q$queue" "\$NF == name { print \"queue\", name, \$2 + \$3 }" /proc/interrupts
done; dmesg | grep -i "nvme.*\(abort\|timeout\|fail\|reset\)" || echo quiet'
files() {
    local iommu=$1
    boot_guest "$@" --cpus 2 --metrics -- sh -c "$FILES" || return 1
    log_has '^same' && log_has '^quiet' &&
        log_has 'ringfence_failed_total{device="blk"} 0' || return 1
    [[ $iommu == none ]] ||
        log_has "ringfence_faults_total{device=\"$(fault_counter "$iommu")\"} 0" || return 1
    local queue count text=
    for queue in 0 1 2; do
        count=$(sed -n "s/^queue nvme0q$queue \([0-9]*\)\r*\$/\1/p" "$log")
        ((count > 0)) || { echo "queue $queue raised no interrupts"; return 1; }
        text+="${text:+, }$count"
    done
    echo "interrupts of the queues: $text" >"$case/note"
}

# The IOMMU stops errant accesses of the disk. The guest's own log names device, address and access.
# The write gives the disk a buffer that it may only read.
readonly READS=$LOGGED'for n in 1 2 3; do
    dd if=/dev/nvme0n1 of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/nvme0n1 of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
    dd if=/dev/zero of=/dev/nvme0n1 bs=4k count=2 oflag=direct 2>/dev/null
done; logged 4 "was stopped\|page fault from EP"'
# named IOMMU CLASS ACCESS: succeeds if the access was tried and stopped, and the guest logs it.
named() {
    local at letter=W
    [[ $3 == write ]] || letter=R
    at=$(stopped_at "$3" "$2")
    [[ $at ]] || { echo "not tried or not stopped: $2"; return 1; }
    case $1 in
    virtio) log_has "page fault from EP 32 at $at \[$letter\]" ;;
    *) log_has "0000:00:04.0 was stopped: a $3 at $at" ;;
    esac
}
errant() {
    local iommu=$1
    local classes=stray:dead0000,after-unmap,write-read-only,read-write-only
    boot_guest "$@" --inject-dma "$classes" --metrics -- \
        sh -c "$READS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    named "$iommu" stray write && named "$iommu" after-unmap write &&
        named "$iommu" write-read-only write && named "$iommu" read-write-only read || return 1
    log_has "ringfence_faults_total{device=\"$(fault_counter "$iommu")\"} 4" &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0'
}

# The guest resets the controller while it works, unbinds and binds the driver, and removes and adds
# the device. All reads return the same data.
readonly RESETS='set -e
device=/sys/bus/pci/devices/0000:00:04.0
dd if=/dev/urandom of=/dev/nvme0n1 bs=64k count=64 2>/dev/null; sync
look() { dd if=/dev/nvme0n1 bs=64k count=64 iflag=direct 2>/dev/null | md5sum; }
ready() { until [ -b /dev/nvme0n1 ]; do usleep 100000; done; }
look >/before
for n in 1 2 3; do
    look >/after & reader=$!; usleep 20000
    echo 1 >/sys/class/nvme/nvme0/reset_controller; wait $reader; cmp /before /after
done; echo reset
for n in 1 2; do
    echo 0000:00:04.0 >/sys/bus/pci/drivers/nvme/unbind; [ ! -e /dev/nvme0n1 ]
    echo 0000:00:04.0 >/sys/bus/pci/drivers/nvme/bind; ready; look | cmp - /before
done; echo bound
echo 1 >$device/remove; [ ! -e $device ]; echo 1 >/sys/bus/pci/rescan; ready
look | cmp - /before; echo added'
resets() {
    local iommu=$1
    boot_guest "$@" --cpus 2 --metrics -- sh -c "$RESETS" || return 1
    log_has '^reset' && log_has '^bound' && log_has '^added' || return 1
    [[ $iommu == none ]] ||
        log_has "ringfence_faults_total{device=\"$(fault_counter "$iommu")\"} 0"
}

choose_kernels --iommu riommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    for iommu in none virtio pviommu riommu; do
        try "files: $kernel, $iommu" files $iommu --kernel "$kernel"
        try "resets: $kernel, $iommu" resets $iommu --kernel "$kernel"
        [[ $iommu == none ]] ||
            try "errant accesses are stopped and logged: $kernel, $iommu" \
                errant $iommu --kernel "$kernel"
    done
done
all_passed
