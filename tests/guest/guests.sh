# Functions and settings that the scripts with cases share. They source this file with their
# arguments, which are prefixes of the names of the wanted cases; without arguments, all cases run.
# All of these scripts take these options:
#
#   RINGFENCE=PATH          test this command instead of building one
#   GUEST_KERNELS="6.12"    these kernels only (default: 6.12 and 7.2)
#   GUEST_CACHE=DIR         directory of fetched components (default: guest in the target directory)
#   GUEST_ALTERNATE=1       run each case on one kernel, the kernels in turn (default: on all)
#   GUEST_JOBS=1            number of guests in parallel (default: number of CPUs)
#   GUEST_LIMIT=SECONDS     maximum run time of one guest (default: 600). A guest takes 10 to 40 s
#                           on an idle host, and up to five times as long on a busy one.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$repo/tests/guest
target=${CARGO_TARGET_DIR:-$repo/target}
cache=${GUEST_CACHE:-$target/guest}
readonly LIMIT=${GUEST_LIMIT:-${DEFAULT_LIMIT:-600}}
. "$here/pool.sh"

ringfence=${RINGFENCE:-}
if [[ ! $ringfence ]]; then
    ringfence=$target/release/ringfence
    (cd "$repo" && cargo build --quiet --release -p ringfence-cli) || exit 1
fi

# Kernel parameters of the guests, to which a case may add. They save a sixth of a boot: no security
# modules, and no self-tests of ciphers and of the jitter generator. No device uses these.
append='lsm= audit=0 cryptomgr.notests initcall_blacklist=jent_mod_init'
# A guest on a loaded host may measure a TSC frequency that is far too low. Its clock is then too
# fast.
append+=" $(python3 "$here/tsc.py" 2>/dev/null)"
# A guest that gets no CPU for seconds looks stuck. --check-kernel-log would fail for its report.
append+=' rcupdate.rcu_cpu_stall_timeout=120 watchdog_thresh=60 workqueue.watchdog_thresh=120'

# limited COMMAND...: kills the command after the time limit of a guest.
limited() { timeout --kill-after=10 $((LIMIT + 30)) "$@" </dev/null; }

