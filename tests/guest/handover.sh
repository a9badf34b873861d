#!/usr/bin/env bash
# Hands a guest's devices over from one process to the next while the guest writes: see
# docs/HANDOVER.md and README.md.
#
#   tests/guest/handover.sh                       build, run all cases, print a line each; exit
#                                                 code 0/1
#   tests/guest/handover.sh stock                 run only the cases whose names begin with this
#   GUEST_HANDOVERS=5 tests/guest/handover.sh     number of consecutive hand-overs (default: 20)
#   GUEST_REQUESTS=100 tests/guest/handover.sh    requests that complete while each hand-over copies
#                                                 (default: 1000)
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

readonly HANDOVERS=${GUEST_HANDOVERS:-20}
readonly REQUESTS=${GUEST_REQUESTS:-1000}
. "$(dirname "$0")/guests.sh"

# Until a line arrives, repeatedly writes 4 MiB of new data with direct I/O in blocks of 4 KiB, and
# reads them back. Descriptor 3 keeps the input, because a shell gives a background command an empty
# input.
readonly WRITES='exec 3<&0; (read line <&3; : >/tmp/stop) &
n=0
while [ ! -e /tmp/stop ]; do
    dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null
    dd if=/tmp/data of=/dev/vda bs=4k oflag=direct conv=notrunc 2>/dev/null ||
        { echo "write failed"; exit 3; }
    dd if=/dev/vda bs=64k count=64 iflag=direct 2>/dev/null | cmp - /tmp/data ||
        { echo "the data read differ from those written"; exit 4; }
    n=$((n+1))
    [ $n != 1 ] || echo begun
done
echo "rounds $n sum $(md5sum </tmp/data)"
dmesg | grep -i -e "page fault" -e "I/O error" -e "timed out"; true'

# The same. Afterwards it prints the guest kernel's trace since boot.
readonly TRACED="$WRITES
echo trace; gzip -c </sys/kernel/tracing/trace | base64"
# Until a line arrives, repeatedly sends 4 MiB to another guest, which sends them back.
readonly TALKS='exec 3<&0; (read line <&3; : >/tmp/stop) &
ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up
n=0
while [ ! -e /tmp/stop ]; do
    dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null
    until nc 10.9.0.2 7 </tmp/data >/tmp/back 2>/dev/null; do usleep 100000; done
    cmp /tmp/back /tmp/data || { echo "the data received differ from those sent"; exit 4; }
    n=$((n+1))
    [ $n != 1 ] || echo begun
done
echo "rounds $n sum $(md5sum </tmp/back)"
nc 10.9.0.2 8 </dev/null
dmesg | grep -i -e "page fault" -e "timed out" -e "NETDEV"; true'
# The other guest runs until a connection to port 8 ends it. It sends the data back when it has
# received all of them. If it echoed, both ends could wait forever in a write with all buffers full
# (1 of 27 guests did), because `nc` does not read while it writes.
readonly ANSWERS='ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up
while :; do nc -l -p 7 -e sh -c "cat >/tmp/taken; cat /tmp/taken"; done &
nc -l -p 8 >/dev/null'

# column N: prints the Nth number of each line about a hand-over.
column() { sed 's/[^0-9]\+/ /g' "$case/taken" | awk -v n="$1" '{ print $n }' | sort -n; }
# spread N: prints median and maximum of this column, which are microseconds.
spread() {
    column "$1" | awk '{ v[NR] = $1 }
        END { printf "%d us median, %d us at most", v[int((NR + 1) / 2)], v[NR] }'
}

