#!/usr/bin/env bash
# Stock Debian guests with devices behind the ring IOMMU. The module riommu in kmod/ drives it: see
# docs/RIOMMU-DEVICE.md and README.md.
#
#   tests/guest/riommu.sh           build, run all cases, print a line each; exit code 0/1
#   tests/guest/riommu.sh errant    run only the cases whose names begin with this
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# A case whose kernel crashes on purpose sets this to the empty string.
log_check=--check-kernel-log
boot_guest() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" \
        --module-source "$repo/kmod" $log_check --iommu riommu "$@"
}

# in_mode MODE OPTION...: boots a guest whose module is in this mode. MODE may continue with other
# parameters of the module. Another module has the mode burst-paper.
in_mode() {
    local mode=$1
    shift
    [[ ${mode%% *} != burst-paper ]] || set -- --as-published "$@"
    boot_guest --module-args "mode=$mode" "$@"
}

# counter RING/NAME [DEVICE]: prints a counter of the module, the last one of the guest's output.
counter() { sed -n "s#^.*/${2:-0000:00:04.0}/$1:\([0-9]*\)\r*\$#\1#p" "$log" | tail -n 1; }
# holds RING/NAME OP NUMBER [DEVICE]: compares a counter, and prints a failed comparison.
holds() {
    local value
    value=$(counter "$1" ${4:-})
    [[ $value ]] && [ "$value" "$2" "$3" ] && return
    echo "$1 is ${value:-missing}, not $2 $3"
    return 1
}
# metric NAME: prints a counter of the disk from the daemon's output.
metric() { sed -n "s/^ringfence_$1_total{device=\"blk\"} \([0-9]*\)\$/\1/p" "$log"; }
# per_unmap [DEVICE]: prints the invalidations per 1000 unmaps of the three rings, rounded up.
per_unmap() {
    local ring unmaps=0 invalidations=0
    for ring in read write both; do
        unmaps=$((unmaps + $(counter $ring/unmaps "$@")))
        invalidations=$((invalidations + $(counter $ring/invalidations "$@")))
    done
    echo $(((invalidations * 1000 + unmaps - 1) / unmaps))
}
# no_ring_errors [DEVICE]: succeeds if no map found a ring full and each unmap had a mapping.
no_ring_errors() {
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
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before
umount /m; echo same
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
files() {
    local mode=$1
    shift
    in_mode "$mode" "$@" --metrics -- sh -c "$(of_mode "$mode" "$FILES")$MASTER" || return 1
    log_has '^same' && log_has '^unloaded' && log_has '^again' && log_has '^mastered' &&
        log_has 'ringfence_faults_total{device="riommu"} 0' &&
        holds read/maps -gt 1000 && holds write/maps -gt 1000 && no_ring_errors || return 1
    # An unmap of a buffer or of a list makes at most one invalidation. No buffer stays mapped.
    [[ $(counter write/maps) == $(counter write/unmaps) ]] && holds write/invalidations -gt 0 &&
        holds write/invalidations -le "$(counter write/unmaps)" || return 1
    case $mode in
    strict)
        holds write/invalidations -gt 1000 && holds write/deferred -eq 0 &&
            holds read/deferred -eq 0 || return 1
        ;;
    burst)
        holds write/deferred -gt 0 && holds write/held -gt 0 && holds read/shadows -gt 0 || return 1
        ;;
    burst-paper) holds write/deferred -gt 0 && holds write/held -eq 0 || return 1 ;;
    esac
    echo "$(counter read/maps) and $(counter write/maps) maps," \
        "$(per_unmap) invalidations per 1000 unmaps" >"$case/note"
}

