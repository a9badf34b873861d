#!/usr/bin/env bash
# Stock Debian guests with devices behind the para-virtual IOMMU. The module in kmod/ drives it: see
# docs/GUEST.md and README.md.
#
#   tests/guest/pviommu.sh          build, run all cases, print a line each; exit code 0/1
#   tests/guest/pviommu.sh errant   run only the cases whose names begin with this
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# A case whose kernel crashes on purpose sets this to the empty string.
log_check=--check-kernel-log
run() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" \
        --module-source "$repo/kmod" $log_check "$@"
}
boot_guest() { run --iommu pviommu "$@"; }

# counter NAME [DEVICE]: prints a counter of the module from the guest's output.
counter() { sed -n "s#^.*/${2:-0000:00:04.0}/$1:\([0-9]*\)\r*\$#\1#p" "$log" | tail -n 1; }
# holds NAME OP NUMBER [DEVICE]: compares a counter, and prints a failed comparison.
holds() {
    local value
    value=$(counter "$1" ${4:-})
    [[ $value ]] && [ "$value" "$2" "$3" ] && return
    echo "$1 is ${value:-missing}, not $2 $3"
    return 1
}
# Makes a file system, writes, and compares checksums after a remount. Then unloads the module: the
# disk has no driver, and works again after the module is loaded.
readonly FILES='set -e
mke2fs /dev/vda >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/vda /m
dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before
umount /m; echo same
dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null
grep -r . /sys/kernel/debug/pviommu
rmmod pviommu; [ ! -e /dev/vda ]; [ ! -e /sys/bus/pci/devices/0000:00:04.0/driver ]; echo unloaded
insmod /modules/pviommu.ko; echo 0000:00:04.0 >/sys/bus/pci/drivers/virtio-pci/bind
while [ ! -b /dev/vda ]; do usleep 100000; done
mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo again'
files() {
    local cache_on=$1
    shift
    boot_guest --module-args "cache=$cache_on" "$@" --metrics -- sh -c "$FILES$MASTER" || return 1
    log_has '^same' && log_has '^unloaded' && log_has '^again' && log_has '^mastered' &&
        log_has 'ringfence_faults_total{device="pviommu"} 0' &&
        log_has 'ringfence_failed_total{device="pviommu"} 0' &&
        holds maps -gt 1000 && holds failures -eq 0 && holds lost -eq 0 &&
        holds live -le 2 || return 1
    if ((cache_on)); then
        holds hits -gt 3000 || return 1
    else
        holds kept -eq 0 && holds hits -eq 0 || return 1
    fi
    echo "$(counter maps) maps, $(counter hits) hits" >"$case/note"
}

# The IOMMU stops errant accesses of the devices. The guest's own log names device, address and
# access. With the cache, devices reach unmapped pages for a bounded time.
# The argument of the guest's program is the number of accesses that the guest logs.
readonly READS=$LOGGED'for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; logged $1 "was stopped"'
errant() {
    local classes=stray:dead0000,after-unmap,write-read-only,read-write-only,foreign
    boot_guest --module-args "cache=0" "$@" --rng --inject-dma "$classes" --metrics -- \
        sh -c "$READS" reads 5 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class device access at
    for class in stray after-unmap write-read-only read-write-only foreign; do
        access=write device=04
        [[ $class != read-write-only ]] || access=read
        [[ $class != foreign ]] || device=06
        at=$(stopped_at "$access" "$class")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        log_has "0000:00:$device.0 was stopped: a $access at $at" || return 1
    done
    log_has 'ringfence_faults_total{device="pviommu"} 5' &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0'
}
# The disk is a sandboxed process that can access only the module's mappings. The IOMMU stops its
# errant accesses, and the guest's log names them.
errant_in_sandbox() {
    local classes=stray:dead0000,after-revoke,write-read-only,read-write-only
    boot_guest --module-args "cache=0" "$@" --disk mode=sandbox --inject-dma "$classes" \
        --metrics -- \
        sh -c "$READS" reads 4 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    local class access at
    for class in stray after-revoke write-read-only read-write-only; do
        access=write
        [[ $class != read-write-only ]] || access=read
        at=$(stopped_at "$access" "$class")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        log_has "0000:00:04.0 was stopped: a $access at $at" || return 1
    done
    log_has 'ringfence_faults_total{device="pviommu"} 4' &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0'
}
# total NAME DEVICE: prints a counter of the host's side.
total() { sed -n "s/^ringfence_$1_total{device=\"$2\"} \([0-9]*\)\$/\1/p" "$log" | tail -n 1; }
# The hardware model translates the disk's accesses. All data of a file is correct, every page
# passed the model's IOMMU, and the host allocated frames on demand. With the page pool and the
# last-table pointer, the guest waited for no frame, and the host made fewer walks.
assigned() {
    local pool=$1 cache_on=$2
    shift 2
    ((pool)) && set -- "$@" --host-page-pool
    files "$cache_on" "$@" --disk mode=assigned || return 1
    local walks reads hits frames awaited refills pointer
    walks=$(total unit_walks blk) reads=$(total unit_reads blk) hits=$(total unit_hits blk)
    frames=$(total frames pviommu) awaited=$(total frames_awaited pviommu)
    refills=$(total pool_refills pviommu) pointer=$(total last_table_hits pviommu)
    ((walks > 1000 && reads >= walks && reads <= 4 * walks && hits > walks && frames > 0)) ||
        return 1
    if ((pool)); then
        ((refills > 0 && pointer > 0)) || return 1
    else
        ((awaited == frames && refills == 0 && pointer == 0)) || return 1
    fi
    echo "$walks walks with $reads reads, $hits hits; $frames frames, $awaited of them awaited," \
        "$refills refills, $pointer hits of the last-table pointer" >>"$case/note"
}

