#!/usr/bin/env bash
# Stock Debian guests with a disk that `ringfence` serves, behind its virtio-iommu: see
# docs/GUEST.md and README.md.
#
#   tests/guest/live.sh                    build, run all cases, print a line each; exit code 0/1
#   tests/guest/live.sh errant killed      run only the cases whose names begin with these words
#   GUEST_KILLS=5 tests/guest/live.sh      kill the daemon this many times (default: 20)
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

readonly KILLS=${GUEST_KILLS:-20}
. "$(dirname "$0")/guests.sh"

run() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" "$@"
}

# Makes a file system, writes, and compares checksums after a remount.
readonly FILES='set -e
mke2fs /dev/vda >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/vda /m
dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before
umount /m; echo same'
files() {
    run "$@" --metrics -- sh -c "$FILES$MASTER" && log_has '^same' && log_has '^mastered' &&
        log_has 'ringfence_faults_total{device="iommu"} 0'
}

# The IOMMU stops errant accesses of the devices. The guest's own log names endpoint, address and
# access. The large read leaves unmapped addresses that the small ones do not reuse.
# The argument of the guest's program is the number of accesses that the guest logs.
readonly READS=$LOGGED'for n in 1 2; do
    dd if=/dev/vda of=/dev/null bs=64k count=2 iflag=direct 2>/dev/null
    dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null
done; logged $1 "page fault from EP\|fault addr"'
# named CLASS ACCESS LETTER ENDPOINT: succeeds if the device tried the access, the IOMMU stopped it
# and the guest logged its address.
named() {
    local at
    at=$(stopped_at "$2" "$1")
    [[ $at ]] || { echo "not tried or not stopped: $1"; return 1; }
    log_has "page fault from EP $4 at $at \[$3\]"
}
errant() {
    local classes=stray:dead0000,after-unmap,write-read-only,read-write-only,foreign
    run "$@" --rng --inject-dma "$classes" --metrics -- sh -c "$READS" reads 5 2>&1 |
        grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    named stray write W 32 && named after-unmap write W 32 &&
        named write-read-only write W 32 && named read-write-only read R 32 &&
        named foreign write W 48 || return 1
    # The IOMMU stopped no other access and permitted no errant one.
    log_has 'ringfence_faults_total{device="iommu"} 5' &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0'
}
# The same with a sandboxed disk, and without a second device. The disk bypasses its own
# translation, and the permissions of the pages stop it.
errant_in_sandbox() {
    local classes=stray:dead0000,after-revoke,write-read-only,read-write-only
    run "$@" --disk mode=sandbox --inject-dma "$classes" --metrics -- \
        sh -c "$READS" reads 4 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    named stray write W 32 && named after-revoke write W 32 &&
        named write-read-only write W 32 && named read-write-only read R 32 &&
        log_has 'ringfence_faults_total{device="iommu"} 4' &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0'
}
# count NAME: prints a counter of the disk.
count() { sed -n "s/^ringfence_$1_total{device=\"blk\"} //p" "$log"; }
# The disk is a vhost-user back-end behind QEMU's own IOMMU. It requests every translation from
# QEMU's front-end, caches it, and drops it on an invalidation.
back_end() {
    run "$@" --metrics -- sh -c "$FILES" && log_has '^same' &&
        log_has 'ringfence_faults_total{device="blk"} 0' || return 1
    local name text=
    for name in iotlb_misses iotlb_updates iotlb_invalidations; do
        (($(count $name) > 0)) || { echo "the counter is 0: $name"; return 1; }
        text+="${text:+, }$(count $name) $name"
    done
    echo "$text, $(count requests) requests" >"$case/note"
}
# The back-end also requests the translations of errant accesses from QEMU. QEMU refuses them, and
# the guest's own log shows that. The disk reads the read-only page before it writes to it, because
# QEMU then reports the page as writable.
back_end_errant() {
    local iommu=$1 class at named logged=2
    shift
    [[ $iommu != intel ]] || logged=1
    run --iommu "qemu-$iommu" "$@" --inject-dma stray:dead0000,write-read-only --metrics -- \
        sh -c "$READS" reads $logged 2>&1 | grep -v 'service_seconds\|^#'
    [[ ${PIPESTATUS[0]} == 0 ]] || return 1
    for class in stray write-read-only; do
        at=$(stopped_at write "$class")
        [[ $at ]] || { echo "not tried or not stopped: $class"; return 1; }
        # QEMU's intel-iommu keeps one fault until the driver has fetched it, so only the first
        # fault is certain to be logged, with its page. Its virtio-iommu does not log the kind of
        # access to an unmapped address.
        case $iommu-$class in
            intel-stray) named="Request device \[\(0000:\)\?00:04.0\] fault addr ${at%???}000 " ;;
            intel-*) continue ;;
            virtio-*) named="page fault from EP 32 at $at \[W\?\]" ;;
        esac
        log_has "$named" || return 1
    done
    log_has 'ringfence_faults_total{device="blk"} 2' &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 0' &&
        log_has 'ringfence_failed_total{device="blk"} 0'
}

