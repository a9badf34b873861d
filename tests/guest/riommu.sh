#!/usr/bin/env bash
# Stock Debian guests with devices behind the ring IOMMU, driven by the module riommu in kmod/: see
# docs/RIOMMU-DEVICE.md and README.md.
#
#   tests/guest/riommu.sh                        build, boot all cases, a line each; exit code 0/1
#   tests/guest/riommu.sh errant                 only the cases whose names begin so
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# A case whose kernel crashes on purpose clears it.
log_check=--check-kernel-log
behind() { limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" --module-source "$repo/kmod" $log_check --iommu riommu "$@"; }

# in_mode MODE OPTION...: behind the module in this mode, with other parameters behind it. The mode
# burst-paper is of another module.
in_mode() {
    local mode=$1
    shift
    [[ ${mode%% *} != burst-paper ]] || set -- --as-published "$@"
    behind --module-args "mode=$mode" "$@"
}

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
# metric NAME: a counter of the disk, as the daemon printed it.
metric() { sed -n "s/^ringfence_$1_total{device=\"blk\"} \([0-9]*\)\$/\1/p" "$log"; }
# per_unmap [DEVICE]: invalidations per 1000 unmaps of the three rings, rounded up.
per_unmap() {
    local ring unmaps=0 invalidations=0
    for ring in read write both; do
        unmaps=$((unmaps + $(counter $ring/unmaps "$@")))
        invalidations=$((invalidations + $(counter $ring/invalidations "$@")))
    done
    echo $(((invalidations * 1000 + unmaps - 1) / unmaps))
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
rmmod MODULE; [ ! -e /dev/vda ]; [ ! -e /sys/bus/pci/devices/0000:00:04.0/driver ]; echo unloaded
insmod /modules/MODULE.ko mode=MODE; echo 0000:00:04.0 >/sys/bus/pci/drivers/virtio-pci/bind
while [ ! -b /dev/vda ]; do usleep 100000; done
mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo again'
# of_mode MODE SCRIPT: prints the script with the names of the mode and its module.
of_mode() {
    local module=riommu script=$2
    [[ $1 != burst-paper ]] || module=riommu-as-published
    script=${script//rmmod MODULE/rmmod ${module//-/_}}
    script=${script//MODULE/$module}
    printf '%s\n' "${script//MODE/$1}"
}
# files MODE OPTION...
files() {
    local mode=$1
    shift
    in_mode "$mode" "$@" --metrics -- sh -c "$(of_mode "$mode" "$FILES")$MASTER" || return 1
    said '^same' && said '^unloaded' && said '^again' && said '^mastered' && said 'ringfence_faults_total{device="riommu"} 0' &&
        holds read/maps -gt 1000 && holds write/maps -gt 1000 && sound || return 1
    # An unmap, of a buffer or of a list, is at most one invalidation, and no buffer is left mapped.
    [[ $(counter write/maps) == $(counter write/unmaps) ]] && holds write/invalidations -gt 0 &&
        holds write/invalidations -le "$(counter write/unmaps)" || return 1
    case $mode in
    strict) holds write/invalidations -gt 1000 && holds write/deferred -eq 0 && holds read/deferred -eq 0 || return 1 ;;
    burst) holds write/deferred -gt 0 && holds write/held -gt 0 && holds read/shadows -gt 0 || return 1 ;;
    burst-paper) holds write/deferred -gt 0 && holds write/held -eq 0 || return 1 ;;
    esac
    echo "$(counter read/maps) and $(counter write/maps) maps, $(per_unmap) invalidations per 1000 unmaps" >"$case/note"
}

# Errant accesses of the disk are stopped, and the guest's own log names device, address and access.
# In a burst, the access to an unmapped buffer can come before the invalidation. The IOMMU may permit
# it by its copy of the cleared slot, and by nothing else. The device then reaches a page that the burst
# holds, or a shadow: the driver defers no other unmap.
readonly READS=$LOGGED'for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; logged 4 "was stopped"; grep -r . /sys/kernel/debug/riommu'
errant() {
    local mode=$1 permitted=0
    shift
    in_mode "$mode" "$@" --inject-dma stray:dead0000,after-unmap,write-read-only,read-write-only --metrics -- \
        sh -c "$READS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class access at ring
    for class in stray after-unmap write-read-only read-write-only; do
        access=write
        [[ $class != read-write-only ]] || access=read
        at=$(sed -n "s/^ringfence: blk: injected $access ($class) at \(0x[0-9a-f]*\): stopped\$/\1/p" "$log")
        if [[ ! $at && $mode == burst* && $class == after-unmap ]] && said "injected write (after-unmap) at 0x.*: not stopped" &&
            (($(metric writes_after_clear) > 0)); then
            permitted=1
            continue
        fi
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        said "0000:00:04.0 was stopped: a $access at $at" || return 1
    done
    said "ringfence_faults_total{device=\"riommu\"} $((4 - permitted))" &&
        said "ringfence_injected_permitted_total{device=\"blk\"} $permitted" || return 1
    [[ $mode == burst* ]] || return 0
    holds write/deferred -gt 0 && holds write/held -gt 0 || return 1
    for ring in read write both; do
        holds $ring/deferred -le $(($(counter $ring/held) + $(counter $ring/shadows))) || return 1
    done
    echo "$permitted of 1 access after its unmap permitted; $(counter write/deferred) deferred, $(counter write/invalidations) invalidations" >"$case/note"
}

# A device faults as fast as it can: the guest continues, and its log is not flooded. While a read
# waits for the disk, whose thread causes the storm, a shell counts its sleeps of 10 ms, without a
# new process for each. Then it prints the number of faults that the module has handled, the
# interrupts, and the time in hundredths of a second. A slower guest handles less in this time.
readonly STORMED='now() { read up _ </proc/uptime; echo ${up%.*}${up#*.}; }
faults() { cat /sys/kernel/debug/riommu/*/faults; }
'"$INTERRUPTS"'
from=$(now); before=$(faults); interrupted=$(interrupts riommu); naps=0; mkfifo /silent; exec 9<>/silent
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null &
while kill -0 $! 2>/dev/null; do read -t 0.01 -u 9 never; naps=$((naps + 1)); done
echo "storm: $(($(faults) - before)) faults, $(($(interrupts riommu) - interrupted)) interrupts, $naps naps, $(($(now) - from)) hundredths, $(dmesg | grep -c "was stopped") lines"'
stormed() {
    local seen interrupts naps hundredths lines faults
    behind "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$STORMED" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(sed -n 's/^ringfence_faults_total{device="riommu"} \([0-9]*\)$/\1/p' "$log")
    read -r seen interrupts naps hundredths lines <<<"$(storm_of faults)"
    echo "$faults faults in $hundredths hundredths of a second: $seen looked at, $interrupts interrupts, $lines lines logged, $naps naps" >"$case/note"
    ((naps >= 3 && seen > 0)) || return 2
    # At most an interrupt and 64 faults in 10 ms, and 10 lines in 5 s.
    ((faults >= 1000000 && seen <= 64 * hundredths + 128 && interrupts <= hundredths + 2 && lines <= 10 + hundredths / 50))
}

# The fault queue is moved to where there is no memory, so the IOMMU stops recording at the first
# fault of the storm. The driver restarts it, once, and then reads faults as before.
readonly RESTARTED=$LOGGED'set -e
iommu=$(dirname $(grep -l 0x10f7 /sys/bus/pci/devices/*/device)); read registers _ <$iommu/resource
put() { devmem $((registers + $1)) $2 $3; }
put 0x18 32 5; put 0x28 64 0xfffffff000006; put 0x18 32 7
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null
logged 1 "was stopped: a write at" >/dev/null
echo "$(cat /sys/kernel/debug/riommu/*/restarts) restarts, $(cat /sys/kernel/debug/riommu/*/faults) faults"; dmesg'
restarted() {
    local append="$append iomem=relaxed" faults
    behind "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$RESTARTED" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(sed -n 's/^1 restarts, \([0-9]*\) faults.*/\1/p' "$log")
    echo "$faults faults after the restart" >"$case/note"
    said 'could not record a fault, and is restarted' || return 1
    # The storm was over before the restart.
    ((faults > 64)) || return 2
    said 'was stopped: a write at 0xdead0000'
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
rmmod MODULE; echo unloaded'
replugged() {
    local mode=$1
    shift
    in_mode "$mode" "$@" --metrics -- sh -c "$(of_mode "$mode" "$REPLUGGED")" || return 1
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

# A second kernel, started with kexec, finds the IOMMU stopped (register CTRL) and the disk as the
# first one left it.
readonly CONTROL='iommu=$(dirname $(grep -l 0x10f7 /sys/bus/pci/devices/*/device))
read registers _ <$iommu/resource; devmem $((registers + 0x18)) 32'
readonly COUNTERS='grep -r . /sys/kernel/debug/riommu'
second_kernel() {
    local kernel=$1
    start_disk "$kernel" || return 1
    behind --kernel "$kernel" --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kexec "$CONTROL" "$COUNTERS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    said '^first kernel' && said '^second kernel: 0x00000000' && said '^same' && said '^written' && said '^clean' &&
        said 'ringfence_faults_total{device="riommu"} 0' && holds read/maps -gt 0 && holds write/maps -gt 0 && sound
}

# The kernel crashes while the disk works, so nothing is shut down. The crash kernel finds the IOMMU
# running with the tables of the first one (register CTRL). The module stops it, gives it another
# fault queue (register FQ, which a running IOMMU ignores), and the disk is as the first kernel left
# it.
readonly QUEUE='echo queue $(devmem $((registers + 0x28)) 64)'
crash_kernel() {
    local kernel=$1 append="$append crashkernel=192M" log_check=
    start_disk "$kernel" || return 1
    behind --memory 768 --kernel "$kernel" --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kdump "$CONTROL; $QUEUE" "$COUNTERS; $CONTROL; $QUEUE" --crash 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    said '^first kernel' && said '^second kernel: 0x00000007' && said '^same' && said '^written' && said '^clean' &&
        [[ $(grep '^queue 0x' "$log" | sort -u | wc -l) == 2 ]] && holds read/maps -gt 0 && holds write/maps -gt 0 && sound
}

# Rings with few slots, and requests of at most 16 pages: maps fail until unmaps free slots, the
# driver retries, and all data is correct.
full() {
    local mode=$1
    shift
    in_mode "$mode slots=20" "$@" --metrics -- sh -c "echo 64 >/sys/block/vda/queue/max_sectors_kb; $(of_mode "$mode" "${FILES/count=1000/count=100}")" || return 1
    said '^same' && said '^again' && said 'ringfence_faults_total{device="riommu"} 0' && holds read/bad -eq 0 && holds write/bad -eq 0 || return 1
    (($(counter read/full) + $(counter write/full) > 10)) || return 1
    echo "$(counter read/full) and $(counter write/full) maps found the ring full" >"$case/note"
}

# Transfers data between two guests through the rings.
# network MODE MOST OPTION...: at most this many invalidations per 1000 unmaps.
network() {
    local mode=$1 most=$2
    shift 2
    talk riommu 'grep -r . /sys/kernel/debug/riommu' -- in_mode "$mode" "$@" &&
        holds read/maps -gt 1000 0000:00:05.0 && sound 0000:00:05.0 || return 1
    local note ring name
    note="$(per_unmap 0000:00:05.0) invalidations per 1000 unmaps"
    for ring in read write; do
        note+=", $ring:"
        for name in unmaps invalidations deferred held shadows; do
            note+=" $(counter $ring/$name 0000:00:05.0) $name"
        done
    done
    echo "$note" >"$case/note"
    (($(per_unmap 0000:00:05.0) <= most))
}

# A device goes on reading the data of each write after its interrupt. Its driver has unmapped the
# page, and in the completion the page gets another owner, who writes other bytes.
readonly EXPOSED='insmod /modules/dma_reuse.ko order=$1 && rmmod dma_reuse; dmesg | grep "dma_reuse: /dev\|was stopped"'
exposed() {
    local mode=$1 order=$2
    shift 2
    in_mode "$mode" "$@" --with-module dma_reuse --inject-dma keep-reading --metrics -- sh -c "$EXPOSED" exposed $order 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    said '0000:00:04.0 was stopped: a read at' || return 1
    local reads cleared changed others faults
    others=$(sed -n 's/^.*dma_reuse: .dev.vda: 500 writes, \([0-9]*\) pages had another owner.*/\1/p' "$log")
    reads=$(metric kept_reads) cleared=$(metric reads_after_clear) changed=$(metric kept_reads_changed)
    echo "$reads reads after a completion, $cleared of a cleared slot, $changed of another owner's bytes; $others pages had one" >"$case/note"
    # The IOMMU stopped the last read after a write, unless the device made all of its reads before
    # the driver's unmap.
    faults=$(sed -n 's/^ringfence_faults_total{device="riommu"} \([0-9]*\)$/\1/p' "$log")
    ((reads > 0 && faults > 0 && faults <= 500)) || return 1
    # Interrupts may come between a completion's free and its allocation. A burst holds the page. One
    # read after each of the 500 writes may be translated before the slot is cleared and read after it.
    case $mode in
    burst-paper) ((others > 400 && changed > 0 && cleared + 500 >= changed)) ;;
    burst) ((others < 100 && changed == 0 && cleared > 0)) ;;
    strict) ((others > 400 && changed == 0)) ;;
    esac
}