# The IOMMU stops errant accesses of the disk. The guest's own log names device, address and access.
# In a burst, the access to an unmapped buffer can come before the invalidation. The IOMMU may then
# permit it only by its copy of the cleared slot. The device reaches a page that the burst holds, or
# a shadow, because the driver defers no other unmap.
readonly READS=$LOGGED'for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; logged 4 "was stopped"; grep -r . /sys/kernel/debug/riommu'
errant() {
    local mode=$1 permitted=0
    shift
    local classes=stray:dead0000,after-unmap,write-read-only,read-write-only
    in_mode "$mode" "$@" --inject-dma "$classes" --metrics -- \
        sh -c "$READS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class access at ring
    for class in stray after-unmap write-read-only read-write-only; do
        access=write
        [[ $class != read-write-only ]] || access=read
        at=$(stopped_at "$access" "$class")
        if [[ ! $at && $mode == burst* && $class == after-unmap ]] &&
            log_has "injected write (after-unmap) at 0x.*: not stopped" &&
            (($(metric writes_after_clear) > 0)); then
            permitted=1
            continue
        fi
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        log_has "0000:00:04.0 was stopped: a $access at $at" || return 1
    done
    log_has "ringfence_faults_total{device=\"riommu\"} $((4 - permitted))" &&
        log_has "ringfence_injected_permitted_total{device=\"blk\"} $permitted" || return 1
    [[ $mode == burst* ]] || return 0
    holds write/deferred -gt 0 && holds write/held -gt 0 || return 1
    for ring in read write both; do
        holds $ring/deferred -le $(($(counter $ring/held) + $(counter $ring/shadows))) || return 1
    done
    echo "$permitted of 1 access after its unmap permitted; $(counter write/deferred) deferred," \
        "$(counter write/invalidations) invalidations" >"$case/note"
}

# A device faults as fast as it can. The guest continues, and its log stays short. While a read
# waits for the disk, whose thread causes the storm, a shell counts its sleeps of 10 ms, without a
# new process for each. Then it prints the number of faults that the module has handled, the
# interrupts, and the time in hundredths of a second. A slower guest handles less in this time.
readonly STORMED='now() { read up _ </proc/uptime; echo ${up%.*}${up#*.}; }
faults() { cat /sys/kernel/debug/riommu/*/faults; }
'"$INTERRUPTS"'
from=$(now); before=$(faults); interrupted=$(interrupts riommu); naps=0
mkfifo /silent; exec 9<>/silent
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null &
while kill -0 $! 2>/dev/null; do read -t 0.01 -u 9 never; naps=$((naps + 1)); done
faults=$(($(faults) - before)); interrupts=$(($(interrupts riommu) - interrupted))
hundredths=$(($(now) - from)); lines=$(dmesg | grep -c "was stopped")
storm="$faults faults, $interrupts interrupts, $naps naps"
echo "storm: $storm, $hundredths hundredths, $lines lines"'
stormed() {
    local seen interrupts naps hundredths lines faults
    boot_guest "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$STORMED" 2>&1 |
        grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(sed -n 's/^ringfence_faults_total{device="riommu"} \([0-9]*\)$/\1/p' "$log")
    read -r seen interrupts naps hundredths lines <<<"$(storm_of faults)"
    echo "$faults faults in $hundredths hundredths of a second: $seen read," \
        "$interrupts interrupts, $lines lines logged, $naps naps" >"$case/note"
    ((naps >= 3 && seen > 0)) || return 2
    # At most an interrupt and 64 faults in 10 ms, and 10 lines in 5 s.
    ((faults >= 1000000 && seen <= 64 * hundredths + 128 &&
        interrupts <= hundredths + 2 && lines <= 10 + hundredths / 50))
}

# The guest moves the fault queue to an address without memory. The IOMMU therefore stops recording
# at the first fault of the storm. The driver restarts it once, and then reads faults as before.
readonly RESTARTED=$LOGGED'set -e
iommu=$(dirname $(grep -l 0x10f7 /sys/bus/pci/devices/*/device)); read registers _ <$iommu/resource
put() { devmem $((registers + $1)) $2 $3; }
put 0x18 32 5; put 0x28 64 0xfffffff000006; put 0x18 32 7
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null
logged 1 "was stopped: a write at" >/dev/null
restarts=$(cat /sys/kernel/debug/riommu/*/restarts); faults=$(cat /sys/kernel/debug/riommu/*/faults)
echo "$restarts restarts, $faults faults"; dmesg'
restarted() {
    local append="$append iomem=relaxed" faults
    boot_guest "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$RESTARTED" 2>&1 |
        grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(sed -n 's/^1 restarts, \([0-9]*\) faults.*/\1/p' "$log")
    echo "$faults faults after the restart" >"$case/note"
    log_has 'could not record a fault, and is restarted' || return 1
    # With fewer faults, the storm ended before the restart.
    ((faults > 64)) || return 2
    log_has 'was stopped: a write at 0xdead0000'
}

