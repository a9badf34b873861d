// SPDX-License-Identifier: GPL-2.0-only
/*
 * Counters, in /sys/kernel/debug/riommu.
 */
#include <linux/debugfs.h>

#include "riommu.h"

void rio_debugfs_add(struct rio *rio)
{
	rio->debugfs = debugfs_create_dir(pci_name(rio->pdev), rio_debugfs);
	debugfs_create_u64("faults", 0400, rio->debugfs, &rio->faults);
}

void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint)
{
	static const char * const names[RIO_RINGS] = { NULL, "read", "write", "both" };
	struct rio *rio = endpoint->rio;
	struct dentry *device, *dir;
	char name[16];
	int i;

	scnprintf(name, sizeof(name), "%04x:%02x:%02x.%x", pci_domain_nr(rio->pdev->bus),
		  endpoint->id >> 8, endpoint->id >> 3 & 0x1f, endpoint->id & 7);
	device = debugfs_create_dir(name, rio->debugfs);
	for (i = RIO_RING_READ; i < RIO_RINGS; i++) {
		struct rio_ring *ring = &endpoint->rings[i];

		dir = debugfs_create_dir(names[i], device);
		debugfs_create_u64("maps", 0400, dir, &ring->maps);
		debugfs_create_u64("unmaps", 0400, dir, &ring->unmaps);
		debugfs_create_u64("invalidations", 0400, dir, &ring->invalidations);
		debugfs_create_u64("full", 0400, dir, &ring->full);
		debugfs_create_u64("bad", 0400, dir, &ring->bad);
		debugfs_create_u64("lost", 0400, dir, &ring->lost);
	}
}