# With the cache, a device reaches an unmapped buffer.
kept() {
    boot_guest --module-args "cache=1" "$@" --inject-dma after-unmap --metrics -- \
        sh -c "$READS" reads 0 2>&1 | grep -v 'service_seconds\|^#'
    log_has 'injected write (after-unmap) at .*: not stopped' &&
        log_has 'injected_permitted_total{device="blk"} 1'
}

# The cache of the PVIOMMU paper permits accesses to a page only in the direction of its first
# mapping. virtio-blk keeps headers and statuses of requests in the same pages. If the driver maps
# the header first, the device cannot write the status. If it maps the status first, the device
# cannot read the header. The fixed cache has neither defect.
readonly BOTH_WAYS=$LOGGED'dd if=/dev/vda of=/dev/null bs=4k count=8 iflag=direct 2>/dev/null
dd if=/dev/vda of=/dev/vda bs=4k count=1 iflag=direct oflag=direct 2>/dev/null && echo copied
logged $1 "was stopped: a write"'
as_published() {
    local faults lost
    boot_guest --as-published "$@" --metrics -- \
        sh -c "$BOTH_WAYS; lsmod | grep pviommu" both 1 || return 1
    faults=$(total faults pviommu) lost=$(total malformed blk)
    log_has 'pviommu-as-published: the paper.s key and one bit' &&
        log_has '^pviommu_as_published' &&
        log_has '0000:00:04.0 was stopped: a write at .*, not in this direction' &&
        ((faults >= 8 && lost > 0)) || return 1
    : >"$log"
    boot_guest --module-args "cache=1" "$@" --metrics -- sh -c "$BOTH_WAYS" both 0 || return 1
    log_has '^copied' &&
        [[ $(total faults pviommu) == 0 && $(total malformed blk) == 0 ]] || return 1
    echo "paper's cache: $faults accesses stopped, $lost statuses lost; fixed cache: none" \
        >"$case/note"
}

# A device faults as fast as it can. The guest continues, and its log stays short. While a read
# waits for the disk, whose thread causes the storm, a shell counts its sleeps of 10 ms, without a
# new process for each. Then it prints the number of events that the module has handled, the
# interrupts, and the time in hundredths of a second. A slower guest handles less in this time.
readonly STORMED='now() { read up _ </proc/uptime; echo ${up%.*}${up#*.}; }
events() { cat /sys/kernel/debug/pviommu/virtio*/events; }
'"$INTERRUPTS"'
from=$(now); before=$(events); interrupted=$(interrupts events); naps=0
mkfifo /silent; exec 9<>/silent
dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null &
while kill -0 $! 2>/dev/null; do read -t 0.01 -u 9 never; naps=$((naps + 1)); done
events=$(($(events) - before)); interrupts=$(($(interrupts events) - interrupted))
hundredths=$(($(now) - from)); lines=$(dmesg | grep -c "was stopped")
storm="$events events, $interrupts interrupts, $naps naps"
echo "storm: $storm, $hundredths hundredths, $lines lines"'
stormed() {
    local events interrupts naps hundredths lines faults
    boot_guest "$@" --inject-dma storm:dead0000 --metrics -- sh -c "$STORMED" 2>&1 |
        grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    faults=$(total faults pviommu)
    read -r events interrupts naps hundredths lines <<<"$(storm_of events)"
    echo "$faults faults in $hundredths hundredths of a second: $events events read," \
        "$interrupts interrupts, $lines lines logged, $naps naps" >"$case/note"
    ((naps >= 3 && events > 0)) || return 2
    # At most an interrupt and 16 events in 10 ms, and 10 lines in 5 s.
    ((faults >= 1000000 && events <= 16 * hundredths + 32 &&
        interrupts <= hundredths + 2 && lines <= 10 + hundredths / 50))
}

