# Functions that run cases in parallel. guests.sh sources this file.
#
# Each case has a separate directory, $case, with a log, $log. A case is a function whose exit code
# is 0 if the case passed. The line of a case contains $case/note. If the case failed, the end of
# $log follows.

# Maximum number of parallel cases.
readonly JOBS=${GUEST_JOBS:-$(nproc)}

work=$(mktemp -d)
# Directories that the script removes at its end. A script that sources this file may add to them.
scratch=("$work")
started=0
trap 'finish_pool' EXIT

# Kills all running cases by their process IDs, and removes the directories.
finish_pool() {
    local pid
    for pid in $(jobs -rp); do kill_tree $pid; done
    wait
    rm -rf "${scratch[@]}"
}

# kill_tree PID: kills a process, so that it starts no more children, and then its children.
kill_tree() {
    local children child
    children=$(cat /proc/$1/task/*/children 2>/dev/null)
    kill $1 2>/dev/null
    for child in $children; do kill_tree $child; done
}

# start_case NAME COMMAND...: starts the case as soon as fewer than JOBS cases run.
start_case() {
    local name=$1
    shift
    while (($(jobs -rp | wc -l) >= JOBS)); do wait -n; done
    ((++started))
    case=$work/$started
    log=$case/log
    mkdir "$case"
    : >"$log"
    (
        # The pool's exit trap does not apply to a case.
        trap - EXIT
        begun=$SECONDS
        if "$@" >>"$log" 2>&1; then verdict=ok; else verdict=FAIL; fi
        text="$verdict $name ($((SECONDS - begun)) s)"
        if [[ $verdict == ok ]]; then
            [[ ! -s $case/note ]] || text+=": $(<"$case/note")"
        else
            [[ ! -s $case/note ]] || text+=": $(<"$case/note")"
            text+=$'; the end of its log:\n'$(tail -n 25 "$log" | sed 's/^/    /')
        fi
        echo "$verdict" >"$case/verdict"
        echo "$text"
    ) &
}

# Waits for all cases. Succeeds if all passed. An error of bash ends a loop over cases, but not the
# script. The count of cases that `try` began with then exceeds the count of those it finished.
offered=0
decided=0
all_passed() {
    wait
    local passed
    passed=$(cat "$work"/*/verdict 2>/dev/null | grep -c '^ok$')
    echo "${0##*/}: $passed passed, $((started - passed)) failed in $SECONDS s"
    ((passed == started && started > 0 && offered == decided))
}

# log_has PATTERN: succeeds if a line of the log matches.
log_has() {
    grep -q -- "$1" "$log" && return
    echo "no line of the log matches: $1" >>"$log"
    return 1
}