# The guest removes the disk from its bus while the disk works, and adds it again. The disk is then
# behind the module as before, and its counters continue.
readonly REPLUGGED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
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
    log_has '^same' && log_has '^clean' && log_has '^unloaded' &&
        log_has 'ringfence_faults_total{device="riommu"} 0' && no_ring_errors
}

# A resume would reset the IOMMU. The module therefore refuses the suspend. The guest continues.
readonly SUSPENDED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
echo devices >/sys/power/pm_test
if echo freeze >/sys/power/state; then echo slept; fi 2>/dev/null
dmesg | grep "cannot be suspended"
dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null | md5sum | cmp - /tmp/before; echo same'
suspended() {
    boot_guest "$@" -- sh -c "$SUSPENDED" &&
        log_has 'cannot be suspended' && ! log_has '^slept' && log_has '^same'
}

# A second kernel, started with kexec, finds the IOMMU stopped (register CTRL) and the disk as the
# first one left it.
readonly CONTROL='iommu=$(dirname $(grep -l 0x10f7 /sys/bus/pci/devices/*/device))
read registers _ <$iommu/resource; devmem $((registers + 0x18)) 32'
readonly COUNTERS='grep -r . /sys/kernel/debug/riommu'
second_kernel() {
    local kernel=$1
    start_disk "$kernel" || return 1
    boot_guest --kernel "$kernel" --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kexec "$CONTROL" "$COUNTERS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    log_has '^first kernel' && log_has '^second kernel: 0x00000000' && log_has '^same' &&
        log_has '^written' && log_has '^clean' &&
        log_has 'ringfence_faults_total{device="riommu"} 0' &&
        holds read/maps -gt 0 && holds write/maps -gt 0 && no_ring_errors
}

# The kernel crashes while the disk works, and shuts nothing down. The crash kernel finds the IOMMU
# enabled (register CTRL) with the tables of the first kernel. The module stops the IOMMU and sets
# another fault queue (register FQ, which an enabled IOMMU ignores). The disk has the data of the
# first kernel.
readonly QUEUE='echo queue $(devmem $((registers + 0x28)) 64)'
crash_kernel() {
    local kernel=$1 append="$append crashkernel=192M" log_check=
    start_disk "$kernel" || return 1
    boot_guest --memory 768 --kernel "$kernel" --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kdump "$CONTROL; $QUEUE" "$COUNTERS; $CONTROL; $QUEUE" --crash 2>&1 |
        grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    log_has '^first kernel' && log_has '^second kernel: 0x00000007' && log_has '^same' &&
        log_has '^written' && log_has '^clean' &&
        [[ $(grep '^queue 0x' "$log" | sort -u | wc -l) == 2 ]] &&
        holds read/maps -gt 0 && holds write/maps -gt 0 && no_ring_errors
}

# Rings with few slots, and requests of at most 16 pages: maps fail until unmaps free slots, the
# driver retries, and all data is correct.
full() {
    local mode=$1 program
    shift
    program="echo 64 >/sys/block/vda/queue/max_sectors_kb"
    program+="; $(of_mode "$mode" "${FILES/count=1000/count=100}")"
    in_mode "$mode slots=20" "$@" --metrics -- sh -c "$program" || return 1
    log_has '^same' && log_has '^again' && log_has 'ringfence_faults_total{device="riommu"} 0' &&
        holds read/bad -eq 0 && holds write/bad -eq 0 || return 1
    (($(counter read/full) + $(counter write/full) > 10)) || return 1
    echo "$(counter read/full) and $(counter write/full) maps found the rings full" >"$case/note"
}

