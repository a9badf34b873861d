# Sourced by checkpatch.sh and sparse.sh.

# download PACKAGE: downloads a package by the host's apt into this directory. Repeats an attempt
# that could not fetch a file, unless a server refused it.
download() {
    local said pause
    for pause in 5 20 60 ''; do
        apt-get -qq download "$1" 2>/dev/null && return
        # Not yet known, or no longer there.
        said=$({ apt-get -qq update && apt-get -qq download "$1"; } 2>&1) && return
        [[ $pause && $said == *'Failed to fetch'* && $said != *'  404  '* ]] || break
        sleep "$pause"
    done
    echo "$said" >&2
    return 1
}
