# A function of checkpatch.sh and sparse.sh, which source this file.

# download PACKAGE: downloads a package by the host's apt into this directory. Repeats an attempt
# that could not fetch a file, unless a server refused it.
download() {
    local output pause
    for pause in 5 20 60 ''; do
        apt-get -qq download "$1" 2>/dev/null && return
        # The package lists may be missing or out of date.
        output=$({ apt-get -qq update && apt-get -qq download "$1"; } 2>&1) && return
        [[ $pause && $output == *'Failed to fetch'* && $output != *'  404  '* ]] || break
        sleep "$pause"
    done
    echo "$output" >&2
    return 1
}
