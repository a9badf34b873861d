// SPDX-License-Identifier: GPL-2.0-only
/* Counters in debugfs, in pviommu/: those of the queue, and a directory for each endpoint. */
#include <linux/debugfs.h>

#include "pviommu.h"

void pvi_debugfs_add(struct pvi *pvi)
{
	struct dentry *dir = debugfs_create_dir(dev_name(&pvi->vdev->dev), pvi_debugfs);

	pvi->debugfs = dir;
	debugfs_create_u64("requests", 0444, dir, &pvi->queue.requests);
	debugfs_create_u64("kicks", 0444, dir, &pvi->queue.kicks);
	debugfs_create_bool("broken", 0444, dir, &pvi->queue.broken);
	debugfs_create_u64("events", 0444, dir, &pvi->events_seen);
	debugfs_create_u64("cycle", 0444, dir, &pvi->cycle);
}

void pvi_debugfs_add_endpoint(struct pvi_endpoint *endpoint)
{
	struct dentry *dir = debugfs_create_dir(endpoint->name, endpoint->pvi->debugfs);

	debugfs_create_u64("maps", 0444, dir, &endpoint->maps);
	debugfs_create_u64("unmaps", 0444, dir, &endpoint->unmaps);
	debugfs_create_u64("hits", 0444, dir, &endpoint->hits);
	debugfs_create_u64("misses", 0444, dir, &endpoint->misses);
	debugfs_create_u64("expired", 0444, dir, &endpoint->expired);
	debugfs_create_u64("forced", 0444, dir, &endpoint->forced);
	debugfs_create_u64("full", 0444, dir, &endpoint->full);
	debugfs_create_u64("failures", 0444, dir, &endpoint->failures);
	debugfs_create_u64("lost", 0444, dir, &endpoint->lost);
	debugfs_create_u64("live", 0444, dir, &endpoint->live);
	debugfs_create_u64("kept", 0444, dir, &endpoint->kept);
	debugfs_create_u64("kept_pages", 0444, dir, &endpoint->kept_pages);
	debugfs_create_u64("orphans", 0444, dir, &endpoint->orphans);
}