# hand_over KERNEL SERVE-OPTIONS... -- PREPARE-OPTIONS...: hands the devices over. In the options of
# `serve`, CASE stands for the case's directory. At its end, also after a failure, it kills all
# processes that it started.
daemon='' next='' qemu='' other='' again=()
disk=1 mode=emulated entropy=1 task=$WRITES
hand_over() {
    trap 'end_all; exit 1' TERM INT
    hand_over_devices "$@"
    local code=$?
    end_all
    ((code == 0)) || cat "$case/errors" 2>/dev/null
    return $code
}
# talks KERNEL ...: the same with a network device instead of the disk. Another guest is at the
# other end of the link.
talks() {
    disk='' task=$TALKS
    hand_over "$@"
}
# recorded KERNEL ...: the same with only a disk. Each process records the IOMMU driver's requests.
recorded() {
    entropy='' task=$TRACED
    append+=' trace_event=iommu:map,iommu:unmap trace_buf_size=48M'
    hand_over "$@"
}
# in_mode MODE CASE ...: runs another of these cases with a disk in this mode.
in_mode() {
    mode=$1
    "${@:2}"
}
# reclaimed KERNEL ...: the same, while the host reclaims the guest's memory. The memory is the file
# `memory` in the case's directory.
reclaimed() {
    local group=ringfence-$$-handed code=0
    python3 "$here/reclaim.py" join "$group" $BASHPID || return 1
    {
        until [[ -e $case/new || -e $case/over ]]; do sleep 0.1; done
        python3 "$here/reclaim.py" during "$group" "$case/memory" "$case/over"
    } >"$case/stayed" 2>&1 &
    reclaimer=$!
    hand_over "$@" || code=1
    stop_reclaiming || code=1
    cat "$case/stayed"
    python3 "$here/reclaim.py" leave "$group" $BASHPID || code=1
    ((code)) || echo "$(<"$case/note"); $(<"$case/stayed")" >"$case/note"
    return $code
}
# Ends the reclaiming before the guest ends, because QEMU then handles the memory.
reclaimer=''
stop_reclaiming() {
    local code=0
    : >"$case/over"
    [[ ! $reclaimer ]] || wait $reclaimer || code=1
    reclaimer=''
    return $code
}
end_all() {
    local pid
    for pid in $qemu $daemon $next $other; do kill $pid 2>/dev/null; done
    for pid in $qemu $daemon $next $other; do wait $pid; done
}
# Takes over the devices repeatedly, each time with a new process. If the new process is late,
# because the host gave it no CPU for five seconds, the previous process keeps the devices. Another
# process then tries, at most three times in a case.
late=0 again_after=
take_over_repeatedly() {
    local run=$1 n code
    for n in $(seq "$HANDOVERS"); do
        until take_over "$run"; do
            cat "$case/errors"
            ((late++ < 3)) && again_after=$late && grep -q 'in time' "$case/errors" &&
                kill -0 $daemon || { echo "hand-over $n failed"; return 1; }
        done
        cat "$case/new" >>"$case/taken"
        # The previous process reports that another one has the devices.
        wait $daemon
        code=$?
        ((code == 4)) || { echo "hand-over $n: the previous process exited with $code"; return 1; }
        daemon=$next
    done
    cat "$case/taken"
}
# take_over DIR: starts the process $next. Succeeds when it serves the devices.
take_over() {
    rm -f "$case/errors"
    : >"$case/new"
    "$ringfence" serve --dir "$1" --take-over --precopy-requests "$REQUESTS" "${again[@]}" \
        >"$case/new" 2>"$case/errors" &
    next=$!
    until [[ -s $case/new ]]; do
        kill -0 $next 2>/dev/null || { wait $next; [[ -s $case/new ]]; return; }
        sleep 0.05
    done
}
hand_over_devices() {
    local kernel=$1 run=$case/run out=$case/out input=$case/input serve=()
    shift
    while [[ $1 != -- ]]; do
        serve+=("${1//CASE/$case}")
        # Each process needs the host-side options.
        case $1 in
            --host-page-pool) again+=("$1") ;;
            --lock | --memory-file) again+=("$1" "${2//CASE/$case}") ;;
        esac
        shift
    done
    shift
    if [[ $disk ]]; then
        truncate -s 64M "$case/image"
        serve+=(--disk "$case/image,mode=$mode")
    fi
    [[ ! $entropy ]] || serve+=(--rng)
    mkfifo "$input"
    "$ringfence" serve --dir "$run" "${serve[@]}" >"$case/arguments" &
    daemon=$!
    "$ringfence" guest prepare --cache "$cache" --kernel "$kernel" --initramfs "$case/initramfs" \
        --module-source "$repo/kmod" --append "$append" "$@" -- sh -c "$task" >"$case/prepared" ||
        return 1
    . "$case/prepared"
    until [[ -s $case/arguments ]]; do kill -0 $daemon || return 1; sleep 0.05; done
    if [[ ! $disk ]]; then
        "$ringfence" guest run --cache "$cache" --kernel "$kernel" --timeout "$LIMIT" \
            --append "$append" --net "socket=$case/wire" -- sh -c "$ANSWERS" \
            >"$case/other" 2>&1 </dev/null &
        other=$!
    fi
    eval "timeout --kill-after=10 $LIMIT $QEMU $(<"$case/arguments")" -display none \
        -kernel '"$KERNEL"' -initrd '"$INITRAMFS"' -append '"$APPEND"' \
        -serial 'file:"$case/console"' -chardev 'stdio,id=command,signal=off' \
        -serial chardev:command -serial 'file:"$case/status"' <"$input" >"$out" &
    qemu=$!
    exec {input}>"$input"
    until grep -q '^begun' "$out"; do
        kill -0 $qemu || {
            tail -n 5 "$case/console" ${other:+"$case/other"}
            cat "$out" "$case/status"
            return 1
        }
        sleep 0.2
    done
    take_over_repeatedly "$run" || return 1
    stop_reclaiming || return 1
    "$ringfence" top "$run" --once >"$case/top"
    echo stop >&$input
    wait $qemu || return 1
    exec {input}>&-
    [[ ! $other ]] || wait $other || { cat "$case/other"; return 1; }
    kill -INT $daemon
    wait $daemon || return 1
    cat "$case/top" "$out"
    # Since the last hand-over, the IOMMU stopped no access and no request failed. The guest logged
    # no error at any time.
    awk 'NR > 1 && ($(NF - 3) + $(NF - 2) + $(NF - 1) + $NF) > 0 { exit 1 }' "$case/top" ||
        { echo "an access was stopped or a request failed"; return 1; }
    grep -q '^status 0' "$case/status" || return 1
    # On a busy host, the guest's CPUs wait for each other to read a clock. No device causes this.
    ! grep -hi -e 'page fault' -e 'I/O error' -e 'timed out' "$out" "$case/console" |
        grep -v 'clocksource: ' || return 1
    [[ ! $(find "$run" -type s) && ! -e $case/wire ]] || { echo "a socket remains"; return 1; }
    local sum image_sum
    sum=$(sed -n 's/^rounds [0-9]* sum \([0-9a-f]*\).*/\1/p' "$out")
    [[ ! $disk ]] || image_sum=$(head -c 4M "$case/image" | md5sum | cut -d ' ' -f 1)
    [[ ! $disk || $sum == "$image_sum" ]] || { echo "the sums differ"; return 1; }
    [[ $task != "$TRACED" ]] || agrees || return 1
    (($(column 3 | head -n 1) >= REQUESTS)) ||
        { echo "too few requests completed while a hand-over copied"; return 1; }
    echo "$HANDOVERS in a row, $(column 3 | head -n 1) requests or more while each was copied;" \
        "without devices $(spread 4)" \
        "(to stop and copy: $(spread 5); to rebuild:" \
        "$(spread 7))${again_after:+; $again_after late ones repeated}$agreed" >"$case/note"
}
# Succeeds if the record contains each request that the guest's kernel traced exactly once.
agreed=''
agrees() {
    sed '1,/^trace/d' "$case/out" | base64 -d -i | gunzip >"$case/guest.trace" || return 1
    agreed=$(python3 "$here/agree.py" "$case/requests" "$case/guest.trace") ||
        { echo "$agreed"; return 1; }
    agreed="; $agreed"
}

