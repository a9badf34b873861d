// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counters, in /sys/kernel/debug/riommu.
 */
#include <linux/debugfs.h>

#include "riommu.h"

static int rio_count(void *data, u64 *value)
{
	*value = atomic64_read((atomic64_t *)data);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(rio_count_file, rio_count, NULL, "%llu\n");

/* A slot is taken for each map. */
static int rio_maps(void *data, u64 *value)
{
	struct rio_ring *ring = data;

	*value = READ_ONCE(ring->free_slots.head);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(rio_maps_file, rio_maps, NULL, "%llu\n");

/* A slot that is not lost becomes free again at its unmap. */
static int rio_unmaps(void *data, u64 *value)
{
	struct rio_ring *ring = data;

	*value = READ_ONCE(ring->free_slots.tail) - ring->slots + atomic64_read(&ring->lost);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(rio_unmaps_file, rio_unmaps, NULL, "%llu\n");

void rio_debugfs_add(struct rio *rio)
{
	rio->debugfs = debugfs_create_dir(pci_name(rio->pdev), rio_debugfs);
	debugfs_create_u64("faults", 0400, rio->debugfs, &rio->faults);
	debugfs_create_u64("restarts", 0400, rio->debugfs, &rio->fault_restarts);
}

void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint)
{
	static const char * const names[RIO_RINGS] = { NULL, "read", "write", "both" };
	struct rio *rio = endpoint->rio;
	struct dentry *device, *dir;
	int i;

	device = debugfs_create_dir(endpoint->core.name, rio->debugfs);
	for (i = RIO_RING_READ; i < RIO_RINGS; i++) {
		struct rio_ring *ring = &endpoint->rings[i];

		dir = debugfs_create_dir(names[i], device);
		debugfs_create_file("maps", 0400, dir, ring, &rio_maps_file);
		debugfs_create_file("unmaps", 0400, dir, ring, &rio_unmaps_file);
		debugfs_create_file("invalidations", 0400, dir, &ring->invalidations,
				    &rio_count_file);
		debugfs_create_file("deferred", 0400, dir, &ring->deferred, &rio_count_file);
		debugfs_create_file("held", 0400, dir, &ring->held, &rio_count_file);
		debugfs_create_file("shadows", 0400, dir, &ring->shadows_used, &rio_count_file);
		debugfs_create_file("full", 0400, dir, &ring->full, &rio_count_file);
		debugfs_create_file("bad", 0400, dir, &ring->bad, &rio_count_file);
		debugfs_create_file("lost", 0400, dir, &ring->lost, &rio_count_file);
		debugfs_create_file("orphans", 0400, dir, &ring->orphans, &rio_count_file);
	}
}
