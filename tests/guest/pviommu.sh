#!/usr/bin/env bash
# Stock Debian guests with devices behind the para-virtual IOMMU, driven by the module in kmod/: see
# docs/GUEST.md and README.md.
#
#   tests/guest/pviommu.sh                       build, boot all cases, a line each; exit code 0/1
#   tests/guest/pviommu.sh errant                only the cases whose names begin so
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# A case whose kernel crashes on purpose clears it.
log_check=--check-kernel-log
run() { limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" --module-source "$repo/kmod" $log_check "$@"; }
behind() { run --iommu pviommu "$@"; }

# counter NAME [DEVICE]: a counter of the module, as the guest printed it.
counter() { sed -n "s#^.*/${2:-0000:00:04.0}/$1:\([0-9]*\)\r*\$#\1#p" "$log" | tail -n 1; }
# holds NAME OP NUMBER [DEVICE]: compares a counter, and prints a failed comparison.
holds() {
    local value
    value=$(counter "$1" ${4:-})
    [[ $value ]] && [ "$value" "$2" "$3" ] && return
    echo "$1 is ${value:-not there}, not $2 $3"
    return 1
}
# Makes a file system, writes, and compares checksums after a remount. Then unloads the module: the
# disk has no driver, and works again after the module is loaded.
readonly FILES='set -e
mke2fs /dev/vda >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/vda /m
dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo same
dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null
grep -r . /sys/kernel/debug/pviommu
rmmod pviommu; [ ! -e /dev/vda ]; [ ! -e /sys/bus/pci/devices/0000:00:04.0/driver ]; echo unloaded
insmod /modules/pviommu.ko; echo 0000:00:04.0 >/sys/bus/pci/drivers/virtio-pci/bind
while [ ! -b /dev/vda ]; do usleep 100000; done
mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo again'
files() {
    local cache_on=$1
    shift
    behind --module-args "cache=$cache_on" "$@" --metrics -- sh -c "$FILES$MASTER" || return 1
    said '^same' && said '^unloaded' && said '^again' && said '^mastered' && said 'ringfence_faults_total{device="pviommu"} 0' &&
        said 'ringfence_failed_total{device="pviommu"} 0' &&
        holds maps -gt 1000 && holds failures -eq 0 && holds lost -eq 0 && holds live -le 2 || return 1
    if ((cache_on)); then holds hits -gt 3000; else holds kept -eq 0 && holds hits -eq 0; fi || return 1
    echo "$(counter maps) maps, $(counter hits) hits" >"$case/note"
}

# Errant accesses of the devices are stopped, and the guest's own log names device, address and
# access. With the cache, devices reach unmapped pages for a bounded time.
# The argument is the number of accesses that the guest logs.
readonly READS=$LOGGED'for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; logged $1 "was stopped"'
errant() {
    behind --module-args "cache=0" "$@" --rng --inject-dma stray:dead0000,after-unmap,write-read-only,read-write-only,foreign --metrics -- \
        sh -c "$READS" reads 5 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class device access at
    for class in stray after-unmap write-read-only read-write-only foreign; do
        access=write device=04
        [[ $class != read-write-only ]] || access=read
        [[ $class != foreign ]] || device=06
        at=$(sed -n "s/^ringfence: blk: injected $access ($class) at \(0x[0-9a-f]*\): stopped\$/\1/p" "$log")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        said "0000:00:$device.0 was stopped: a $access at $at" || return 1
    done
    said 'ringfence_faults_total{device="pviommu"} 5' && said 'ringfence_injected_permitted_total{device="blk"} 0'
}
# The disk is a sandboxed process that can access only the module's mappings. Its errant accesses
# around them are stopped and named.
apart() {
    behind --module-args "cache=0" "$@" --disk mode=sandbox --inject-dma stray:dead0000,after-revoke,write-read-only,read-write-only --metrics -- \
        sh -c "$READS" reads 4 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class access at
    for class in stray after-revoke write-read-only read-write-only; do
        access=write
        [[ $class != read-write-only ]] || access=read
        at=$(sed -n "s/^ringfence: blk: injected $access ($class) at \(0x[0-9a-f]*\): stopped\$/\1/p" "$log")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        said "0000:00:04.0 was stopped: a $access at $at" || return 1
    done
    said 'ringfence_faults_total{device="pviommu"} 4' && said 'ringfence_injected_permitted_total{device="blk"} 0'
}
# The hardware model translates the disk. All data of a file is correct, every page passed its
# IOMMU, and the host allocated frames on demand. With the pool and the pointer, the guest waited
# for no frame, and the host walked less.
# total NAME DEVICE: a counter of the host's side.
total() { sed -n "s/^ringfence_$1_total{device=\"$2\"} \([0-9]*\)\$/\1/p" "$log" | tail -n 1; }
assigned() {
    local hopt=$1 cache_on=$2
    shift 2
    ((hopt)) && set -- "$@" --host-page-pool
    files "$cache_on" "$@" --disk mode=assigned || return 1
    local walks reads hits frames awaited refills pointer
    walks=$(total unit_walks blk) reads=$(total unit_reads blk) hits=$(total unit_hits blk)
    frames=$(total frames pviommu) awaited=$(total frames_awaited pviommu) refills=$(total pool_refills pviommu) pointer=$(total last_table_hits pviommu)
    ((walks > 1000 && reads >= walks && reads <= 4 * walks && hits > walks && frames > 0)) || return 1
    if ((hopt)); then ((refills > 0 && pointer > 0)); else ((awaited == frames && refills == 0 && pointer == 0)); fi || return 1
    echo "$walks walks with $reads reads, $hits hits; $frames frames, $awaited of them awaited, $refills refills, $pointer times the pointer" >>"$case/note"
}

kept() {
    behind --module-args "cache=1" "$@" --inject-dma after-unmap --metrics -- sh -c "$READS" reads 0 2>&1 | grep -v 'service_seconds\|^#'
    said 'injected write (after-unmap) at .*: not stopped' && said 'injected_permitted_total{device="blk"} 1'
}

# The as-published cache of the PVIOMMU paper serves a page in the direction of its first mapping.
# virtio-blk has headers and statuses of requests in the same pages. If the header is mapped first,
# the status cannot be written; if the status is first, the header cannot be read. Ours has neither
# defect.
readonly BOTH_WAYS=$LOGGED'dd if=/dev/vda of=/dev/null bs=4k count=8 iflag=direct 2>/dev/null
dd if=/dev/vda of=/dev/vda bs=4k count=1 iflag=direct oflag=direct 2>/dev/null && echo copied
logged $1 "was stopped: a write"'
as_published() {
    local faults unheard
    behind --as-published "$@" --metrics -- sh -c "$BOTH_WAYS; lsmod | grep pviommu" both 1 || return 1
    faults=$(total faults pviommu) unheard=$(total malformed blk)
    said 'pviommu-as-published: the paper.s key and one bit' && said '^pviommu_as_published' && said '0000:00:04.0 was stopped: a write at .*, not in this direction' &&
        ((faults >= 8 && unheard > 0)) || return 1
    : >"$log"
    behind --module-args "cache=1" "$@" --metrics -- sh -c "$BOTH_WAYS" both 0 || return 1
    said '^copied' && [[ $(total faults pviommu) == 0 && $(total malformed blk) == 0 ]] || return 1
    echo "paper's cache: $faults accesses stopped, $unheard statuses lost; fixed cache: none" >"$case/note"
}

# A device faults as fast as it can: the guest continues, and its log is not flooded. While a read
# waits for the disk, whose thread causes the storm, a shell counts its sleeps of 10 ms, without a
# new process for each. Then it prints the number of events that the module has handled, the
# interrupts, and the time in hundredths of a second. A slower guest handles less in this time.
readonly STORMED='now() { read up _ </proc/uptime; echo ${up%.*}${up#*.}; }
events() { cat /sys/kernel/debug/pviommu/virtio*/events; }
'"$INTERRUPTS"'
from=$(now); before=$(events); interrupted=$(interrupts events); naps=0; mkfifo /silent; exec 9<>/silent
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null &
while kill -0 $! 2>/dev/null; do read -t 0.01 -u 9 never; naps=$((naps + 1)); done
echo "storm: $(($(events) - before)) events, $(($(interrupts events) - interrupted)) interrupts, $naps naps, $(($(now) - from)) hundredths, $(dmesg | grep -c "was stopped") lines"'
stormed() {
    local events interrupts naps hundredths lines faults
    behind "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$STORMED" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(total faults pviommu)
    read -r events interrupts naps hundredths lines <<<"$(storm_of events)"
    echo "$faults faults in $hundredths hundredths of a second: $events events looked at, $interrupts interrupts, $lines lines logged, $naps naps" >"$case/note"
    ((naps >= 3 && events > 0)) || return 2
    # At most an interrupt and 16 events in 10 ms, and 10 lines in 5 s.
    ((faults >= 1000000 && events <= 16 * hundredths + 32 && interrupts <= hundredths + 2 && lines <= 10 + hundredths / 50))
}

# The cache is full: a mapping that does not fit is unmapped at once, and the worker frees entries.
# All data is correct.
full() {
    behind --module-args "cache=1 limit=64" "$@" --metrics -- sh -c "$FILES" || return 1
    said '^same' && said '^again' && said 'ringfence_faults_total{device="pviommu"} 0' && said 'ringfence_failed_total{device="pviommu"} 0' &&
        holds full -gt 10 && holds forced -gt 10 && holds kept_pages -le 64 && holds failures -eq 0 && holds lost -eq 0 || return 1
    echo "$(counter full) maps found the cache full, $(counter forced) mappings left early, $(counter hits) hits" >"$case/note"
}

# Unused mappings expire after C to C + 1 cycles, all of a cycle at once.
readonly EXPIRE='dd if=/dev/vda of=/dev/null bs=64k count=100 iflag=direct 2>/dev/null
left=600; until grep -qx 0 /sys/kernel/debug/pviommu/*/0000:00:04.0/kept || [ $left = 0 ]; do left=$((left - 1)); usleep 100000; done
grep -r . /sys/kernel/debug/pviommu'
expired() {
    behind --module-args "cache=1 t_ms=400 c=2" "$@" -- sh -c "$EXPIRE" &&
        holds kept -eq 0 && holds expired -gt 10 && holds failures -eq 0 && holds live -ge 1
}

# A host that answers late, twice, to a foreign request or not at all: the log reports it, the guest
# continues and exits, and the module can be unloaded.
readonly WRONG=$LOGGED'dd if=/dev/vda of=/dev/null bs=4k count=300 iflag=direct 2>/dev/null &
sleep $1; logged 1 "$2" >/dev/null; echo alive; dmesg | grep "pviommu virtio"; rmmod pviommu && echo unloaded'
wrong() {
    local how=$1 seconds=$2 text=$3
    shift 3
    behind --module-args "cache=0" "$@" --inject-reply "$how" -- sh -c "$WRONG" wrong "$seconds" "$text" &&
        said '^alive' && said "$text" && said '^unloaded'
}

# The disk is removed from the guest's bus while it works, and is added again: it is behind the
# module as before, and its counters continue.
readonly REPLUGGED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync; dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
for n in 1 2 3; do
    dd if=/dev/vda of=/dev/null bs=4k count=100000 iflag=direct 2>/dev/null & usleep 300000
    echo 1 >/sys/bus/pci/devices/0000:00:04.0/remove; wait; [ ! -e /dev/vda ]
    echo live $(cat /sys/kernel/debug/pviommu/*/0000:00:04.0/live)
    echo 1 >/sys/bus/pci/rescan
    while [ ! -b /dev/vda ]; do usleep 100000; done
    grep -h . /sys/kernel/debug/pviommu/*/0000:00:04.0/maps
done
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum | cmp - /tmp/before; echo same
grep -r . /sys/kernel/debug/pviommu; dmesg | grep -i "already present\|the driver left" || echo clean
rmmod pviommu; echo unloaded'
replugged() {
    behind --module-args "cache=1" "$@" --metrics -- sh -c "$REPLUGGED" || return 1
    said '^same' && said '^clean' && said '^unloaded' && [[ $(grep -c '^live 0' "$log") == 3 ]] &&
        said 'ringfence_failed_total{device="pviommu"} 0' && holds failures -eq 0 && holds lost -eq 0 || return 1
    # The counters continue: the last number is the largest.
    [[ $(grep '^[0-9][0-9]*.\?$' "$log" | tr -d '\r' | sort -n | tail -n 1) == $(grep '^[0-9][0-9]*.\?$' "$log" | tr -d '\r' | tail -n 1) ]]
}
# A resume would reset the device: the module refuses the suspend, and the guest continues.
readonly SUSPENDED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync; dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
echo devices >/sys/power/pm_test
if echo freeze >/sys/power/state; then echo slept; fi 2>/dev/null
dmesg | grep "cannot be suspended"
dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null | md5sum | cmp - /tmp/before; echo same'
suspended() {
    behind "$@" -- sh -c "$SUSPENDED" && said 'cannot be suspended' && ! said '^slept' && said '^same'
}

# A second kernel, started with kexec, finds the disk as the first one left it. Linux resets the
# IOMMU again before it loads a module.
second_kernel() {
    local kernel=$1
    start_disk "$kernel" || return 1
    behind --kernel "$kernel" --module-args cache=1 --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kexec true "$COUNTERS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] && followed
}
readonly COUNTERS='grep -r . /sys/kernel/debug/pviommu'
followed() {
    said '^first kernel' && said '^second kernel' && said '^same' && said '^written' && said '^clean' &&
        said 'ringfence_faults_total{device="pviommu"} 0' && said 'ringfence_failed_total{device="pviommu"} 0' &&
        holds maps -gt 0 && holds failures -eq 0 && holds lost -eq 0
}

# The same after a crash while the disk works: nothing is shut down, and the cache is not emptied.
crash_kernel() {
    local kernel=$1 append="$append crashkernel=192M" log_check=
    start_disk "$kernel" || return 1
    behind --memory 768 --kernel "$kernel" --module-args cache=1 --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kdump true "$COUNTERS" --crash 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] && followed
}

# Coherent memory of 8 MiB is more than the kernel has in one piece: single pages, which the host
# maps and unmaps.
readonly COHERENT='insmod /modules/dma_count.ko coherent=65536; insmod /modules/dma_count.ko coherent=8388608
dmesg | grep "of coherent memory"; grep -r . /sys/kernel/debug/pviommu; dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null && echo reads'
coherent() {
    behind --with-module dma_count "$@" --metrics -- sh -c "${COHERENT//insmod/rmmod dma_count 2>/dev/null; insmod}" || return 1
    said '65536 bytes of coherent memory, contiguous' && said '8388608 bytes of coherent memory, single pages' && said '^reads' &&
        holds failures -eq 0 && holds lost -eq 0 && said 'ringfence_failed_total{device="pviommu"} 0'
}

# While a guest works, the host reclaims its memory through control groups. The module's mapped
# pages stay, and all data is unchanged. If devices can access all of a guest's memory, all of it
# must stay.
readonly RECLAIMED='set -e; mkdir -p /t; mount -t tmpfs -o size=300m none /t
dd if=/dev/urandom of=/t/f bs=64k count=800 2>/dev/null; md5sum </t/f >/before; for n in 1 2 3 4; do cp /t/f /t/$n; done; echo ready
dd if=/dev/urandom of=/dev/vda bs=4k count=1000 oflag=direct 2>/dev/null; dd if=/dev/vda of=/t/g bs=4k count=1000 iflag=direct 2>/dev/null
md5sum </t/f | cmp - /before; dd if=/dev/vda bs=64k count=63 2>/dev/null | cmp -n 4096000 - /t/g; echo same'
reclaimed() {
    local what=$1 least=$2 most=$3 status before after locked
    shift 3
    # The host can reclaim only memory backed by a file system on a disk.
    local memory group=ringfence-$$-$what
    memory=$(mktemp -d -p "$target" memory.XXXXXX)
    python3 "$here/reclaim.py" enter "$group" "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" --module-source "$repo/kmod" \
        --check-kernel-log "$@" --memory-file "$memory/guest" --lock "$what" --metrics -- sh -c "$RECLAIMED" </dev/null >"$case/guest" 2>&1 &
    python3 "$here/reclaim.py" take "$group" "$memory/guest" "$case/guest" 3
    status=$?
    wait $! || status=1
    grep -v 'service_seconds\|^#' "$case/guest"
    rm -rf "$memory"
    ((status == 0)) && said '^same' || return 1
    read -r before after locked <<<"$(sed -n 's/^taken: //p' "$log")"
    echo "of $((before / 256)) MiB in memory $((after / 256)) stayed, $locked pages of them locked" >"$case/note"
    ((after * 100 >= before * least && after * 100 <= before * most))
}

# Transfers data between two guests through the module's mappings.
network() {
    talk pviommu 'grep -r . /sys/kernel/debug/pviommu' -- behind --module-args "cache=1" "$@" &&
        holds maps -gt 1000 0000:00:05.0 && holds failures -eq 0 0000:00:05.0
}

# Counts, under -icount and by X21, the instructions of a map and its unmap, and the doorbells of a
# direct read of 4 KiB, and compares them with the stock virtio-iommu, strict.
counted() {
    limited "$ringfence" reproduce X21 --guest-cache "$packed" --guest-timeout "$LIMIT" --module-source "$repo/kmod" --guest-kernel "$1" \
        --guest-kind emulated --guest-configuration pviommu+rtc,virtio-strict --json >"$case/x21.json" || return 1
    python3 - "$case/x21.json" >"$case/note" <<'END'
import json, re, sys
(found,) = json.load(open(sys.argv[1]))["findings"]
measured = {row["quantity"]: row["measured"]["median"] for row in found["rows"] if row["measured"]}
def one(which, what):
    # The device, and the cache if there is one, follow the names in brackets.
    name = re.compile(rf"emulated \([^)]*\), {re.escape(which)}( \([^)]*\))?: {what}")
    (value,) = [value for quantity, value in measured.items() if name.fullmatch(quantity)]
    return value
def of(what):
    return [one(which, what) for which in ("pviommu+rtc", "virtio-strict")]
ours, stock = of("guest instructions per map and unmap")
rung, stock_rung = of("exits for IOMMU requests per 4 KiB read")
print(f"a map and its unmap: {ours:.0f} instructions with a hit, {stock:.0f} behind virtio-iommu ({ours / stock:.4f});"
      f" doorbells per read: {rung:.4f}, {stock_rung:g} behind virtio-iommu")
if ours > stock / 10 or rung > 0.1 or stock_rung < 8:
    sys.exit("more than a tenth of the instructions, or of a doorbell; or virtio-iommu's are fewer than they were")
END
}

choose_kernels --iommu pviommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files: $kernel, cached" files 1 --kernel "$kernel"
    try "files: $kernel, not cached, two processors" files 0 --kernel "$kernel" --cpus 2
    try "errant DMAs stopped and named: $kernel" errant --kernel "$kernel"
    try "apart: files: $kernel, not cached" files 0 --kernel "$kernel" --disk mode=sandbox
    try "apart: files: $kernel, cached, two processors" files 1 --kernel "$kernel" --cpus 2 --disk mode=sandbox
    try "apart: errant DMAs stopped and named: $kernel" apart --kernel "$kernel"
    try "assigned: files: $kernel, not cached" assigned 0 0 --kernel "$kernel"
    try "assigned: files: $kernel, cached, with the host's optimisations" assigned 1 1 --kernel "$kernel"
    try "assigned: errant DMAs stopped and named: $kernel" errant --kernel "$kernel" --disk mode=assigned
    try "replugged while it works: $kernel" replugged --kernel "$kernel"
    try "suspended is refused: $kernel" suspended --kernel "$kernel"
    try "coherent: $kernel" coherent --kernel "$kernel"
    try "expired: $kernel" expired --kernel "$kernel"
    try "full: $kernel" full --kernel "$kernel"
    try "stormed: $kernel" in_storm stormed --kernel "$kernel"
    # The debug kernel has no kexec_file_load.
    [[ $kernel == debug ]] || try "kexec: $kernel, cached" second_kernel "$kernel"
    [[ $kernel == debug ]] || try "kdump: $kernel, cached" crash_kernel "$kernel"
    try "network between guests: $kernel" network --kernel "$kernel"
    # The debug kernel's checks cost instructions.
    [[ $kernel == debug ]] || try "counted: $kernel" counted "$kernel"
    try "wrong answers, never: $kernel" wrong never:50 14 'not answered in 10 s' --kernel "$kernel"
    try "wrong answers, late: $kernel" wrong late:50 16 'not answered in 10 s' --kernel "$kernel"
    try "wrong answers, twice: $kernel" wrong twice:50 3 'answered what was not asked' --kernel "$kernel"
    try "wrong answers, foreign: $kernel" wrong foreign:50 3 'answered what was not asked' --kernel "$kernel"
done
first=6.12
[[ $KERNELS != debug ]] || first=debug
try "reclaimed: what is not mapped is taken back while the guest works" reclaimed mapped 0 40 --kernel "$first" --iommu pviommu
try "reclaimed: nothing is, where devices see all memory" reclaimed all 100 100 --kernel "$first" --iommu none
try "as-published: the paper's cache shows its defects, ours does not" as_published --kernel "$first"
try "kept: what was unmapped is reached, with the cache" kept --kernel "$first"
all_passed