choose_kernels --iommu riommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files: $kernel" files strict --kernel "$kernel"
    try "files: $kernel, two processors" files strict --kernel "$kernel" --cpus 2
    try "errant DMAs stopped and named: $kernel" errant strict --kernel "$kernel"
    try "replugged while it works: $kernel" replugged strict --kernel "$kernel"
    try "suspended is refused: $kernel" suspended --kernel "$kernel"
    try "full: $kernel" full strict --kernel "$kernel"
    try "stormed: $kernel" in_storm stormed --kernel "$kernel"
    # The debug kernel has no /dev/mem and no kexec_file_load.
    [[ $kernel == debug ]] || try "restarted: $kernel" in_storm restarted --kernel "$kernel"
    [[ $kernel == debug ]] || try "kexec: $kernel" second_kernel "$kernel"
    [[ $kernel == debug ]] || try "kdump: $kernel" crash_kernel "$kernel"
    try "network between guests: $kernel" network strict 1000 --kernel "$kernel"
    for mode in burst burst-paper; do
        try "$mode: files: $kernel, two processors" files $mode --kernel "$kernel" --cpus 2
        try "$mode: replugged while it works: $kernel" replugged $mode --kernel "$kernel" --cpus 2
        try "$mode: full: $kernel" full $mode --kernel "$kernel"
    done
    for mode in strict burst burst-paper; do
        try "exposed: $mode: $kernel" exposed $mode 0 --kernel "$kernel"
        # Compound pages of 128 KiB, which a burst holds by one reference.
        try "exposed, compound pages: $mode: $kernel" exposed $mode 5 --kernel "$kernel"
    done
    # The longest burst, so that it has not ended when the disk accesses the unmapped buffer.
    try "burst: errant DMAs stopped and named: $kernel" errant "burst burst_us=1000000" --kernel "$kernel"
    # Emulated guests send about 1000 packets a second, and fewer on a busy host: the default of 10 ms
    # would end most bursts.
    try "burst: network between guests: $kernel" network "burst burst_us=1000000" 50 --kernel "$kernel"
    try "burst-paper: network between guests: $kernel" network burst-paper 1000 --kernel "$kernel"
done
all_passed
