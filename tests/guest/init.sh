#!/bin/busybox sh
# The init process of the guest: runs every case of `ringfence trace record` on a real kernel,
# stores the results on the disk `results`, and powers off. record.sh builds and boots the machine.
#
# A passed case is a line `ok NAME` in /out/checks, a failed one `FAIL NAME: WHY`. The last line is
# `done`.

export PATH=/bin
T=/sys/kernel/tracing

say() { echo "$*" | tee -a /out/checks; }
ok() { say "ok $1"; }
fail() { say "FAIL $*"; }
# check NAME CONDITION...: passes if the command CONDITION succeeds.
check() {
    local name="$1"
    shift
    if "$@"; then ok "$name"; else fail "$name: this condition is false: $*"; fi
}
# expect NAME CODE COMMAND...: passes if the command exits with this code within two minutes.
expect() {
    local name="$1" code="$2"
    shift 2
    timeout 120 "$@" >>/out/log 2>&1
    local got=$?
    if [ $got = "$code" ]; then ok "$name"; else fail "$name: exit $got, not $code"; fi
}
log_has() { grep -q "$1" /out/log; }
absent() { [ ! -e "$1" ]; }
# Prints all settings that a recording can change: instances, switches, clocks, buffers.
state() {
    ls $T/instances
    for file in tracing_on current_tracer trace_clock trace_options tracing_cpumask \
        buffer_size_kb set_event events/enable events/dma/enable events/iommu/enable; do
        echo "$file: $(cat $T/$file)"
    done
}
restored() {
    state >/tmp/after
    if cmp -s /tmp/before /tmp/after; then ok "$1: tracing restored"; else
        fail "$1: tracing not restored"
        diff /tmp/before /tmp/after | tee -a /out/log
    fi
}
# Waits until a recording runs, according to its instance's switch.
running() {
    for _ in $(seq 100); do
        grep -q 1 $T/instances/ringfence-*/tracing_on 2>/dev/null && return 0
        usleep 100000
    done
    return 1
}
# ends NAME CODE PID: waits for a recording, which reaps it, and checks its exit code.
ends() {
    local name="$1" code="$2" pid="$3"
    wait "$pid"
    local got=$?
    if [ $got = "$code" ]; then ok "$name"; else fail "$name: exit $got, not $code"; fi
}
modules() {
    for module in $(cat "/modules/$1.order"); do
        insmod "/modules/$module.ko" || return 1
    done
}
# Prints the NVMe disk with this serial number.
disk() {
    for one in /sys/block/nvme*; do
        grep -q "$1" "$one/device/serial" 2>/dev/null && echo "/dev/${one##*/}"
    done
}
disks() {
    for _ in $(seq 100); do
        [ -b "$(disk workload)" ] && [ -b "$(disk results)" ] && return 0
        usleep 100000
    done
    return 1
}
# Loads the driver with one disk, then reads with small and large sizes and writes.
nvme() {
    modules nvme && disks || return 1
    local from
    from=$(disk workload)
    dd if="$from" of=/dev/null bs=4k count=1000 iflag=direct 2>/dev/null &&
        dd if="$from" of=/dev/null bs=256k skip=64 count=100 2>/dev/null &&
        dd if=/dev/zero of="$from" bs=64k count=100 conv=fsync 2>/dev/null
}
# Transfers both ways over the network card, with programs behind the emulated network.
net() {
    ping -c 20 -i 0.02 10.0.2.2 >/dev/null &&
        nc 10.0.2.100 80 </dev/null | wc -c | grep -qx 2000000 &&
        head -c 1000000 /dev/zero | timeout 60 nc 10.0.2.100 9
}
# Run a workload by its name: the command of a recording.
case "$1" in nvme | net) "$@"; exit ;; esac

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /out
say "kernel $(uname -r), $(grep -c ^processor /proc/cpuinfo) CPUs"
[ -d /sys/class/iommu/dmar0 ] || fail "IOMMU: /sys/class/iommu has no dmar0"

expect "no tracefs: refused" 1 ringfence trace record --seconds 1 -o /out/none.trace
check "no tracefs: the message has the mount command" log_has "mount -t tracefs"
mount -t tracefs tracefs $T || fail "tracefs does not mount"
state | tee /out/state >/tmp/before

# An independent recorder: an instance set up by hand must have seen the same events.
mkdir $T/instances/judge
echo 32768 >$T/instances/judge/buffer_size_kb
for event in dma iommu/map iommu/unmap; do echo 1 >$T/instances/judge/events/$event/enable; done
expect "nvme: recorded" 0 ringfence trace record -o /out/nvme.trace.zst -- /init nvme
for event in dma iommu/map iommu/unmap; do echo 0 >$T/instances/judge/events/$event/enable; done
cat $T/instances/judge/trace >/out/nvme.judge
cat $T/instances/judge/trace_clock >>/out/state
rmdir $T/instances/judge
restored nvme