choose_kernels --iommu pviommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "stock virtio-iommu, strict: $kernel" hand_over "$kernel" -- --strict
    try "stock virtio-iommu, lazy: $kernel" hand_over "$kernel" -- --lazy
    try "para-virtual: $kernel" hand_over "$kernel" --iommu pviommu -- \
        --iommu pviommu --module-args cache=1
    try "ring: $kernel" hand_over "$kernel" --iommu riommu -- --iommu riommu
    try "recorded: $kernel" recorded "$kernel" --record-requests CASE/requests -- --strict
    try "network: $kernel" talks "$kernel" --net socket=CASE/wire,queues=2 --cpus 2 -- --strict
    try "assigned: $kernel" in_mode assigned hand_over "$kernel" -- --strict
    try "assigned, para-virtual, memory in a file: $kernel" in_mode assigned reclaimed "$kernel" \
        --iommu pviommu --host-page-pool --memory-file CASE/memory --lock mapped -- \
        --iommu pviommu --module-args cache=1
    try "disk in a process: $kernel" in_mode sandbox hand_over "$kernel" -- --strict
    try "disk in a process, para-virtual: $kernel" in_mode sandbox hand_over "$kernel" \
        --iommu pviommu -- --iommu pviommu --module-args cache=1
done
try "without an IOMMU: 6.12" hand_over 6.12 --iommu none --
all_passed
