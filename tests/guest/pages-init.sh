#!/bin/busybox sh
# The init process of the guest of pages.sh: records disk reads and new tasks with the events of the
# page allocator, judges the recording, stores both on the disk `results`, and powers off.

export PATH=/bin

# Prints the NVMe disk with this serial number.
disk() {
    for one in /sys/block/nvme*; do
        grep -q "$1" "$one/device/serial" 2>/dev/null && echo "/dev/${one##*/}"
    done
}
# Each task maps its own pages, and frees them at its exit; the next task gets them.
churn() {
    local from i
    from=$(disk workload)
    for i in $(seq 150); do
        dd if="$from" of=/dev/null bs=64k count=2 skip="$i" iflag=direct 2>/dev/null || return 1
    done
}
# The command of the recording.
case "$1" in churn) "$@"; exit ;; esac

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tracefs tracefs /sys/kernel/tracing
mkdir -p /out
uname -r >/out/kernel
for module in $(cat /modules/nvme.order); do insmod "/modules/$module.ko"; done
for _ in $(seq 100); do
    [ -b "$(disk workload)" ] && [ -b "$(disk results)" ] && break
    usleep 100000
done
timeout 240 ringfence trace record --pages -o /out/pages.trace.zst -- /init churn >>/out/log 2>&1
echo $? >/out/record.code
timeout 240 ringfence trace judge --json /out/pages.trace.zst >/out/judge.json 2>>/out/log
echo $? >/out/judge.code
# A guest without work hardly allocates a page.
while :; do churn; done & load=$!
timeout 240 ringfence trace judge --json --record 3 >/out/record.json 2>>/out/log
echo $? >/out/live.code
kill $load; wait $load
ls /sys/kernel/tracing/instances >/out/instances
cat /sys/kernel/iommu_groups/*/type >/out/types
dmesg >/out/dmesg
cd /out && tar cf "$(disk results)" . && sync
poweroff -f