# network MODE MOST OPTION...: transfers data between two guests through the rings. Succeeds with at
# most MOST invalidations per 1000 unmaps.
network() {
    local mode=$1 most=$2
    shift 2
    talk riommu 'grep -r . /sys/kernel/debug/riommu' -- in_mode "$mode" "$@" &&
        holds read/maps -gt 1000 0000:00:05.0 && no_ring_errors 0000:00:05.0 || return 1
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

# After the interrupt of a write, a device continues to read the data of the write. Its driver has
# unmapped the page. In the completion the page gets another owner, who writes other bytes.
readonly EXPOSED='insmod /modules/dma_reuse.ko order=$1 && rmmod dma_reuse
dmesg | grep "dma_reuse: /dev\|was stopped"'
exposed() {
    local mode=$1 order=$2
    shift 2
    in_mode "$mode" "$@" --with-module dma_reuse --inject-dma keep-reading --metrics -- \
        sh -c "$EXPOSED" exposed $order 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    log_has '0000:00:04.0 was stopped: a read at' || return 1
    local reads cleared changed others faults
    local line='dma_reuse: .dev.vda: 500 writes, \([0-9]*\) pages had another owner'
    others=$(sed -n "s/^.*$line.*/\1/p" "$log")
    reads=$(metric kept_reads) cleared=$(metric reads_after_clear)
    changed=$(metric kept_reads_changed)
    echo "$reads reads after a completion, $cleared of a cleared slot," \
        "$changed of another owner's bytes; $others pages had another owner" >"$case/note"
    # The IOMMU stopped the last read after a write, unless the device made all of its reads before
    # the driver's unmap.
    faults=$(sed -n 's/^ringfence_faults_total{device="riommu"} \([0-9]*\)$/\1/p' "$log")
    ((reads > 0 && faults > 0 && faults <= 500)) || return 1
    # Interrupts may come between the free and the allocation of a completion. A burst holds the
    # page. After each of the 500 writes, the IOMMU may translate one read before the driver clears
    # the slot, and the device may make this read later.
    case $mode in
    burst-paper) ((others > 400 && changed > 0 && cleared + 500 >= changed)) ;;
    burst) ((others < 100 && changed == 0 && cleared > 0)) ;;
    strict) ((others > 400 && changed == 0)) ;;
    esac
}

choose_kernels --iommu riommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files: $kernel" files strict --kernel "$kernel"
    try "files: $kernel, two CPUs" files strict --kernel "$kernel" --cpus 2
    try "errant accesses are stopped and logged: $kernel" errant strict --kernel "$kernel"
    try "replugged while the disk works: $kernel" replugged strict --kernel "$kernel"
    try "suspended: the module refuses it: $kernel" suspended --kernel "$kernel"
    try "full: $kernel" full strict --kernel "$kernel"
    try "stormed: $kernel" in_storm stormed --kernel "$kernel"
    # The debug kernel has no /dev/mem and no kexec_file_load.
    [[ $kernel == debug ]] || try "restarted: $kernel" in_storm restarted --kernel "$kernel"
    [[ $kernel == debug ]] || try "kexec: $kernel" second_kernel "$kernel"
    [[ $kernel == debug ]] || try "kdump: $kernel" crash_kernel "$kernel"
    try "network between guests: $kernel" network strict 1000 --kernel "$kernel"
    for mode in burst burst-paper; do
        try "$mode: files: $kernel, two CPUs" files $mode --kernel "$kernel" --cpus 2
        try "$mode: replugged while the disk works: $kernel" \
            replugged $mode --kernel "$kernel" --cpus 2
        try "$mode: full: $kernel" full $mode --kernel "$kernel"
    done
    for mode in strict burst burst-paper; do
        try "exposed: $mode: $kernel" exposed $mode 0 --kernel "$kernel"
        # Compound pages of 128 KiB, which a burst holds by one reference.
        try "exposed, compound pages: $mode: $kernel" exposed $mode 5 --kernel "$kernel"
    done
    # The burst is the longest one, and has not ended when the disk accesses the unmapped buffer.
    try "burst: errant accesses are stopped and logged: $kernel" \
        errant "burst burst_us=1000000" --kernel "$kernel"
    # Emulated guests send about 1000 packets a second, and fewer on a busy host. The default time
    # of 10 ms would end most bursts.
    try "burst: network between guests: $kernel" \
        network "burst burst_us=1000000" 50 --kernel "$kernel"
    try "burst-paper: network between guests: $kernel" network burst-paper 1000 --kernel "$kernel"
done
all_passed
