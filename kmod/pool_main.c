// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module: its parameters, and counters in /sys/kernel/debug/pooldma.
 */
#include <linux/cc_platform.h>
#include <linux/debugfs.h>
#include <linux/module.h>

#include "pool.h"

#define POOL_MIB_MIN 8
#define POOL_MIB_MAX 1024

unsigned int pool_mib = 32;
module_param_named(mib, pool_mib, uint, 0444);
MODULE_PARM_DESC(mib, "size of each device's pool in MiB, 8 to 1024");

bool pool_preserve;
module_param_named(preserve, pool_preserve, bool, 0444);
MODULE_PARM_DESC(preserve,
		 "keep the bytes of a buffer that a device does not write; it can read them");

struct dentry *pool_debugfs;

/* Sums of the CPUs' counters, at these offsets in struct pool_cpu. */
struct pool_counter {
	const char *name;
	size_t offset;
};

static const struct pool_counter pool_counters[] = {
	{ "full", offsetof(struct pool_cpu, full) },
	{ "bad", offsetof(struct pool_cpu, bad) },
};

static u64 pool_sum(const struct pool *pool, size_t offset)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(*(u64 *)((u8 *)per_cpu_ptr(pool->cpus, cpu) + offset));
	return sum;
}

static int pool_counters_show(struct seq_file *file, void *unused)
{
	const struct pool *pool = file->private;
	size_t i;

	seq_printf(file, "maps %llu\n", pool_maps(pool));
	seq_printf(file, "unmaps %llu\n", pool_unmaps(pool));
	for (i = 0; i < ARRAY_SIZE(pool_counters); i++)
		seq_printf(file, "%s %llu\n", pool_counters[i].name,
			   pool_sum(pool, pool_counters[i].offset));
	seq_printf(file, "live %llu\n", pool_live(pool));
	seq_printf(file, "bytes %llu\n", (u64)READ_ONCE(pool->chunk_count) << POOL_CHUNK_SHIFT);
	seq_printf(file, "last %#llx\n", READ_ONCE(pool->last));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(pool_counters);

void pool_debugfs_add(struct pool *pool)
{
	pool->debugfs = debugfs_create_file(pci_name(pool->pdev), 0400, pool_debugfs, pool,
					    &pool_counters_fops);
}

static int __init pool_init(void)
{
	int err;

	if (pool_mib < POOL_MIB_MIN || pool_mib > POOL_MIB_MAX) {
		pr_err("pooldma: mib must be %u to %u\n", POOL_MIB_MIN, POOL_MIB_MAX);
		return -EINVAL;
	}
	/* Devices do not reach encrypted memory. Such guests have bounce buffers of the kernel. */
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT)) {
		pr_err("pooldma: does not support encrypted memory\n");
		return -EOPNOTSUPP;
	}
	pool_debugfs = debugfs_create_dir("pooldma", NULL);
	err = pool_bind_start();
	if (err)
		debugfs_remove_recursive(pool_debugfs);
	return err;
}

static void __exit pool_exit(void)
{
	pool_bind_stop();
	debugfs_remove_recursive(pool_debugfs);
	pool_bind_free();
}

module_init(pool_init);
module_exit(pool_exit);
MODULE_DESCRIPTION("Shadow buffers for PCI devices behind any IOMMU");
MODULE_LICENSE("GPL");
