#!/usr/bin/env bash
# Stock Debian guests whose disk lives in `ringfence`, behind its virtio-iommu: see docs/GUEST.md.
#
#   tests/guest/live.sh                      build, boot all cases, one line each; exit code 0 or 1
#   RINGFENCE=PATH tests/guest/live.sh       with this command instead of building it
#   GUEST_KERNELS="6.12" tests/guest/live.sh     with these kernels only
#   GUEST_KILLS=5 tests/guest/live.sh        the daemon is killed this many times (default 3)
set -uo pipefail

readonly KERNELS=${GUEST_KERNELS:-6.12 7.3}
readonly KILLS=${GUEST_KILLS:-3}
# Longest life of one guest, which takes 10 to 40 s here, in seconds.
readonly LIMIT=${GUEST_LIMIT:-180}

repo=$(cd "$(dirname "$0")/../.." && pwd)
cache=$repo/target/guest
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

ringfence=${RINGFENCE:-}
if [[ ! $ringfence ]]; then
    ringfence=${CARGO_TARGET_DIR:-$repo/target}/release/ringfence
    (cd "$repo" && cargo build --quiet --release -p ringfence-cli --features live) || exit 1
fi

# judge NAME COMMAND...: the command says whether the case passed.
judge() {
    local name=$1
    shift
    if "$@"; then
        echo "ok $name"
        ((++passed))
    else
        echo "FAIL $name; what was said:"
        tail -n 20 "$work/log" | sed 's/^/    /'
        ((++failed))
    fi
}

run() {
    timeout --kill-after=10 $((LIMIT + 30)) "$ringfence" guest run --cache "$cache" --limit "$LIMIT" "$@" >"$work/log" 2>&1 </dev/null
}
said() { grep -q -- "$1" "$work/log"; }

# File system, write, checksum, again after a remount.
readonly FILES='set -e
mke2fs /dev/vda >/dev/null 2>&1; mkdir -p /m; mount -t ext4 /dev/vda /m
dd if=/dev/urandom of=/m/f bs=64k count=200 2>/dev/null; sync; md5sum /m/f >/tmp/before; umount /m
echo 3 >/proc/sys/vm/drop_caches; mount -t ext4 /dev/vda /m; md5sum /m/f | cmp - /tmp/before; umount /m; echo same'
files() { run "$@" --metrics -- sh -c "$FILES" && said '^same' && said 'ringfence_faults_total{device="iommu"} 0'; }

# What the device does on its own is stopped, and the guest's own log names device and address.
stray() {
    run "$@" --stray-write dead0000 --metrics -- sh -c 'dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null; usleep 500000; dmesg' &&
        said 'page fault from EP 32 at 0xdead0000 \[W\]' && said 'ringfence_strays_through_total{device="blk"} 0'
}
# Without the IOMMU the same write goes through: the case above does see something.
stray_through() {
    run --kernel 6.12 --no-iommu --stray-write 1f000000 --metrics -- sh -c 'dd if=/dev/vda of=/dev/null bs=4k count=10 iflag=direct 2>/dev/null' &&
        said 'ringfence_strays_through_total{device="blk"} 1'
}
code() { run --kernel 6.12 -- sh -c 'exit 7'; [[ $? == 7 ]]; }

# Data crosses between two guests, each with its own process, through a socket: both ways, with sums. Several pairs of queues, two processors.
# sum NAME LOG: what the guest says of one of the files.
sum() { sed -n "s/^$1 \([0-9a-f]*\).*/\1/p" "$2"; }
readonly TALK='ip addr add 10.9.0.$1/24 dev eth0; ip link set eth0 up
dd if=/dev/urandom of=/mine bs=64k count=64 2>/dev/null; echo mine $(md5sum </mine)
take() { nc -l -p 7 -e sh -c "cat >/theirs"; echo theirs $(md5sum </theirs); }
give() { until nc 10.9.0.$1 7 </mine; do usleep 200000; done; }
case $1 in 1) take; give 2 ;; *) give 1; take ;; esac'
network() {
    local one=$work/one two=$work/two first status
    rm -f "$work/link"
    run_to() {
        timeout --kill-after=10 $((LIMIT + 30)) "$ringfence" guest run --cache "$cache" --limit "$LIMIT" \
            --cpus 2 --metrics --net "socket=$work/link,queues=2" "$@" </dev/null
    }
    run_to "$@" -- sh -c "$TALK" talk 1 >"$one" 2>&1 &
    first=$!
    for _ in $(seq 300); do [[ -S $work/link ]] && break; sleep 0.1; done
    run_to "$@" -- sh -c "$TALK" talk 2 >"$two" 2>&1
    status=$?
    wait $first || status=1
    grep -hv _bucket "$one" "$two" >"$work/log"
    ((status == 0)) && [[ $(sum mine "$one") && $(sum mine "$two") ]] &&
        [[ $(sum mine "$one") == "$(sum theirs "$two")" && $(sum mine "$two") == "$(sum theirs "$one")" ]] &&
        [[ $(grep -c 'ringfence_faults_total{device="iommu"} 0' "$work/log") == 2 ]]
}

