#!/usr/bin/env bash
# Tests `ringfence trace record` on a stock Debian kernel in an emulated machine, end to end: see
# docs/RECORDING.md.
#
#   tests/guest/record.sh                   build, boot, record, check; exit code 0/1
#   RINGFENCE=PATH tests/guest/record.sh    test this command instead of building one
#   GUEST_SUITE=sid tests/guest/record.sh   boot the kernel of this Debian suite (default: trixie)
#
# The script keeps all files under target/guest/SUITE and does not repeat downloads.
set -euo pipefail

# Package source. The default is the package source of this machine.
MIRROR=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' |
    grep -m 1 '/debian/$' || true)}
readonly MIRROR
readonly SUITE=${GUEST_SUITE:-trixie}
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
# Maximum run time of the guest in seconds; it takes one or two minutes here.
readonly LIMIT=${GUEST_LIMIT:-600}

repo=$(cd "$(dirname "$0")/../.." && pwd)
here=$repo/tests/guest
cache=$repo/target/guest/$SUITE
mkdir -p "$cache"

. "$here/kernel.sh"

initramfs() {
    root=$cache/root
    rm -rf "$root"
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,etc,modules}
    chmod 1777 "$root/tmp"
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$here/init.sh" "$root/init"
    chmod 755 "$root/init"
    printf 'root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n' >"$root/etc/passwd"
    command_with_libraries "$ringfence"
    modules nvme "$root/modules/nvme.order"
    modules e1000e "$root/modules/e1000e.order"
    [[ -s $root/modules/nvme.order && -s $root/modules/e1000e.order ]] ||
        die "the kernel package has no module nvme or e1000e"
    (cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$cache/initrd.gz"
}

boot() {
    rm -f "$cache"/{workload,results}.img
    truncate -s 256M "$cache/workload.img"
    truncate -s 256M "$cache/results.img"
    # The network of the card reaches only two programs. One sends zeros, the other discards data.
    local network=user,id=net,restrict=on
    network+=',guestfwd=tcp:10.0.2.100:80-cmd:head -c 2000000 /dev/zero'
    network+=',guestfwd=tcp:10.0.2.100:9-cmd:dd of=/dev/null status=none'
    timeout --kill-after=10 "$LIMIT" qemu-system-x86_64 \
        -accel tcg -machine q35,kernel-irqchip=off -cpu max -smp 2 -m 1G \
        -device intel-iommu,caching-mode=off,intremap=off \
        -display none -nodefaults -no-reboot -serial stdio \
        -kernel "$cache/vmlinuz" -initrd "$cache/initrd.gz" \
        -append "console=ttyS0 quiet panic=-1 tsc=nowatchdog intel_iommu=on iommu.strict=1" \
        -drive if=none,id=workload,format=raw,file="$cache/workload.img" \
        -device nvme,drive=workload,serial=workload \
        -drive if=none,id=results,format=raw,file="$cache/results.img" \
        -device nvme,drive=results,serial=results \
        -netdev "$network" -device e1000e,netdev=net,mac=52:54:00:12:34:56 \
        </dev/null >"$cache/console" 2>&1 ||
        die "the guest did not end by itself (exit $?, limit $LIMIT s);" \
            "see $cache/console: $(tail -n 1 "$cache/console")"
    rm -rf "$cache/out"
    mkdir "$cache/out"
    tar -xf "$cache/results.img" -C "$cache/out" 2>/dev/null ||
        die "the guest left no results; see $cache/console: $(tail -n 1 "$cache/console")"
}

packages qemu-system-x86_64=qemu-system-x86 busybox=busybox-static cpio=cpio xz=xz-utils \
    zstd=zstd python3=python3
if [[ $(ldd "$(command -v busybox)" 2>&1) == *"=>"* ]]; then
    die "busybox is linked dynamically: install busybox-static"
fi
choose_command
fetch_kernel
initramfs
boot
python3 "$here/judge.py" "$ringfence" "$cache/out" "$repo/tests/independent/count.py"
