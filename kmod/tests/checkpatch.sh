#!/usr/bin/env bash
# The kernel's own checkpatch, strict, on the sources of all modules, that of tests/qemu included:
# none of its remarks is let pass. It comes from Debian's package of the kernel's sources, by the
# host's apt, and is kept:
#
#   GUEST_CACHE=DIR     beside what guests consist of (default: guest in the target directory)
#   CHECKPATCH=PATH     this one instead
#
# tests/kernel.h is left out: it stands for the kernel's headers, with names that are the kernel's and not ours to choose.
set -euo pipefail

kmod=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${GUEST_CACHE:-${CARGO_TARGET_DIR:-$kmod/../target}/guest}
readonly PACKAGE=linux-source-6.12
. "$kmod/tests/download.sh"

# fetch DIR: has checkpatch and its lists of words in DIR, whole or not at all.
fetch() {
    local to=$1 scratch
    mkdir -p "$(dirname "$to")"
    scratch=$(mktemp -d "$(dirname "$to")/checkpatch.XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$scratch'" EXIT
    (
        cd "$scratch"
        download $PACKAGE
        dpkg --fsys-tarfile $PACKAGE*.deb | tar -xO ./usr/src/$PACKAGE.tar.xz | xz -dc |
            tar -x --strip-components=2 $PACKAGE/scripts/{checkpatch.pl,spelling.txt,const_structs.checkpatch}
        rm ./*.deb
    )
    mv "$scratch" "$to"
    trap - EXIT
}

checkpatch=${CHECKPATCH:-}
if [[ ! $checkpatch ]]; then
    checkpatch=$cache/$PACKAGE/checkpatch.pl
    [[ -e $checkpatch ]] || fetch "$cache/$PACKAGE"
fi
cd "$kmod"
sources=(./*.[ch] tests/*.c ../tests/qemu/module/*.c)
perl "$checkpatch" --no-tree --strict --terse --show-types -f "${sources[@]}"
echo "checkpatch: no remarks on $(cat "${sources[@]}" | wc -l) lines"