# Without an IOMMU the same accesses succeed. The case `errant` therefore tests the IOMMU.
errant_without_iommu() {
    run --kernel 6.12 --iommu none --inject-dma stray:1f000000,read-write-only --metrics -- \
        sh -c "$READS" reads 0 &&
        log_has 'ringfence_injected_permitted_total{device="blk"} 2'
}
# The output of the command is complete to its last line.
exit_code() {
    cache=$packed append= run --kernel 6.12 -- sh -c 'seq 20000; exit 7'
    [[ $? == 7 ]] && log_has '^20000'
}

# Transfers data between two guests through a socket, each guest with its own process.
network() { talk iommu -- run "$@"; }

# The same with the host, through a tap interface in a separate network namespace.
tap() {
    unshare --map-root-user --net bash -c '
        log=$1; talk=$2; shift 2
        "$@" -- sh -c "$talk" talk 1 >"$log" 2>&1 </dev/null &
        until busybox ip link set tap0 up 2>/dev/null; do kill -0 $! || exit 1; sleep 0.1; done
        busybox ip addr add 10.9.0.2/24 dev tap0
        head -c 4194304 /dev/urandom >"$log.mine"
        until busybox nc 10.9.0.1 7 <"$log.mine"; do
            kill -0 $! || exit 1
            sleep 0.2
        done 2>/dev/null
        busybox nc -l -p 7 -e sh -c "cat >$log.theirs"
        wait $!' bash "$case/net" "$TALK" \
        timeout --kill-after=10 $((LIMIT + 30)) "$ringfence" guest run --cache "$cache" \
        --timeout "$LIMIT" --append "$append" --net tap=tap0 "$@" &&
        [[ $(sum mine "$case/net") == "$(md5sum <"$case/net.theirs" | cut -d" " -f1)" ]] &&
        [[ $(sum theirs "$case/net") == "$(md5sum <"$case/net.mine" | cut -d" " -f1)" ]]
}

# The events traced by the guest's kernel since boot equal the requests to its IOMMU. `compare`
# replays the trace in all modes, and the model of the kernel's allocator returns every address that
# the kernel recorded.
traced() {
    local out verified append="$append trace_event=dma:*,iommu:map,iommu:unmap trace_buf_size=24M"
    run "$@" --strict --record-requests "$case/requests" -- sh -c \
        'for place in 0 1 2; do
            dd if=/dev/vda of=/dev/null bs=4k count=500 skip=$((place * 1000)) iflag=direct \
                2>/dev/null &
        done
        dd if=/dev/vda of=/dev/null bs=128k count=100 iflag=direct 2>/dev/null
        wait
        dd if=/dev/zero of=/dev/vda bs=64k count=30 conv=fsync 2>/dev/null
        gzip -c </sys/kernel/tracing/trace' >"$case/trace.gz" || return 1
    gunzip -c "$case/trace.gz" >"$case/guest.trace" &&
        out=$(python3 "$here/agree.py" "$case/requests" "$case/guest.trace") || {
        echo "$out"
        return 1
    }
    "$ringfence" compare --all-modes --json "$case/guest.trace" >"$case/compare.json" &&
        python3 "$repo/tests/compare/check.py" "$case/compare.json" || return 1
    verified=$("$ringfence" trace verify --from-boot "$case/guest.trace") || {
        echo "$verified"
        return 1
    }
    echo "$out; ${verified%%$'\n'*}" >"$case/note"
}

# Makes random accesses, legal and errant, to the guest's mappings, through our IOMMU and through
# QEMU's own.
judged() {
    limited "$ringfence" guest verify-qemu --cache "$cache" --timeout "$LIMIT" \
        --append "$append" --cases 2000 "$@" &&
        grep '^seed' "$log" >"$case/note"
}

