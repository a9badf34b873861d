#!/usr/bin/env bash
# Runs the kernel's checkpatch, strict, on the sources of all modules, including that of tests/qemu.
# Each remark fails the script. The host's apt fetches checkpatch once, from Debian's package of the
# kernel's sources.
#
#   GUEST_CACHE=DIR     directory of fetched components (default: guest in the target directory)
#   CHECKPATCH=PATH     run this checkpatch instead
#
# The script does not check tests/kernel.h, which replaces the kernel's headers and has their names.
set -euo pipefail

kmod=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${GUEST_CACHE:-${CARGO_TARGET_DIR:-$kmod/../target}/guest}
readonly PACKAGE=linux-source-6.12
. "$kmod/tests/download.sh"

# fetch DIR: puts checkpatch and its lists of words into DIR. DIR appears only when it is complete.
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
            tar -x --strip-components=2 \
                $PACKAGE/scripts/{checkpatch.pl,spelling.txt,const_structs.checkpatch}
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
