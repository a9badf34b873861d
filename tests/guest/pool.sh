# Cases that run beside each other; sourced by guests.sh.
#
# Each case has a directory of its own, $case, and a log there, $log. A case is a function that says by its exit code whether it passed;
# what it writes to $log is shown if it did not, what it writes to $case/note is shown if it did.

# At the same time: as many as there are processors.
readonly JOBS=${GUEST_JOBS:-$(nproc)}

work=$(mktemp -d)
# What goes in the end; whoever sources this adds to it.
scratch=("$work")
started=0
trap 'finish_pool' EXIT

# Ends what is still running, by its number, and tidies up.
finish_pool() {
    local pids
    pids=$(jobs -rp)
    [[ ! $pids ]] || kill $pids 2>/dev/null
    wait
    rm -rf "${scratch[@]}"
}

# judge NAME COMMAND...: starts the case as soon as there is room for it.
judge() {
    local name=$1
    shift
    while (($(jobs -rp | wc -l) >= JOBS)); do wait -n; done
    ((++started))
    case=$work/$started
    log=$case/log
    mkdir "$case"
    : >"$log"
    (
        # The pool's end is not this case's.
        trap - EXIT
        begun=$SECONDS
        if "$@" >>"$log" 2>&1; then verdict=ok; else verdict=FAIL; fi
        text="$verdict $name ($((SECONDS - begun)) s)"
        if [[ $verdict == ok ]]; then
            [[ ! -s $case/note ]] || text+=": $(<"$case/note")"
        else
            [[ ! -s $case/note ]] || text+=": $(<"$case/note")"
            text+=$'; what was said:\n'$(tail -n 25 "$log" | sed 's/^/    /')
        fi
        echo "$verdict" >"$case/verdict"
        echo "$text"
    ) &
}

# Waits for all cases; whether all passed.
all_passed() {
    wait
    local passed
    passed=$(cat "$work"/*/verdict 2>/dev/null | grep -c '^ok$')
    echo "${0##*/}: $passed passed, $((started - passed)) failed in $SECONDS s"
    ((passed == started && started > 0))
}

# Whether the log has a line that matches.
said() {
    grep -q -- "$1" "$log" && return
    echo "not said: $1" >>"$log"
    return 1
}
