#!/usr/bin/env bash
# Builds and installs the modules as a user does (../Makefile), for each kernel whose headers
# `ringfence guest prepare --iommu pviommu` has fetched. Succeeds if the installed modules are
# exactly those for users. DKMS reads the same build commands and list of modules (../dkms.conf).
#
#   GUEST_CACHE=DIR     directory of fetched components (default: guest in the target directory)
set -euo pipefail

kmod=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${GUEST_CACHE:-${CARGO_TARGET_DIR:-$kmod/../target}/guest}
root=$(cd "$cache/modules/root" && pwd)
build=$(mktemp -d "$root/build/install.XXXXXX")
# Not below the sources, because clean would remove the modules there.
to=$(mktemp -d "$root/build/installed.XXXXXX")
trap 'rm -rf "$build" "$to"' EXIT
cp "$kmod"/*.[ch] "$kmod"/{Kbuild,Makefile} "$build"
# DKMS sources dkms.conf, too.
# shellcheck disable=SC2016,SC2034
kernel_source_dir='$headers'
# shellcheck source=../dkms.conf
. "$kmod/dkms.conf"
expected=$(printf './updates/%s.ko\n' "${BUILT_MODULE_NAME[@]}" | sort | tr '\n' ' ')
[[ ${!BUILT_MODULE_NAME[*]} == "${!DEST_MODULE_LOCATION[*]}" ]] ||
    { echo "install: dkms.conf: a module has no location"; exit 1; }
# The root has neither xz nor depmod.
# shellcheck disable=SC2016
unshare --map-root-user --mount sh -c '
mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && ln -sf mawk "$0/usr/bin/awk" &&
exec chroot "$0" /usr/bin/env -i PATH=/usr/bin LC_ALL=C sh -ec "
    cd $1
    for headers in /usr/src/linux-headers-*-amd64; do
        $3
        make KDIR=\$headers INSTALL_MOD_PATH=$2 \
            CONFIG_MODULE_COMPRESS= CONFIG_MODULE_COMPRESS_ALL= modules_install
        $4
    done"' "$root" "${build#"$root"}" "${to#"$root"}" "${MAKE[0]}" "$CLEAN" >"$build/log" 2>&1 || {
    cat "$build/log"
    exit 1
}
kernels=0
for headers in "$root"/usr/src/linux-headers-*-amd64; do
    release=${headers##*/linux-headers-}
    installed=$(cd "$to/lib/modules/$release" && find . -name '*.ko*' | sort | tr '\n' ' ')
    if [[ $installed != "$expected" || ! $release =~ $BUILD_EXCLUSIVE_KERNEL ]]; then
        echo "install: for $release: $installed;" \
            "dkms.conf: $expected, for kernels $BUILD_EXCLUSIVE_KERNEL"
        exit 1
    fi
    kernels=$((kernels + 1))
done
left=$(cd "$build" && ls ./*.o ./*.ko 2>/dev/null || true)
[[ ! $left ]] || { echo "install: clean leaves $left"; exit 1; }
echo "install: modules for $kernels kernels"