# Counts the instructions of a read of 4 KiB. Two equal runs have equal counters, and a third run
# with 500 more reads gives the counters per read. The medians of the reads that waited for the disk
# differ by less than a thousandth. The case repeats a run in which most reads did not wait, or
# whose median is the outlier, because the host disturbed this run. It repeats at most six runs and
# reports them in the note.
counted() {
    local again=(first second more) left=6 one cache=$packed append=
    while :; do
        for one in "${again[@]}"; do counted_run "$one" "$@" || return 1; done
        diff "$case/first.counters" "$case/second.counters" &&
            [[ -s $case/first.counters ]] || return 1
        python3 "$here/counted.py" "$case" >"$case/result"
        again=($(sed -n 's/^disturbed: \([a-z]*\).*/\1/p' "$case/result"))
        ((${#again[@]} && left--)) || break
        cat "$case/result" >>"$case/note"
    done
    cat "$case/result" | tee -a "$case/note"
    ((${#again[@]} == 0)) && grep -q '^a read: ' "$case/result"
}
# counted_run NAME OPTION...: stores the output and the counters of a run.
counted_run() {
    local one=$1 reads=500
    shift
    [[ $one != more ]] || reads=1000
    run "$@" --icount --with-ringfence --metrics -- \
        ringfence guest bench-read /dev/vda --count $reads >"$case/$one" 2>&1 ||
        { cat "$case/$one"; return 1; }
    grep '^[0-9]* reads\|^waited\|^at once' "$case/$one"
    local counters='\(requests\|doorbells\|maps\|unmaps\)_total{device="\(iommu\|blk\)"}'
    grep "^ringfence_$counters" "$case/$one" >"$case/$one.counters"
}

# Kills the process with the devices while the guest writes numbered blocks and flushes each one
# before reporting it; in every other round it also writes unflushed blocks. All reported blocks
# must be in the image, including the last one, which is reported at the time of the kill. No
# process of the guest may remain.
readonly WRITES='[ $0 = alone ] || while :; do
    dd if=/dev/zero of=/dev/vda bs=256k seek=200 count=40 conv=notrunc oflag=direct 2>/dev/null
done &
n=1; while [ $n -lt 12000 ]; do
    yes $n | head -c 4096 | dd of=/dev/vda bs=4096 seek=$n conv=notrunc,fsync 2>/dev/null &&
        echo done $n
    n=$((n+1))
done'
# runs_with TEXT: succeeds if the arguments of a process contain this text.
runs_with() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        [[ $(tr '\0' ' ' <"$file") != *"$1"* ]] || return 0
    done 2>/dev/null
    return 1
}
killed() {
    local image=$case/image run=$case/run after=$1 kernel=$2 beside=$3
    shift 3
    truncate -s 64M "$image"
    mkfifo "$case/reports"
    "$ringfence" guest run --cache "$cache" --kernel "$kernel" --timeout "$LIMIT" \
        --append "$append" --dir "$run" --disk "$image" "$@" -- sh -c "$WRITES" "$beside" \
        >"$case/reports" </dev/null &
    local daemon=$! reports line
    exec {reports}<"$case/reports"
    while read -r -t "$LIMIT" -u $reports line; do
        echo "$line"
        [[ ${line%$'\r'} != "done $after" ]] || break
    done >"$case/done"
    kill -KILL $daemon
    wait $daemon 2>/dev/null
    timeout 60 cat <&$reports >>"$case/done"
    exec {reports}<&-
    python3 - "$case/done" "$image" "$after" <<'END' || return 1
import re, sys
reported = [int(n) for n in re.findall(rb"^done (\d+)\r*\n", open(sys.argv[1], "rb").read(), re.M)]
image = open(sys.argv[2], "rb").read()
if len(reported) < int(sys.argv[3]) or reported != list(range(1, len(reported) + 1)):
    sys.exit(f"reported: {reported[-3:]}")
for n in reported:
    line = b"%d\n" % n
    if image[n * 4096 : n * 4096 + 4096] != (line * 4096)[:4096]:
        sys.exit(f"block {n} of {len(reported)} is not in the image")
END
    for _ in $(seq 600); do
        runs_with "$run/initramfs" || return 0
        sleep 0.1
    done
    echo "a process of the guest still runs"
    return 1
}

# A QEMU started by hand, with the arguments that `serve` prints and the output of `guest prepare`.
by_hand() {
    local run=$case/run out=$case/out cache=$packed
    truncate -s 64M "$case/image"
    "$ringfence" serve --dir "$run" --disk "$case/image" --rng >"$case/arguments" &
    local daemon=$!
    "$ringfence" guest prepare --cache "$cache" --kernel "$1" --initramfs "$case/initramfs" -- \
        sh -c 'dd if=/dev/vda of=/dev/null bs=4k count=100 iflag=direct 2>/dev/null &&
            head -c 8 /dev/hwrng | wc -c' >"$case/prepared"
    . "$case/prepared"
    until [[ -s $case/arguments ]]; do kill -0 $daemon || return 1; sleep 0.05; done
    eval "timeout --kill-after=10 $LIMIT $QEMU $(<"$case/arguments")" -display none \
        -kernel '"$KERNEL"' -initrd '"$INITRAMFS"' -append '"$APPEND"' \
        -serial 'file:"$case/console"' -serial 'file:"$out"' \
        -serial 'file:"$case/status"' </dev/null
    local code=$?
    kill -INT $daemon
    # The daemon exits with success and leaves no socket.
    wait $daemon && ((code == 0)) && grep -q '^8' "$out" &&
        grep -q '^status 0' "$case/status" && [[ ! -e $run/blk.sock ]]
}

choose_kernels
for kernel in $KERNELS; do
    for mode in --strict --lazy; do
        for cpus in 1 2; do
            try "files: $kernel $mode --cpus $cpus" files --kernel "$kernel" $mode --cpus $cpus
        done
    done
    try "errant accesses are stopped and logged: $kernel" errant --kernel "$kernel"
    try "sandboxed: files: $kernel" files --kernel "$kernel" --strict --disk mode=sandbox
    try "sandboxed: files, lazy, 2 CPUs: $kernel" \
        files --kernel "$kernel" --lazy --cpus 2 --disk mode=sandbox
    try "sandboxed: errant accesses are stopped and logged: $kernel" \
        errant_in_sandbox --kernel "$kernel"
    for iommu in intel virtio; do
        for mode in --strict --lazy; do
            try "vhost-user behind $iommu-iommu: $kernel $mode" \
                back_end --iommu qemu-$iommu --kernel "$kernel" $mode
        done
        try "vhost-user: $iommu-iommu refuses errant accesses: $kernel" \
            back_end_errant $iommu --kernel "$kernel"
    done
    for cpus in 1 2; do
        try "traced: events, requests and addresses agree: $kernel --cpus $cpus" \
            traced --kernel "$kernel" --cpus $cpus
    done
    try "judged by QEMU, strict: $kernel" judged --kernel "$kernel" --strict --seed 1
    try "judged by QEMU, lazy: $kernel" judged --kernel "$kernel" --lazy --seed 2
    try "by hand: $kernel" by_hand "$kernel"
    try "network between guests: $kernel, strict" network --kernel "$kernel" --strict
    try "network between guests: $kernel, lazy" network --kernel "$kernel" --lazy
done
# This case needs a tap device and permission to create a namespace.
if [[ -c /dev/net/tun ]] && unshare --map-root-user --net true 2>/dev/null; then
    try "network with the host" tap --kernel 6.12
else
    echo "skipped: network with the host (no /dev/net/tun, or no namespaces)"
fi
try "errant accesses succeed without an IOMMU" errant_without_iommu
try "exit code" exit_code
try "counted: two runs make equal requests" counted --kernel 6.12
for n in $(seq "$KILLS"); do
    # Kill after 3 to 60 blocks, a different number each time. The kernels alternate, each with and
    # without concurrent writes.
    kernels=($KERNELS)
    beside=$([[ $((n / 2 % 2)) == 0 ]] && echo alone || echo beside)
    try "killed, $n, $beside" killed $((3 * n)) "${kernels[n % ${#kernels[@]}]}" $beside
done
# The same behind the ring IOMMU.
for n in $(seq "$KILLS"); do
    kernels=($KERNELS)
    beside=$([[ $((n / 2 % 2)) == 0 ]] && echo alone || echo beside)
    try "ring, killed, $n, $beside" killed $((3 * n)) "${kernels[n % ${#kernels[@]}]}" $beside \
        --iommu riommu --module-source "$repo/kmod"
done
all_passed