# choose_kernels OPTION...: sets KERNELS. Fetches and builds the shared components once before the
# cases, by `guest prepare` with these options. If the archive has dropped a default kernel, the
# newest one replaces it; a kernel in GUEST_KERNELS is never replaced.
KERNELS=
choose_kernels() {
    local kernel
    for kernel in ${GUEST_KERNELS:-6.12 7.2}; do
        if ! prepare "$kernel" "$@"; then
            [[ ! ${GUEST_KERNELS:-} ]] &&
                [[ $(prepare "$kernel" "$@" 2>&1) == *'archive has no kernel'* ]] &&
                prepare latest "$@" || exit 1
            echo "the archive has no kernel $kernel: the newest one replaces it"
            kernel=latest
        fi
        KERNELS+="${KERNELS:+ }$kernel"
    done
    unpack_kernels
}
# Unpacks the kernel images once. Otherwise each guest would unpack its image, which takes a quarter
# of the boot time. The unpacked images are in a temporary copy of the cache. The script removes the
# copy when it ends. Cases that boot the packed image use $packed.
packed=$cache
unpack_kernels() {
    cache=$(mktemp -d -p "$packed" unpacked.XXXXXX) || exit 1
    scratch+=("$cache")
    mkdir "$cache/kernels"
    packed=$(cd "$packed" && pwd)
    ln -s "$packed/qemu" "$packed/modules" "$cache"
    local kernel image
    for kernel in "$packed"/kernels/*; do
        # QEMU starts an unpacked kernel through its PVH entry, where a kernel with KASAN crashes.
        [[ " $KERNELS " == *" ${kernel##*/} "* && ${kernel##*/} != debug ]] ||
            ln -s "$kernel" "$cache/kernels"
    done
    for kernel in $KERNELS; do
        # A directory given by its path is used unmodified; two KERNELS may both be the newest.
        [[ $kernel != */* && ! -e $cache/kernels/$kernel ]] || continue
        cp -al "$packed/kernels/$kernel" "$cache/kernels/" || exit 1
        image=$(find "$cache/kernels/$kernel" -type f -name 'vmlinuz*')
        python3 "$here/unpack.py" "$image" "$image.unpacked" &&
            mv -f "$image.unpacked" "$image" || exit 1
    done
}
prepare() {
    local kernel=$1
    shift
    "$ringfence" guest prepare --cache "$cache" --kernel "$kernel" "$@" \
        --initramfs "$work/initramfs" -- true >/dev/null
}

# try NAME COMMAND...: runs the case if the arguments select it and its kernel's turn has come.
wanted=("$@")
try() {
    ((++offered))
    if is_wanted "$1" && is_in_turn "$1"; then start_case "$@"; fi
    ((++decided))
}
is_wanted() {
    ((${#wanted[@]})) || return 0
    local one
    for one in "${wanted[@]}"; do [[ $1 != "$one"* ]] || return 0; done
    return 1
}
# is_in_turn NAME: with GUEST_ALTERNATE, the first case whose name has $kernel runs on the first of
# KERNELS, the second on the second, and so on.
declare -A turns=()
next_turn=0
is_in_turn() {
    [[ ${GUEST_ALTERNATE:-} && ${kernel:-} && $1 == *"$kernel"* ]] || return 0
    local kernels=($KERNELS) base=${1/"$kernel"/}
    [[ ${turns[$base]:-} ]] || turns[$base]=$((next_turn++))
    [[ ${kernels[turns[$base] % ${#kernels[@]}]} == "$kernel" ]]
}

# logged COUNT TEXT, in the guest: waits until COUNT lines of the kernel's log contain the text, for
# at most a minute, because the IOMMU's thread may be late. Prints the log.
readonly LOGGED='logged() {
    left=600
    until [ $(dmesg | grep -c "$2") -ge $1 ] || [ $left = 0 ]; do
        left=$((left - 1)); usleep 100000
    done
    dmesg
}
'
# Clears the disk's Bus Master Enable through its configuration space, and sets it again. A read
# started in between waits without an interrupt, and then returns the same data as before.
readonly MASTER='
set -e; disk=$(readlink -f /sys/block/vda/device); config=${disk%/*}/config
put() { printf "\\$(printf %03o $1)" | dd of=$config bs=1 seek=4 conv=notrunc 2>/dev/null; }
look() { dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null; }
interrupts() { grep "${disk##*/}-req" /proc/interrupts; }
look >/before; command=$(dd if=$config bs=1 skip=4 count=1 2>/dev/null | od -An -tu1)
put $((command & 251)); count=$(interrupts); look >/after & reader=$!
until [ $(awk "{ print \$1 }" /sys/block/vda/inflight) = 1 ]; do usleep 50000; done
usleep 500000; kill -0 $reader; [ ! -s /after ]; [ "$(interrupts)" = "$count" ]
[ $(awk "{ print \$1 }" /sys/block/vda/inflight) = 1 ]
put $((command | 4)); wait $reader
cmp /before /after; [ "$(interrupts)" != "$count" ]; echo mastered'

# in_storm COMMAND...: runs a case in which a device faults for at most a second. The command
# returns 2 if the guest had no CPU in this time. It is then repeated, at most twice.
in_storm() {
    local code
    for _ in 1 2 3; do
        : >"$log"
        "$@"
        code=$?
        ((code == 2)) || return $code
        echo "the guest had no CPU during the storm: the case is repeated" >&2
    done
    return 1
}
# interrupts NAME, in the guest: prints the number of interrupts with this name on all CPUs.
readonly INTERRUPTS='interrupts() {
    awk "/$1/ { for (i = 2; \$i ~ /^[0-9]+\$/; i++) n += \$i } END { print n + 0 }" \
        /proc/interrupts
}'
# storm_of NOUN: prints the five numbers of the guest's line about a storm of faults.
storm_of() {
    local number='\([0-9]*\)'
    local line="$number $1, $number interrupts, $number naps, $number hundredths, $number lines"
    sed -n "s/^storm: $line.*/\1 \2 \3 \4 \5/p" "$log"
}
# stopped_at ACCESS CLASS: prints the address of an injected access that the IOMMU stopped.
stopped_at() {
    sed -n "s/^ringfence: blk: injected $1 ($2) at \(0x[0-9a-f]*\): stopped\$/\1/p" "$log"
}

