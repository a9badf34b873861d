#!/usr/bin/env bash
# `ringfence calibrate --host` on stock Debian kernels in guests, behind IOMMUs that QEMU or this
# project emulates: see docs/PROFILES.md and README.md. `compare` then uses each profile.
#
#   tests/guest/calibrate.sh        build, run all cases, print a line each; exit code 0/1
#   tests/guest/calibrate.sh VT-d   run only the cases whose names begin with this
#   RINGFENCE, GUEST_KERNELS, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

# Calibrates while the guest reads its disk, compares the state of tracefs, and prints the profile.
# The argument is the mode. A guest that had hardly any CPU in the three seconds calibrates again:
# it read little, or the timer of the lazy mode caused most of its invalidations.
readonly STATE='T=/sys/kernel/tracing; cd $T
state() {
    grep . current_tracer set_ftrace_filter tracing_on \
        options/funcgraph-tail options/funcgraph-duration
    grep -v "^#" trace
}
state >/before; restored() { state | diff /before - && echo restored; }
'
readonly CALIBRATE=$STATE'while :; do
    dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct
done 2>/dev/null & load=$!
enough() {
    awk -v mode=$1 "/^#   [a-z]+ .* calls\$/ { n[\$2] += \$(NF - 1) }
        END { exit !(n[\"map\"] > 100 && n[\"unmap\"] > 100 &&
            (mode == \"strict\" || 2 * n[\"invalidation\"] < n[\"unmap\"])) }" /host.toml
}
for attempt in 1 2 3 4 5; do
    rm -f /host.toml; ringfence calibrate --host --seconds 3 -o /host.toml; code=$?
    [ $code = 0 ] && enough $1 && break
done
kill $load; restored || exit 9; [ $code = 0 ] || exit $code
echo "-- profile"; cat /host.toml'

run() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" --append "$append" \
        --with-ringfence "$@"
}

# check_profile MODE FUNCTION: `compare` uses the profile in the guest's output. calibrated.py
# checks both against the kernel's mode.
check_profile() {
    local host=$case/host.toml
    local compare=(compare --json --repeat 1 --modes none,linux-strict,linux-lazy --profile "$host")
    log_has '^restored' || return 1
    sed '1,/^-- profile/d' "$log" | tr -d '\r' >"$host"
    # `compare` prints a relative throughput only with the cycles of the unprotected operation.
    "$ringfence" "${compare[@]}" >"$case/unknown.json" &&
        "$ringfence" "${compare[@]}" --baseline-cycles 908 >"$case/known.json" || return 1
    python3 "$here/calibrated.py" "$host" "$case/unknown.json" "$case/known.json" "$@" \
        >"$case/note"
}
calibrated() {
    local mode=$1 function=$2
    shift 2
    run "--$mode" "$@" -- sh -c "$CALIBRATE" calibrate "$mode" && check_profile "$mode" "$function"
}

# A QEMU started by hand, with its own disk, behind its amd-iommu. The machine needs firmware that
# puts the IOAPIC at its usual place, and no remapping of interrupts.
amd() {
    local out=$case/out cache=$packed
    truncate -s 64M "$case/image"
    "$ringfence" guest prepare --cache "$cache" --kernel "$1" --append "$append" --with-ringfence \
        --initramfs "$case/initramfs" -- sh -c "$CALIBRATE" calibrate strict >"$case/prepared" &&
        . "$case/prepared" || return 1
    eval "timeout --kill-after=10 $LIMIT $QEMU" -accel tcg -M q35 -cpu max -m 512 -nodefaults \
        -no-reboot -display none -device amd-iommu,dma-remap=on,intremap=off \
        -drive 'if=none,id=disk,format=raw,file="$case/image"' \
        -device virtio-blk-pci,drive=disk,disable-legacy=on,iommu_platform=on \
        -kernel '"$KERNEL"' -initrd '"$INITRAMFS"' -append '"$APPEND"' \
        -serial 'file:"$case/console"' -serial 'file:"$out"' \
        -serial 'file:"$case/status"' </dev/null
    cat "$out"
    grep -q '^status 0' "$case/status" && check_profile strict iommu_completion_wait
}

# Without an IOMMU, without root, next to another trace, and after a signal, calibrate fails and
# leaves everything as before.
refused() {
    run --iommu none --kernel "$1" -- sh -c "$STATE"'
mkdir -p /etc; printf "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n" >/etc/passwd
dd if=/dev/vda of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null &
ringfence calibrate --host --seconds 1 -o /host.toml; echo "code $?"
ringfence calibrate --host --seconds 1 --tracefs /tmp; echo "code $?"
su nobody -s /bin/sh -c "ringfence calibrate --host --seconds 1"; echo "code $?"
echo function_graph >current_tracer
ringfence calibrate --host --seconds 1; echo "code $?"; echo nop >current_tracer
echo 1 >events/iommu/map/enable
ringfence calibrate --host --seconds 1; echo "code $?"; echo 0 >events/iommu/map/enable
ringfence calibrate --host --seconds 60 -o /host.toml & ringfence=$!
until grep -q graph current_tracer; do usleep 100000; done
kill -TERM $ringfence; wait $ringfence; echo "code $?"
ls /host.toml* 2>&1; restored' || return 1
    [[ $(grep -c '^code 1' "$log") == 6 ]] && log_has 'interrupted before the end' &&
        log_has 'no invalidation in 1 s: /sys/class/iommu lists no IOMMU' &&
        log_has 'no tracefs at /tmp' && log_has 'no permission to use .*; calibrate as root' &&
        log_has 'current_tracer: in use (function_graph)' &&
        log_has 'set_event: in use (iommu:map)' &&
        log_has '/host.toml.*No such file' && log_has '^restored'
}

choose_kernels
for kernel in $KERNELS; do
    try "VT-d, strict: $kernel" \
        calibrated strict qi_submit_sync --kernel "$kernel" --iommu qemu-intel
    try "VT-d, lazy: $kernel" calibrated lazy qi_submit_sync --kernel "$kernel" --iommu qemu-intel
    try "virtio-iommu, strict: $kernel" calibrated strict __viommu_sync_req --kernel "$kernel"
    try "refused: $kernel" refused "$kernel"
    try "AMD-Vi, strict: $kernel" amd "$kernel"
done
all_passed
