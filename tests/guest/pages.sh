#!/usr/bin/env bash
# Tests `ringfence trace judge` on a stock Debian kernel in an emulated machine. In lazy mode, the
# kernel gives pages to other owners while a device can reach them. In strict mode, it gives none.
# See docs/JUDGE.md.
#
#   tests/guest/pages.sh      boot twice, record, judge; print one line; exit code 0/1
#
# The environment variables are those of record.sh.
set -euo pipefail

MIRROR=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' |
    grep -m 1 '/debian/$' || true)}
readonly MIRROR
readonly SUITE=${GUEST_SUITE:-trixie}
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
# Maximum run time of each guest in seconds.
readonly LIMIT=${GUEST_LIMIT:-600}

repo=$(cd "$(dirname "$0")/../.." && pwd)
here=$repo/tests/guest
cache=$repo/target/guest/$SUITE
root=$cache/pages-root
mkdir -p "$cache"
. "$here/kernel.sh"

initramfs() {
    rm -rf "$root"
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,etc,modules}
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$here/pages-init.sh" "$root/init"
    chmod 755 "$root/init"
    command_with_libraries "$ringfence"
    modules nvme "$root/modules/nvme.order"
    [[ -s $root/modules/nvme.order ]] || die "the kernel package has no module nvme"
    (cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$cache/pages.gz"
}

# boot STRICT: leaves the guest's results in $cache/pages-STRICT.
boot() {
    local out=$cache/pages-$1
    rm -rf "$out" "$cache"/pages-{workload,results}.img
    mkdir "$out"
    truncate -s 64M "$cache/pages-workload.img"
    truncate -s 256M "$cache/pages-results.img"
    timeout --kill-after=10 "$LIMIT" qemu-system-x86_64 \
        -accel tcg -machine q35,kernel-irqchip=off -cpu max -smp 2 -m 512M \
        -device intel-iommu,caching-mode=off,intremap=off \
        -display none -nodefaults -no-reboot -serial stdio \
        -kernel "$cache/vmlinuz" -initrd "$cache/pages.gz" \
        -append "console=ttyS0 quiet panic=-1 tsc=nowatchdog intel_iommu=on iommu.strict=$1" \
        -drive if=none,id=workload,format=raw,file="$cache/pages-workload.img" \
        -device nvme,drive=workload,serial=workload \
        -drive if=none,id=results,format=raw,file="$cache/pages-results.img" \
        -device nvme,drive=results,serial=results \
        </dev/null >"$out/console" 2>&1 ||
        die "the guest did not end by itself (exit $?, limit $LIMIT s);" \
            "see $out/console: $(tail -n 1 "$out/console")"
    tar -xf "$cache/pages-results.img" -C "$out" 2>/dev/null ||
        die "the guest left no results; see $out/console: $(tail -n 1 "$out/console")"
}

packages qemu-system-x86_64=qemu-system-x86 busybox=busybox-static cpio=cpio xz=xz-utils \
    zstd=zstd python3=python3
if [[ $(ldd "$(command -v busybox)" 2>&1) == *"=>"* ]]; then
    die "busybox is linked dynamically: install busybox-static"
fi
choose_command
fetch_kernel
initramfs
boot 0
boot 1
python3 "$here/pages.py" "$ringfence" "$cache/pages-0" "$cache/pages-1"