# The cache is full: a mapping that does not fit is unmapped at once, and the worker frees entries.
# All data is correct.
full() {
    boot_guest --module-args "cache=1 limit=64" "$@" --metrics -- sh -c "$FILES" || return 1
    log_has '^same' && log_has '^again' &&
        log_has 'ringfence_faults_total{device="pviommu"} 0' &&
        log_has 'ringfence_failed_total{device="pviommu"} 0' &&
        holds full -gt 10 && holds forced -gt 10 && holds kept_pages -le 64 &&
        holds failures -eq 0 && holds lost -eq 0 || return 1
    echo "$(counter full) maps found the cache full, $(counter forced) mappings evicted early," \
        "$(counter hits) hits" >"$case/note"
}

# Mappings without users expire after C to C + 1 cycles, all those of a cycle at once.
readonly EXPIRE='dd if=/dev/vda of=/dev/null bs=64k count=100 iflag=direct 2>/dev/null
left=600
until grep -qx 0 /sys/kernel/debug/pviommu/*/0000:00:04.0/kept || [ $left = 0 ]; do
    left=$((left - 1)); usleep 100000
done
grep -r . /sys/kernel/debug/pviommu'
expired() {
    boot_guest --module-args "cache=1 t_ms=400 c=2" "$@" -- sh -c "$EXPIRE" &&
        holds kept -eq 0 && holds expired -gt 10 && holds failures -eq 0 && holds live -ge 1
}

# The host answers late, twice, to another request, or never. The guest's log reports it, the guest
# continues and ends, and the module can be unloaded.
readonly WRONG=$LOGGED'dd if=/dev/vda of=/dev/null bs=4k count=300 iflag=direct 2>/dev/null &
sleep $1; logged 1 "$2" >/dev/null; echo alive; dmesg | grep "pviommu virtio"
rmmod pviommu && echo unloaded'
wrong_answers() {
    local how=$1 seconds=$2 text=$3
    shift 3
    boot_guest --module-args "cache=0" "$@" --inject-reply "$how" -- \
        sh -c "$WRONG" wrong "$seconds" "$text" &&
        log_has '^alive' && log_has "$text" && log_has '^unloaded'
}

# The guest removes the disk from its bus while the disk works, and adds it again. The disk is then
# behind the module as before, and its counters continue.
readonly REPLUGGED='set -e
dd if=/dev/urandom of=/dev/vda bs=64k count=16 2>/dev/null; sync
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum >/tmp/before
for n in 1 2 3; do
    dd if=/dev/vda of=/dev/null bs=4k count=100000 iflag=direct 2>/dev/null & usleep 300000
    echo 1 >/sys/bus/pci/devices/0000:00:04.0/remove; wait; [ ! -e /dev/vda ]
    echo live $(cat /sys/kernel/debug/pviommu/*/0000:00:04.0/live)
    echo 1 >/sys/bus/pci/rescan
    while [ ! -b /dev/vda ]; do usleep 100000; done
    grep -h . /sys/kernel/debug/pviommu/*/0000:00:04.0/maps
done
dd if=/dev/vda bs=64k count=16 2>/dev/null | md5sum | cmp - /tmp/before; echo same
grep -r . /sys/kernel/debug/pviommu
dmesg | grep -i "already present\|the driver left" || echo clean
rmmod pviommu; echo unloaded'
replugged() {
    boot_guest --module-args "cache=1" "$@" --metrics -- sh -c "$REPLUGGED" || return 1
    log_has '^same' && log_has '^clean' && log_has '^unloaded' &&
        [[ $(grep -c '^live 0' "$log") == 3 ]] &&
        log_has 'ringfence_failed_total{device="pviommu"} 0' &&
        holds failures -eq 0 && holds lost -eq 0 || return 1
    # The counters continue: the last number is the largest.
    local numbers
    numbers=$(grep '^[0-9][0-9]*.\?$' "$log" | tr -d '\r')
    [[ $(sort -n <<<"$numbers" | tail -n 1) == "$(tail -n 1 <<<"$numbers")" ]]
}
# A resume would reset the device. The module therefore refuses the suspend. The guest continues.
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

# A second kernel, started with kexec, finds the disk as the first one left it. Linux resets the
# IOMMU again before it loads a module.
second_kernel() {
    local kernel=$1
    start_disk "$kernel" || return 1
    boot_guest --kernel "$kernel" --module-args cache=1 --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kexec true "$COUNTERS" 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] && second_kernel_works
}
readonly COUNTERS='grep -r . /sys/kernel/debug/pviommu'
second_kernel_works() {
    log_has '^first kernel' && log_has '^second kernel' && log_has '^same' &&
        log_has '^written' && log_has '^clean' &&
        log_has 'ringfence_faults_total{device="pviommu"} 0' &&
        log_has 'ringfence_failed_total{device="pviommu"} 0' &&
        holds maps -gt 0 && holds failures -eq 0 && holds lost -eq 0
}

# The same after a crash while the disk works. The kernel shuts nothing down and does not empty the
# cache.
crash_kernel() {
    local kernel=$1 append="$append crashkernel=192M" log_check=
    start_disk "$kernel" || return 1
    boot_guest --memory 768 --kernel "$kernel" --module-args cache=1 \
        --disk "${case//,/,,}/disk" --metrics -- \
        sh -c "$KEXEC" kdump true "$COUNTERS" --crash 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] && second_kernel_works
}

# The kernel has no 8 MiB of contiguous memory. Coherent memory of this size therefore consists of
# single pages, which the host maps and unmaps.
readonly COHERENT='rmmod dma_count 2>/dev/null; insmod /modules/dma_count.ko coherent=65536
rmmod dma_count 2>/dev/null; insmod /modules/dma_count.ko coherent=8388608
dmesg | grep "of coherent memory"; grep -r . /sys/kernel/debug/pviommu
dd if=/dev/vda of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null && echo reads'
coherent() {
    boot_guest --with-module dma_count "$@" --metrics -- sh -c "$COHERENT" || return 1
    log_has '65536 bytes of coherent memory, contiguous' &&
        log_has '8388608 bytes of coherent memory, single pages' && log_has '^reads' &&
        holds failures -eq 0 && holds lost -eq 0 &&
        log_has 'ringfence_failed_total{device="pviommu"} 0'
}

# While a guest works, the host reclaims its memory through control groups. The module's mapped
# pages stay in memory, and all data is unchanged. If devices can access all of a guest's memory,
# all of it must stay.
# reclaimed LOCK LEAST MOST OPTION...: LOCK is the guest memory that the host locks. LEAST and MOST
# bound the pages that stay, in per cent of those that were in memory before.
readonly RECLAIMED='set -e; mkdir -p /t; mount -t tmpfs -o size=300m none /t
dd if=/dev/urandom of=/t/f bs=64k count=800 2>/dev/null; md5sum </t/f >/before
for n in 1 2 3 4; do cp /t/f /t/$n; done; echo ready
dd if=/dev/urandom of=/dev/vda bs=4k count=1000 oflag=direct 2>/dev/null
dd if=/dev/vda of=/t/g bs=4k count=1000 iflag=direct 2>/dev/null
md5sum </t/f | cmp - /before
dd if=/dev/vda bs=64k count=63 2>/dev/null | cmp -n 4096000 - /t/g; echo same'
reclaimed() {
    local lock=$1 least=$2 most=$3 status before after locked
    shift 3
    # The host can reclaim only memory backed by a file system on a disk.
    local memory group=ringfence-$$-$lock
    memory=$(mktemp -d -p "$target" memory.XXXXXX)
    python3 "$here/reclaim.py" enter "$group" "$ringfence" guest run --cache "$cache" \
        --timeout "$LIMIT" --append "$append" --module-source "$repo/kmod" --check-kernel-log "$@" \
        --memory-file "$memory/guest" --lock "$lock" --metrics -- sh -c "$RECLAIMED" \
        </dev/null >"$case/guest" 2>&1 &
    python3 "$here/reclaim.py" take "$group" "$memory/guest" "$case/guest" 3
    status=$?
    wait $! || status=1
    grep -v 'service_seconds\|^#' "$case/guest"
    rm -rf "$memory"
    ((status == 0)) && log_has '^same' || return 1
    read -r before after locked <<<"$(sed -n 's/^taken: //p' "$log")"
    echo "$((after / 256)) of $((before / 256)) MiB stayed in memory," \
        "$locked pages of them locked" >"$case/note"
    ((after * 100 >= before * least && after * 100 <= before * most))
}

# Transfers data between two guests through the module's mappings.
network() {
    talk pviommu 'grep -r . /sys/kernel/debug/pviommu' -- boot_guest --module-args "cache=1" "$@" &&
        holds maps -gt 1000 0000:00:05.0 && holds failures -eq 0 0000:00:05.0
}

# Experiment X21 counts under -icount the instructions of a map and its unmap, and the doorbells of
# a direct read of 4 KiB. The case compares them with those of the stock virtio-iommu, strict.
counted() {
    limited "$ringfence" reproduce X21 --guest-cache "$packed" --guest-timeout "$LIMIT" \
        --module-source "$repo/kmod" --guest-kernel "$1" --guest-kind emulated \
        --guest-configuration pviommu+rtc,virtio-strict --json >"$case/x21.json" || return 1
    python3 - "$case/x21.json" >"$case/note" <<'END'
import json, re, sys
(found,) = json.load(open(sys.argv[1]))["findings"]
measured = {row["quantity"]: row["measured"]["median"] for row in found["rows"] if row["measured"]}
def one(which, what):
    # Brackets after a name contain the device, and the cache if the configuration has one.
    name = re.compile(rf"emulated \([^)]*\), {re.escape(which)}( \([^)]*\))?: {what}")
    (value,) = [value for quantity, value in measured.items() if name.fullmatch(quantity)]
    return value
def of(what):
    return [one(which, what) for which in ("pviommu+rtc", "virtio-strict")]
ours, stock = of("guest instructions per map and unmap")
rung, stock_rung = of("exits for IOMMU requests per 4 KiB read")
print(f"a map and its unmap: {ours:.0f} instructions with a hit, "
      f"{stock:.0f} behind virtio-iommu ({ours / stock:.4f});"
      f" doorbells per read: {rung:.4f}, {stock_rung:g} behind virtio-iommu")
if ours > stock / 10 or rung > 0.1 or stock_rung < 8:
    sys.exit("more than a tenth of virtio-iommu's instructions, more than a tenth of a doorbell, "
             "or fewer than 8 doorbells of virtio-iommu")
END
}

choose_kernels --iommu pviommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "files: $kernel, cached" files 1 --kernel "$kernel"
    try "files: $kernel, not cached, two CPUs" files 0 --kernel "$kernel" --cpus 2
    try "errant accesses are stopped and logged: $kernel" errant --kernel "$kernel"
    try "sandboxed: files: $kernel, not cached" files 0 --kernel "$kernel" --disk mode=sandbox
    try "sandboxed: files: $kernel, cached, two CPUs" \
        files 1 --kernel "$kernel" --cpus 2 --disk mode=sandbox
    try "sandboxed: errant accesses are stopped and logged: $kernel" \
        errant_in_sandbox --kernel "$kernel"
    try "assigned: files: $kernel, not cached" assigned 0 0 --kernel "$kernel"
    try "assigned: files: $kernel, cached, with the host's page pool" \
        assigned 1 1 --kernel "$kernel"
    try "assigned: errant accesses are stopped and logged: $kernel" \
        errant --kernel "$kernel" --disk mode=assigned
    try "replugged while the disk works: $kernel" replugged --kernel "$kernel"
    try "suspended: the module refuses it: $kernel" suspended --kernel "$kernel"
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
    try "wrong answers, never: $kernel" \
        wrong_answers never:50 14 'not answered in 10 s' --kernel "$kernel"
    try "wrong answers, late: $kernel" \
        wrong_answers late:50 16 'not answered in 10 s' --kernel "$kernel"
    try "wrong answers, twice: $kernel" \
        wrong_answers twice:50 3 'completed a request that was not pending' --kernel "$kernel"
    try "wrong answers, foreign: $kernel" \
        wrong_answers foreign:50 3 'completed a request that was not pending' --kernel "$kernel"
done
first=6.12
[[ $KERNELS != debug ]] || first=debug
try "reclaimed: pages that are not mapped, while the guest works" \
    reclaimed mapped 0 40 --kernel "$first" --iommu pviommu
try "reclaimed: no page, if devices can access all memory" \
    reclaimed all 100 100 --kernel "$first" --iommu none
try "as-published: the paper's cache has its defects, the fixed cache does not" \
    as_published --kernel "$first"
try "kept: with the cache, a device reaches an unmapped buffer" kept --kernel "$first"
all_passed