# The same with the host, through a tap interface in a network namespace of its own.
tap() {
    unshare --map-root-user --net bash -c '
        log=$1; talk=$2; shift 2
        "$@" -- sh -c "$talk" talk 1 >"$log" 2>&1 </dev/null &
        until busybox ip link set tap0 up 2>/dev/null; do kill -0 $! || exit 1; sleep 0.1; done
        busybox ip addr add 10.9.0.2/24 dev tap0
        head -c 4194304 /dev/urandom >"$log.mine"
        until busybox nc 10.9.0.1 7 <"$log.mine"; do kill -0 $! || exit 1; sleep 0.2; done 2>/dev/null
        busybox nc -l -p 7 -e sh -c "cat >$log.theirs"
        wait $!' bash "$work/log" "$TALK" \
        timeout --kill-after=10 $((LIMIT + 30)) "$ringfence" guest run --cache "$cache" --limit "$LIMIT" --net tap=tap0 "$@" &&
        [[ $(sum mine "$work/log") == "$(md5sum <"$work/log.theirs" | cut -d" " -f1)" ]] &&
        [[ $(sum theirs "$work/log") == "$(md5sum <"$work/log.mine" | cut -d" " -f1)" ]]
}

# The process with the devices is killed while the guest writes numbered blocks, each flushed before it is reported: all that were
# reported are in the image, and nothing of the guest is left running.
killed() {
    local image=$work/image run=$work/killed after=$1
    rm -rf "$image" "$run"
    truncate -s 64M "$image"
    "$ringfence" guest run --cache "$cache" --limit "$LIMIT" --dir "$run" --blk "$image" -- sh -c \
        'n=1; while [ $n -lt 16000 ]; do yes $n | head -c 4096 | dd of=/dev/vda bs=4096 seek=$n conv=notrunc,fsync 2>/dev/null && echo done $n; n=$((n+1)); done' \
        >"$work/log" 2>&1 </dev/null &
    local daemon=$!
    for _ in $(seq $((LIMIT * 10))); do
        (($(grep -c '^done' "$work/log") >= after)) && break
        kill -0 $daemon 2>/dev/null || return 1
        sleep 0.1
    done
    kill -KILL $daemon
    wait $daemon 2>/dev/null
    local last n
    last=$(sed -n 's/^done \([0-9]*\)\r*$/\1/p' "$work/log" | tail -n 1)
    [[ $last ]] || return 1
    for n in $(seq "$last"); do
        cmp -s <(yes "$n" | head -c 4096) <(dd if="$image" bs=4096 skip="$n" count=1 2>/dev/null) || {
            echo "block $n of $last is not in the image" >>"$work/log"
            return 1
        }
    done
    for _ in $(seq 100); do
        pgrep -f -- "$run/initramfs" >/dev/null || return 0
        sleep 0.1
    done
    echo "a process of the guest is left" >>"$work/log"
    return 1
}

for kernel in $KERNELS; do
    for mode in --strict --lazy; do
        for cpus in 1 2; do
            judge "files: $kernel $mode, $cpus processors" files --kernel "$kernel" $mode --cpus $cpus
        done
    done
    judge "stray write stopped: $kernel" stray --kernel "$kernel"
    judge "network between guests: $kernel, strict" network --kernel "$kernel" --strict
    judge "network between guests: $kernel, lazy" network --kernel "$kernel" --lazy
done
judge "stray write not stopped without an IOMMU" stray_through
judge "exit code" code
# It takes a tap device, and the right to have a namespace.
if [[ -c /dev/net/tun ]] && unshare --map-root-user --net true 2>/dev/null; then
    judge "network with the host" tap --kernel 6.12
else
    echo "left out: network with the host (no /dev/net/tun, or no namespaces)"
fi
for n in $(seq "$KILLS"); do judge "killed, $n" killed $((n * 20)); done
echo "live.sh: $passed passed, $failed failed"
((failed == 0))