# kexec LOOK REPORT [--crash], in the guest: writes 16 MiB to the disk, and starts a second kernel,
# whose image is on the disk (start_disk). There, the commands LOOK run before any module is loaded.
# The command of the second kernel prints their output, compares the 16 MiB, writes others, and runs
# the commands REPORT. With --crash, the first kernel crashes while it reads the disk.
readonly KEXEC='set -e; mkdir /next; cd /next; tar xf /dev/vda
cat >/look <<END
#!/bin/busybox sh
/bin/busybox --install -s /bin; export PATH=/bin
mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
{ $1; } >/seen
umount /dev /sys; exec /init
END
cat >/command <<END
set -e; echo "second kernel: \$(cat /seen)"
look() { dd if=/dev/vda bs=1M skip=32 count=16 iflag=direct 2>/dev/null | md5sum; }
look | cmp - /sum; echo same
dd if=/dev/urandom of=/new bs=1M count=16 2>/dev/null
dd if=/new of=/dev/vda bs=1M seek=32 oflag=direct 2>/dev/null
[ "\$(look)" = "\$(md5sum </new)" ]; echo written
$2; dmesg | grep "was stopped" || echo clean
END
chmod +x /look
dd if=/dev/urandom of=/random bs=1M count=16 2>/dev/null; md5sum </random >/sum
dd if=/random of=/dev/vda bs=1M seek=32 oflag=direct 2>/dev/null
list() { printf "%s\\n" bin dev proc sys tmp init look command sum bin/busybox; find modules; }
(cd /; list | cpio -o -H newc) >initramfs 2>/dev/null
echo "first kernel"
if [ $3 ]; then dd if=/dev/vda of=/dev/null bs=4k iflag=direct 2>/dev/null & fi
./kexec $3 vmlinuz initramfs "$(cat /proc/cmdline) rdinit=/look"'
# start_disk KERNEL: makes the image of a disk, $case/disk. It begins with an archive of the kernel
# and of a program that starts it.
start_disk() {
    local kernels=$packed/kernels/$1
    [[ $1 != */* ]] || kernels=$1
    mkdir "$case/files" && cp "$(find "$kernels" -type f -name 'vmlinuz*')" "$case/files/vmlinuz" &&
        cc -static -O2 -Wall -Wextra -o "$case/files/kexec" "$here/kexec.c" &&
        tar -cf "$case/disk" -C "$case/files" vmlinuz kexec && truncate -s 64M "$case/disk"
}

# The program of the first and of the second guest of a pair. The guests send data to each other and
# print the checksums.
readonly TALK='ip addr add 10.9.0.$1/24 dev eth0; ip link set eth0 up
dd if=/dev/urandom of=/mine bs=64k count=64 2>/dev/null; echo mine $(md5sum </mine)
take() { nc -l -p 7 -e sh -c "cat >/theirs"; echo theirs $(md5sum </theirs); }
give() { until nc 10.9.0.$1 7 </mine; do usleep 200000; done; }
case $1 in 1) take; give 2 ;; *) give 1; take ;; esac'
# sum NAME LOG: prints the checksum of this file from the guest's output.
sum() { sed -n "s/^$1 \([0-9a-f]*\).*/\1/p" "$2"; }
# talk IOMMU [THEN] -- COMMAND...: boots two guests with this command, each with two CPUs and two
# queue pairs, which finally run THEN. Succeeds if the data arrived complete and the IOMMU stopped
# no access.
talk() {
    local iommu=$1 then=${2#--} one=$case/one two=$case/two first status
    while [[ $1 != -- ]]; do shift; done
    shift
    side() {
        "$@" --cpus 2 --metrics --net "socket=$case/link,queues=2" -- \
            sh -c "$TALK; $then" talk $number
    }
    number=1 side "$@" >"$one" 2>&1 &
    first=$!
    for _ in $(seq 300); do [[ -S $case/link ]] && break; sleep 0.1; done
    number=2 side "$@" >"$two" 2>&1
    status=$?
    wait $first || status=1
    # Print the counters first, so that the guests' output is at the end of the log.
    grep -h '^ringfence_.*_total' "$one" "$two"
    grep -hv '^ringfence_\|^#' "$one" "$two"
    ((status == 0)) && [[ $(sum mine "$one") && $(sum mine "$two") ]] &&
        [[ $(sum mine "$one") == "$(sum theirs "$two")" ]] &&
        [[ $(sum mine "$two") == "$(sum theirs "$one")" ]] &&
        [[ $(grep -c "ringfence_faults_total{device=\"$iommu\"} 0" "$log") == 2 ]]
}
