#!/usr/bin/env bash
# Hostile clients next to a working guest: see README.md and soak.py.
#
#   tests/guest/soak.sh                       build, run all cases, print a line each; exit code 0/1
#   SOAK_SECONDS=600 tests/guest/soak.sh      duration of each case (default: 60)
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_LIMIT: see guests.sh; one case at a time
set -uo pipefail

readonly SECONDS_EACH=${SOAK_SECONDS:-60}
# soak.py may take six times as long, and the guest boots before.
readonly DEFAULT_LIMIT=$((6 * SECONDS_EACH + 600))
export GUEST_JOBS=1
. "$(dirname "$0")/guests.sh"

# Reads 4 KiB blocks with direct I/O until a line arrives. A shell gives a background command an
# empty input, so the command reads descriptor 3.
readonly READS='exec 3<&0; (read line <&3; : >/tmp/stop) &
dd if=/dev/vda bs=4k count=64 iflag=direct 2>/dev/null | md5sum >/tmp/before
echo begun
while [ ! -e /tmp/stop ]; do
    dd if=/dev/vda of=/dev/null bs=4k count=256 iflag=direct 2>/dev/null || exit 3
done
dd if=/dev/vda bs=4k count=64 iflag=direct 2>/dev/null | md5sum | cmp - /tmp/before || exit 4
dmesg | grep -i -e "page fault" -e "I/O error" -e "timed out"; true'

pids=()
end_all() {
    local pid
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in "${pids[@]}"; do wait "$pid"; done
}
# soak KERNEL DISK-MODE SERVE-OPTIONS... -- PREPARE-OPTIONS...
soak() {
    trap 'end_all; exit 1' TERM INT
    soak_one "$@"
    local code=$?
    end_all
    ((code == 0)) || rare_complaints
    return $code
}
# Prints the daemons' lines, most of which answer attackers. The rarest kinds are last, because the
# report of a failed case shows the end of its log. N replaces hexadecimal tokens with a digit, and
# the digits of words.
rare_complaints() {
    sed -E 's/\b(0x[0-9a-f]+|[0-9a-f]*[0-9][0-9a-f]*)\b/N/g; s/[0-9]+/N/g' "$case/complaints" |
        sort | uniq -c | sort -rn | tail -n 20 | cut -c 1-200
}
soak_one() {
    local kernel=$1 mode=$2 serve=() run=$case/run other=$case/other
    local guest_daemon other_daemon qemu arguments written
    shift 2
    while [[ $1 != -- ]]; do serve+=("$1"); shift; done
    shift
    head -c 64M /dev/urandom >"$case/image"
    truncate -s 4M "$case/second"
    "$ringfence" serve --dir "$run" --disk "$case/image,mode=$mode" --rng \
        --net "socket=$case/wire" "${serve[@]}" >"$case/arguments" 2>"$case/complaints" &
    guest_daemon=$!
    pids+=($guest_daemon)
    "$ringfence" serve --dir "$other" --disk "$case/second" --iommu qemu-virtio \
        >"$case/unused" 2>>"$case/complaints" &
    other_daemon=$!
    pids+=($other_daemon)
    "$ringfence" guest prepare --cache "$cache" --kernel "$kernel" \
        --initramfs "$case/initramfs" --module-source "$repo/kmod" "$@" -- sh -c "$READS" \
        >"$case/prepared" || return 1
    . "$case/prepared"
    until [[ -s $case/arguments && -s $case/unused ]]; do
        kill -0 $guest_daemon $other_daemon || return 1
        sleep 0.05
    done
    # The guest has the disk and the IOMMU; the attackers use the other devices.
    arguments=$(grep -v -e 'rng\.sock' -e 'net\.sock' "$case/arguments")
    mkfifo "$case/input"
    eval "taskset -c 0 timeout --kill-after=10 $LIMIT $QEMU $arguments" -display none \
        -kernel '"$KERNEL"' -initrd '"$INITRAMFS"' -append '"$APPEND"' \
        -serial 'file:"$case/console"' -chardev 'stdio,id=command,signal=off' \
        -serial chardev:command -serial 'file:"$case/status"' <"$case/input" >"$case/out" &
    qemu=$!
    pids+=($qemu)
    exec {input}>"$case/input"
    until grep -q '^begun' "$case/out"; do
        kill -0 $qemu || { tail -n 5 "$case/console"; return 1; }
        sleep 0.2
    done
    python3 "$here/soak.py" --seconds "$SECONDS_EACH" --guest "$run:$guest_daemon" \
        --other "$other:$other_daemon" --peer "$case/wire" || return 1
    echo stop >&$input
    wait $qemu || return 1
    exec {input}>&-
    cat "$case/out"
    grep -q '^status 0' "$case/status" || return 1
    ! grep -hi -e 'page fault' -e 'I/O error' -e 'timed out' "$case/out" "$case/console" |
        grep -v 'clocksource: ' || return 1
    kill -INT $guest_daemon $other_daemon
    wait $guest_daemon && wait $other_daemon || return 1
    # Refused clients do not fill the log: at most 1024 lines of 128 bytes for each of ten sockets.
    written=$(stat -c %s "$case/complaints")
    ((written < 10 * 1024 * 128)) ||
        { echo "the daemons wrote $written bytes of complaints"; return 1; }
    grep -h '^requests\|^daemon' "$log" | paste -sd ';' >"$case/note"
}

choose_kernels --iommu pviommu --module-source "$repo/kmod"
kernel=${KERNELS%% *}
try "virtio-iommu: $kernel" soak "$kernel" emulated -- --strict
try "virtio-iommu, disk in a process: $kernel" soak "$kernel" sandbox -- --strict
try "para-virtual, disk in a process: $kernel" soak "$kernel" sandbox --iommu pviommu -- \
    --iommu pviommu
all_passed
