# Functions that fetch packages, the kernel of a Debian suite and its modules. record.sh and
# pages.sh boot this kernel in an emulated machine. They set these variables:
#
#   MIRROR, SUITE, KEYRING    source of packages, the suite, and the keys of its packages
#   cache                     directory of downloads and results
#   root                      directory of the initramfs
#   repo                      the repository

die() {
    echo "${0##*/}: FAIL: $*" >&2
    exit 1
}

# Installs missing packages; the arguments are pairs of a program or file and its Debian package.
packages() {
    local missing=() pair needed
    for pair in "$@"; do
        needed=${pair%%=*}
        [[ $needed == /* && -e $needed ]] || command -v "$needed" >/dev/null ||
            missing+=("${pair#*=}")
    done
    ((${#missing[@]})) || return 0
    local sudo=()
    if ((EUID)); then
        sudo=(sudo --non-interactive)
        command -v sudo >/dev/null ||
            die "these packages are missing: ${missing[*]}; install them as root"
    fi
    echo "installing ${missing[*]}"
    {
        "${sudo[@]}" apt-get update -q
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -yq --no-install-recommends "${missing[@]}"
    } >"$cache/apt.log" 2>&1 ||
        die "packages cannot be installed: ${missing[*]}; see $cache/apt.log"
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
    local options=(-q -o Dir::State="$apt/state" -o Dir::State::status="$apt/state/status"
        -o Dir::Cache="$apt/cache" -o Dir::Etc::SourceList="$apt/sources.list"
        -o Dir::Etc::SourceParts=/dev/null -o APT::Architecture=amd64 -o Acquire::Languages=none)
    # apt's own user cannot read files below a home directory.
    ((EUID)) || options+=(-o APT::Sandbox::User=root)
    echo "fetching the kernel of $SUITE"
    apt-get "${options[@]}" update >"$cache/apt.log" 2>&1 ||
        die "$SUITE cannot be read; see $cache/apt.log"
    local package parts
    package=$(apt-cache "${options[@]}" depends linux-image-amd64 |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
    [[ $package == linux-image-* ]] || die "$SUITE has no kernel: '$package'"
    # Since 7.x the image and the modules are in separate packages.
    mapfile -t parts < <(apt-cache "${options[@]}" depends "$package" |
        sed -n 's/^ *Depends: \(linux-\(binary\|modules\)-.*\)/\1/p')
    (
        cd "$apt" && apt-get "${options[@]}" download "$package" "${parts[@]}"
    ) >>"$cache/apt.log" 2>&1 ||
        die "$package cannot be fetched; see $cache/apt.log"
    local deb
    for deb in "$apt"/*.deb; do dpkg-deb -x "$deb" "$cache/kernel"; done
    rm -rf "$apt"
    # The image is below /boot or, since 7.x, next to the modules.
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

# Copies a command and its libraries to the paths where it looks for them.
command_with_libraries() {
    local command=$1 library
    # Remove debugging information if `strip` is available.
    strip -o "$root/bin/ringfence" "$command" 2>/dev/null || cp "$command" "$root/bin/ringfence"
    chmod 755 "$root/bin/ringfence"
    for library in $(ldd "$command" | grep -o '/[^ ]*'); do
        mkdir -p "$root/$(dirname "$library")"
        cp -L "$library" "$root/$library"
    done
}

# Sets `ringfence` to the command of the environment, or builds one.
choose_command() {
    ringfence=${RINGFENCE:-}
    if [[ ! $ringfence ]]; then
        ringfence=${CARGO_TARGET_DIR:-$repo/target}/release/ringfence
        (cd "$repo" && cargo build --quiet --release -p ringfence-cli)
    fi
    [[ -x $ringfence ]] || die "$ringfence is not an executable file"
}
