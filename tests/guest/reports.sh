#!/usr/bin/env bash
# Tests the checks of the debug kernel and the check of its log. The kernel reports each defect of
# the module in broken/, and the report fails `guest run`. See README.md.
#
#   tests/guest/reports.sh    run all cases, print a line each; exit code 0/1
#   RINGFENCE, GUEST_CACHE, GUEST_JOBS, GUEST_LIMIT: see guests.sh; GUEST_KERNELS: debug
set -uo pipefail

: "${GUEST_KERNELS:=debug}"
. "$(dirname "$0")/guests.sh"

# broken COMMAND...: runs the command in a guest that can load the module.
broken() {
    limited "$ringfence" guest run --cache "$cache" --timeout "$LIMIT" \
        --append "$append kasan_multi_shot" --kernel "$kernel" \
        --module-source "$here/broken" --with-module broken --iommu none "$@"
}
readonly LOAD='echo 2 >/proc/sys/kernel/hung_task_timeout_secs
for how; do insmod /modules/broken.ko how=$how 2>/dev/null; done; echo loaded'

# The first line of each report.
declare -A REPORTS=(
    [rcu]='WARNING: suspicious RCU usage'
    [sleep]='BUG: sleeping function called from invalid context'
    [preemptible]='BUG: using smp_processor_id() in preemptible'
    [ubsan]='UBSAN: array-index-out-of-bounds in'
    [refcount]='refcount_t: underflow; use-after-free'
    [list]='list_add double add'
    [object]='ODEBUG: free active'
    [dma]='DMA-API: virtio-pci 0000:00:04.0: device driver tries to free DMA memory it has not '\
'allocated'
    [hung]='INFO: task insmod:'
    [order]='WARNING: possible circular locking dependency detected'
    [softirq]='WARNING: inconsistent lock state'
    [bounds]='BUG: KASAN: slab-out-of-bounds in out_of_bounds'
    [free]='BUG: KASAN: slab-use-after-free in after_free'
)
# reported DEFECT...: the kernel reports each defect, and the command fails.
reported() {
    local how status
    broken --check-kernel-log -- sh -c "$LOAD" load "$@"
    status=$?
    log_has '^loaded' || return 1
    ((status != 0)) || { echo "exit code 0"; return 1; }
    grep '^ringfence: the guest.s kernel reported' "$log" >"$case/error" || return 1
    for how; do
        grep -qF -- "${REPORTS[$how]}" "$case/error" || { echo "not reported: $how"; return 1; }
    done
}
# The guest itself passes the check.
clean() { broken --check-kernel-log -- sh -c "$LOAD" load none && log_has '^loaded'; }
# Without the check, a report fails nothing.
unchecked() { broken -- sh -c "$LOAD" load list && log_has '^loaded'; }

choose_kernels --module-source "$here/broken" --with-module broken --iommu none
for kernel in $KERNELS; do
    try "clean: $kernel" clean
    try "unchecked: $kernel" unchecked
    # lockdep stops at its first report, and at a report of KASAN.
    try "reported: $kernel" reported \
        rcu sleep preemptible ubsan refcount list object dma hung order bounds free
    try "reported: $kernel, soft interrupts" reported softirq
done
all_passed
