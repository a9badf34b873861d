#!/usr/bin/env bash
# Tests `ringfence trace record` on a stock Debian kernel in an emulated machine, end to end: see
# docs/RECORDING.md.
#
#   tests/guest/record.sh             build, boot, record, check; one line of verdict; exit code 0/1
#   RINGFENCE=PATH tests/guest/record.sh    with this command instead of building it
#   GUEST_SUITE=sid tests/guest/record.sh   with the kernel of this Debian suite instead of trixie's
#
# All files are kept under target/guest/SUITE; downloads are not repeated.
set -euo pipefail

# Package source; by default that of this machine.
readonly MIRROR=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$' || true)}
readonly SUITE=${GUEST_SUITE:-trixie}
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
# Maximum run time of the guest in seconds; it takes one or two minutes here.
readonly LIMIT=${GUEST_LIMIT:-600}

repo=$(cd "$(dirname "$0")/../.." && pwd)
here=$repo/tests/guest
cache=$repo/target/guest/$SUITE
mkdir -p "$cache"

die() {
    echo "record.sh: FAIL: $*" >&2
    exit 1
}

# Installs missing packages; the arguments are pairs of a program or file and its Debian package.
packages() {
    local missing=() pair what
    for pair in "$@"; do
        what=${pair%%=*}
        [[ $what == /* && -e $what ]] || command -v "$what" >/dev/null || missing+=("${pair#*=}")
    done
    ((${#missing[@]})) || return 0
    local sudo=()
    if ((EUID)); then
        sudo=(sudo --non-interactive)
        command -v sudo >/dev/null || die "these packages are missing: ${missing[*]}; install them as root"
    fi
    echo "installing ${missing[*]}"
    {
        "${sudo[@]}" apt-get update -q
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "${missing[@]}"
    } >"$cache/apt.log" 2>&1 || die "packages cannot be installed: ${missing[*]}; see $cache/apt.log"
}

# Fetches the suite's newest kernel into $cache/kernel with a separate apt configuration. The host's
# sources stay unmodified, and signatures are checked.
fetch_kernel() {
    [[ -e $cache/kernel/complete ]] && return
    local apt=$cache/apt
    rm -rf "$cache"/{kernel,vmlinuz} "$apt"
    mkdir -p "$apt"/state/lists/partial "$apt"/cache/archives/partial
    : >"$apt/state/status"
    [[ -e $KEYRING ]] || die "$KEYRING is missing: install debian-archive-keyring"
    [[ -n $MIRROR ]] || die "no package source found: set DEBIAN_MIRROR to one"
    echo "deb [arch=amd64 signed-by=$KEYRING] $MIRROR $SUITE main" >"$apt/sources.list"
    local options=(-q -o Dir::State="$apt/state" -o Dir::State::status="$apt/state/status" -o Dir::Cache="$apt/cache"
        -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Architecture=amd64
        -o Acquire::Languages=none)
    # apt's own user cannot read files below a home directory.
    ((EUID)) || options+=(-o APT::Sandbox::User=root)
    echo "fetching the kernel of $SUITE"
    apt-get "${options[@]}" update >"$cache/apt.log" 2>&1 || die "$SUITE cannot be read; see $cache/apt.log"
    local package parts
    package=$(apt-cache "${options[@]}" depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
    [[ $package == linux-image-* ]] || die "$SUITE has no kernel: '$package'"
    # Since 7.x the image and the modules are in separate packages.
    mapfile -t parts < <(apt-cache "${options[@]}" depends "$package" | sed -n 's/^ *Depends: \(linux-\(binary\|modules\)-.*\)/\1/p')
    (cd "$apt" && apt-get "${options[@]}" download "$package" "${parts[@]}") >>"$cache/apt.log" 2>&1 ||
        die "$package cannot be fetched; see $cache/apt.log"
    local deb
    for deb in "$apt"/*.deb; do dpkg-deb -x "$deb" "$cache/kernel"; done
    rm -rf "$apt"
    # Below /boot or, since 7.x, next to its modules.
    cp "$(find "$cache/kernel" -name 'vmlinuz*' -type f -print -quit)" "$cache/vmlinuz"
    touch "$cache/kernel/complete"
}

# Decompresses a module and its dependencies into the initramfs, and writes their load order.
modules() {
    local name=$1 order=$2 path needs need
    grep -qx "$name" "$order" 2>/dev/null && return
    path=$(find -H "$cache/kernel" -name "${name//[-_]/[-_]}.ko.xz" -print -quit)
    # Without a file, the module is built in.
    [[ $path ]] || return 0
    xz -dc "$path" >"$root/modules/$name.ko"
    needs=$(tr '\0' '\n' <"$root/modules/$name.ko" | sed -n 's/^depends=//p')
    for need in ${needs//,/ }; do modules "$need" "$order"; done
    echo "$name" >>"$order"
}

initramfs() {
    root=$cache/root
    rm -rf "$root"
    mkdir -p "$root"/{bin,dev,proc,sys,tmp,etc,modules}
    chmod 1777 "$root/tmp"
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$here/init.sh" "$root/init"
    # Remove debugging information if `strip` is available.
    strip -o "$root/bin/ringfence" "$ringfence" 2>/dev/null || cp "$ringfence" "$root/bin/ringfence"
    chmod 755 "$root/init" "$root/bin/ringfence"
    printf 'root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n' >"$root/etc/passwd"
    # The command is linked dynamically: copy its libraries to the paths where it looks for them.
    local library
    for library in $(ldd "$ringfence" | grep -o '/[^ ]*'); do
        mkdir -p "$root/$(dirname "$library")"
        cp -L "$library" "$root/$library"
    done
    modules nvme "$root/modules/nvme.order"
    modules e1000e "$root/modules/e1000e.order"
    [[ -s $root/modules/nvme.order && -s $root/modules/e1000e.order ]] || die "the kernel package lacks nvme or e1000e"
    (cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$cache/initrd.gz"
}

boot() {
    rm -f "$cache"/{workload,results}.img
    truncate -s 256M "$cache/workload.img"
    truncate -s 256M "$cache/results.img"
    # The card's network reaches only two programs: a source and a sink.
    timeout --kill-after=10 "$LIMIT" qemu-system-x86_64 -accel tcg -machine q35,kernel-irqchip=off -cpu max -smp 2 -m 1G \
        -device intel-iommu,caching-mode=off,intremap=off \
        -display none -nodefaults -no-reboot -serial stdio \
        -kernel "$cache/vmlinuz" -initrd "$cache/initrd.gz" \
        -append "console=ttyS0 quiet panic=-1 intel_iommu=on iommu.strict=1" \
        -drive if=none,id=workload,format=raw,file="$cache/workload.img" \
        -device nvme,drive=workload,serial=workload \
        -drive if=none,id=results,format=raw,file="$cache/results.img" \
        -device nvme,drive=results,serial=results \
        -netdev user,id=net,restrict=on,guestfwd=tcp:10.0.2.100:80-cmd:"head -c 2000000 /dev/zero",guestfwd=tcp:10.0.2.100:9-cmd:"dd of=/dev/null status=none" \
        -device e1000e,netdev=net,mac=52:54:00:12:34:56 \
        </dev/null >"$cache/console" 2>&1 ||
        die "the guest did not end by itself (exit $?, limit $LIMIT s); see $cache/console: $(tail -n 1 "$cache/console")"
    rm -rf "$cache/out"
    mkdir "$cache/out"
    tar -xf "$cache/results.img" -C "$cache/out" 2>/dev/null ||
        die "the guest left no results; see $cache/console: $(tail -n 1 "$cache/console")"
}

packages qemu-system-x86_64=qemu-system-x86 busybox=busybox-static cpio=cpio xz=xz-utils zstd=zstd python3=python3
if [[ $(ldd "$(command -v busybox)" 2>&1) == *"=>"* ]]; then
    die "busybox is linked dynamically: install busybox-static"
fi
ringfence=${RINGFENCE:-}
if [[ ! $ringfence ]]; then
    ringfence=${CARGO_TARGET_DIR:-$repo/target}/release/ringfence
    (cd "$repo" && cargo build --quiet --release -p ringfence-cli)
fi
[[ -x $ringfence ]] || die "$ringfence is no program"
fetch_kernel
initramfs
boot
python3 "$here/judge.py" "$ringfence" "$cache/out" "$repo/tests/independent/count.py"