modules e1000e || fail "e1000e: not loaded"
ip link set eth0 address 52:54:00:12:34:56
ip addr add 10.0.2.15/24 dev eth0
ringfence trace record --seconds 12 -o /out/e1000e.trace.zst >>/out/log 2>&1 &
recorder=$!
running || fail "e1000e: does not begin"
ip link set eth0 up
for _ in $(seq 100); do
    grep -q 1 /sys/class/net/eth0/carrier 2>/dev/null && break
    usleep 100000
done
/init net || fail "e1000e: the network does not work"
ip link set eth0 down
ends "e1000e: recorded" 0 $recorder
restored e1000e

from=$(disk workload)
read_some="dd if=$from of=/dev/null bs=4k count=20000 iflag=direct"
expect "small buffer: recorded" 0 \
    ringfence trace record --buffer 1 -o /out/lost.trace.zst -- $read_some
check "small buffer: the message has the number of lost events" log_has "events did not fit"
restored "small buffer"

expect "failing command: code" 1 ringfence trace record -o /out/failing.trace -- \
    sh -c "dd if=$from of=/dev/null bs=4k count=10; exit 7"
check "failing command: the message has the exit code" log_has "exit status: 7"
check "failing command: the trace remains" [ -s /out/failing.trace ]
restored "failing command"
expect "missing command: code" 1 ringfence trace record -o /out/missing.trace -- /no/such/command
check "missing command: no output" absent /out/missing.trace
check "missing command: no partial output" absent /out/missing.trace.part
restored "missing command"
expect "output in no directory: code" 1 \
    ringfence trace record --seconds 1 -o /no/such/directory/x.trace
restored "output in no directory"
mkdir -p /small && mount -t tmpfs -o size=64k small /small
expect "full disk: code" 1 ringfence trace record -o /small/x.trace -- $read_some
check "full disk: the message has the cause" log_has "No space left"
check "full disk: no partial output" absent /small/x.trace.part
restored "full disk"
expect "not root: refused" 1 \
    su nobody -s /bin/sh -c "ringfence trace record --seconds 1 -o /tmp/nobody.trace"
check "not root: the message names root" log_has "record as root"
restored "not root"
expect "too large a buffer: refused" 1 \
    ringfence trace record --buffer 65536 --seconds 1 -o /out/large.trace
check "too large a buffer: the message proposes a smaller one" log_has "record with smaller ones"
restored "too large a buffer"
# Instances begin with the clock "local"; the host may have chosen a clock on which its CPUs agree.
echo global >$T/trace_clock
expect "host's clock: recorded" 0 ringfence trace record -o /out/clock.trace -- \
    sh -c "cat $T/instances/*/trace_clock"
check "host's clock: the instance has it" log_has "\[global\]"
echo local >$T/trace_clock
restored "host's clock"
mkdir $T/instances/other
expect "to standard output" 0 \
    sh -c "ringfence trace record -o - -- sh -c 'echo chatter; $read_some' >/out/stdout.trace"
check "to standard output: begins as a trace" \
    sh -c "head -n 1 /out/stdout.trace | grep -q '^# tracer'"
check "the instance of another user stays" [ -d $T/instances/other ]
rmdir $T/instances/other
restored "to standard output"

# Signals. The first one is sent like a terminal does: to the process group, including the command.
for signal in INT TERM HUP; do
    setsid ringfence trace record -o "/out/$signal.trace" -- \
        sh -c "$read_some; exec sleep 600" >>/out/log 2>&1 &
    recorder=$!
    running || fail "$signal: does not begin"
    usleep 800000
    kill -$signal -$recorder
    ends "$signal to the group: code" 0 $recorder
    check "$signal to the group: the trace remains" \
        grep -q "dma_map\|map: IOMMU" "/out/$signal.trace"
    restored "$signal to the group"

    ringfence trace record -o "/out/$signal-alone.trace" -- sleep 601 >>/out/log 2>&1 &
    recorder=$!
    running || fail "$signal alone: does not begin"
    kill -$signal $recorder
    ends "$signal to the recorder: code" 0 $recorder
    check "$signal to the recorder: the command has ended" sh -c "! pidof sleep"
    restored "$signal to the recorder"

    ringfence trace record -o "/out/$signal-time.trace" --seconds 600 >>/out/log 2>&1 &
    recorder=$!
    running || fail "$signal time: does not begin"
    kill -$signal $recorder
    ends "$signal while time runs: code" 0 $recorder
    restored "$signal while time runs"
done
# After SIGKILL the recorder can restore nothing; the next recording must still work.
ringfence trace record -o /out/killed.trace --seconds 600 >>/out/log 2>&1 &
recorder=$!
running || fail "KILL: does not begin"
kill -KILL $recorder
wait $recorder
check "KILL: its instance stays" sh -c "ls -d $T/instances/ringfence-* >/dev/null"
expect "KILL: the next recording works" 0 ringfence trace record --seconds 0.2 -o /out/after.trace
rmdir $T/instances/ringfence-*
restored KILL

dmesg >/out/dmesg
say done
cd /out && tar cf "$(disk results)" . && sync
poweroff -f
