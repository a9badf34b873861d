#!/usr/bin/env bash
# A guest's devices go from one process to the next while the guest writes: see docs/GUEST.md, "Hand-over".
#
#   tests/guest/handover.sh                          build, all cases, one line each; exit code 0 or 1
#   tests/guest/handover.sh stock                    only the cases whose names begin so
#   GUEST_HANDOVERS=5 tests/guest/handover.sh        so many in a row (default 20)
#   GUEST_REQUESTS=100 tests/guest/handover.sh       completed while each copies (default 1000)
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

readonly HANDOVERS=${GUEST_HANDOVERS:-20}
readonly REQUESTS=${GUEST_REQUESTS:-1000}
readonly DEFAULT_LIMIT=600
. "$(dirname "$0")/guests.sh"

# Round after round: 4 MiB that were never there before, written in blocks of 4 KiB around the guest's cache, and read back. Until a line comes.
# A shell gives what it puts into the background an empty input.
readonly WRITES='exec 3<&0; (read line <&3; : >/tmp/stop) &
n=0
while [ ! -e /tmp/stop ]; do
    dd if=/dev/urandom of=/tmp/data bs=64k count=64 2>/dev/null
    dd if=/tmp/data of=/dev/vda bs=4k oflag=direct conv=notrunc 2>/dev/null || { echo "write failed"; exit 3; }
    dd if=/dev/vda bs=64k count=64 iflag=direct 2>/dev/null | cmp - /tmp/data || { echo "read back differs"; exit 4; }
    n=$((n+1))
    [ $n != 1 ] || echo begun
done
echo "rounds $n sum $(md5sum </tmp/data)"
dmesg | grep -i -e "page fault" -e "I/O error" -e "timed out"; true'

# column N: the Nth number of each line of the hand-overs.
column() { sed 's/[^0-9]\+/ /g' "$case/taken" | awk -v n="$1" '{ print $n }' | sort -n; }
spread() { column "$1" | awk '{ v[NR] = $1 } END { printf "%d us median, %d us at most", v[int((NR + 1) / 2)], v[NR] }'; }

# handed KERNEL DEVICES -- PREPARE: the options of `serve` and of `guest prepare` beside the usual ones. Whatever becomes of it, no process of it is
# left.
daemon='' next='' qemu=''
handed() {
    trap 'leave_nothing; exit 1' TERM INT
    hand "$@"
    local code=$?
    leave_nothing
    return $code
}
leave_nothing() {
    local pid
    for pid in $qemu $daemon $next; do kill $pid 2>/dev/null; done
    wait
}
hand() {
    local kernel=$1 run=$case/run out=$case/out input=$case/input serve=() n code
    shift
    while [[ $1 != -- ]]; do serve+=("$1"); shift; done
    shift
    truncate -s 64M "$case/image"
    mkfifo "$input"
    "$ringfence" serve --dir "$run" --blk "$case/image" --rng "${serve[@]}" >"$case/arguments" &
    daemon=$!
    "$ringfence" guest prepare --cache "$cache" --kernel "$kernel" --initramfs "$case/initramfs" \
        --module-source "$repo/kmod" "$@" -- sh -c "$WRITES" >"$case/prepared" ||
        return 1
    . "$case/prepared"
    eval "timeout --kill-after=10 $LIMIT $QEMU $(<"$case/arguments")" -display none -kernel '"$KERNEL"' -initrd '"$INITRAMFS"' \
        -append '"$APPEND"' -serial 'file:"$case/console"' -chardev 'stdio,id=command,signal=off' -serial chardev:command \
        -serial 'file:"$case/status"' <"$input" >"$out" &
    qemu=$!
    exec {input}>"$input"
    until grep -q '^begun' "$out"; do kill -0 $qemu || { tail -n 5 "$case/console"; cat "$out" "$case/status"; return 1; }; sleep 0.2; done
    for n in $(seq "$HANDOVERS"); do
        : >"$case/new"
        "$ringfence" serve --dir "$run" --take-over --copy-until "$REQUESTS" >"$case/new" &
        next=$!
        until [[ -s $case/new ]]; do kill -0 $next || { echo "hand-over $n failed"; return 1; }; sleep 0.05; done
        cat "$case/new" >>"$case/taken"
        # The one before says that another has the devices.
        wait $daemon
        code=$?
        ((code == 4)) || { echo "hand-over $n: the one before ended with $code"; return 1; }
        daemon=$next
    done
    cat "$case/taken"
    "$ringfence" top "$run" --once >"$case/top"
    echo stop >&$input
    wait $qemu || return 1
    exec {input}>&-
    kill -INT $daemon
    wait $daemon || return 1
    cat "$case/top" "$out"
    # No access was stopped and no request failed since the last hand-over; the guest complained of nothing before it.
    awk 'NR > 1 && ($(NF - 3) + $(NF - 2) + $(NF - 1) + $NF) > 0 { exit 1 }' "$case/top" || { echo "stopped or failed"; return 1; }
    grep -q '^status 0' "$case/status" || return 1
    ! grep -i -e 'page fault' -e 'I/O error' -e 'timed out' "$out" "$case/console" || return 1
    [[ ! -e $run/blk.sock && ! -e $run/control.sock ]] || { echo "a socket is left"; return 1; }
    [[ $(sed -n 's/^rounds [0-9]* sum \([0-9a-f]*\).*/\1/p' "$out") == "$(head -c 4M "$case/image" | md5sum | cut -d ' ' -f 1)" ]] ||
        { echo "the sums differ"; return 1; }
    (($(column 3 | head -n 1) >= REQUESTS)) || { echo "too few requests while it was copied"; return 1; }
    echo "$HANDOVERS in a row, $(column 3 | head -n 1) requests or more while each was copied; without devices $(spread 4)" \
        "(to stop and copy: $(spread 5); to rebuild: $(spread 7))" >"$case/note"
}

choose_kernels --module pviommu --module-source "$repo/kmod"
for kernel in $KERNELS; do
    try "stock virtio-iommu, strict: $kernel" handed "$kernel" -- --strict
    try "stock virtio-iommu, lazy: $kernel" handed "$kernel" -- --lazy
    try "para-virtual: $kernel" handed "$kernel" --pviommu -- --module pviommu
done
try "without an IOMMU: 6.12" handed 6.12 --no-iommu --
all_passed
