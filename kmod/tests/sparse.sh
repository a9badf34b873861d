#!/usr/bin/env bash
# Runs sparse on the sources of all modules, with the headers of Debian's kernel 6.12. Each warning
# fails the script. `ringfence guest prepare --iommu pviommu` has fetched headers and compiler. The
# host's apt fetches sparse once from Debian's archive. sparse 0.6.4 does not parse the headers of
# 7.2 (__typeof_unqual__).
#
#   GUEST_CACHE=DIR     directory of fetched components (default: guest in the target directory)
set -euo pipefail

kmod=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${GUEST_CACHE:-${CARGO_TARGET_DIR:-$kmod/../target}/guest}
root=$(cd "$cache/modules/root" && pwd)
headers=$(ls -d "$root"/usr/src/linux-headers-6.12.*-amd64 | tail -n 1)

# The program appears only when it is complete.
if [[ ! -x $root/usr/bin/sparse ]]; then
    scratch=$(mktemp -d "$cache/sparse.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    . "$kmod/tests/download.sh"
    (cd "$scratch" && download sparse &&
        dpkg --fsys-tarfile sparse*.deb | tar -xO ./usr/bin/sparse >sparse && chmod +x sparse)
    mv "$scratch/sparse" "$root/usr/bin/sparse"
    rm -rf "$scratch"
fi
build=$(mktemp -d "$root/build/sparse.XXXXXX")
trap 'rm -rf "$build"' EXIT
cp "$kmod"/*.[ch] "$kmod/Kbuild" "$build"
# shellcheck disable=SC2016
unshare --map-root-user --mount sh -c '
mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && ln -sf mawk "$0/usr/bin/awk" &&
exec chroot "$0" /usr/bin/env -i PATH=/usr/bin LC_ALL=C make -C "$1" M="$2" C=2 CHECK=sparse \
    CONFIG_DEBUG_INFO_BTF_MODULES= RINGFENCE_TEST_MODULES=m modules' \
    "$root" "${headers#"$root"}" "${build#"$root"}" >"$build/log" 2>&1 || {
    cat "$build/log"
    exit 1
}
checked=$(grep -c '^  CHECK ' "$build/log")
if grep -E '(warning|error):' "$build/log" | grep -v 'pahole version' || ((checked == 0)); then
    echo "sparse: remarks, or nothing checked ($checked files)"
    exit 1
fi
echo "sparse: no remarks on $checked files"
