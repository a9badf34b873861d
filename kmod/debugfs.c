// SPDX-License-Identifier: GPL-2.0-only
/* Counters in debugfs, in pviommu/: those of the queue, and a directory for each endpoint. */
#include <linux/debugfs.h>

#include "pviommu.h"

static int pvi_count_get(void *counter, u64 *sum)
{
	*sum = pvi_count((const u64 __percpu *)(unsigned long)counter);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(pvi_count_fops, pvi_count_get, NULL, "%llu\n");

static void pvi_debugfs_add_count(const char *name, struct dentry *dir, u64 __percpu *counter)
{
	debugfs_create_file_unsafe(name, 0444, dir, (void *)(__force unsigned long)counter,
				   &pvi_count_fops);
}

static int pvi_orphans_get(void *data, u64 *value)
{
	struct pvi_endpoint *endpoint = data;

	*value = atomic_long_read(&endpoint->orphans);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE(pvi_orphans_fops, pvi_orphans_get, NULL, "%llu\n");

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
	struct dentry *dir = debugfs_create_dir(endpoint->core.name, endpoint->pvi->debugfs);

	pvi_debugfs_add_count("maps", dir, &endpoint->counts->maps);
	pvi_debugfs_add_count("unmaps", dir, &endpoint->counts->unmaps);
	pvi_debugfs_add_count("hits", dir, &endpoint->counts->hits);
	pvi_debugfs_add_count("misses", dir, &endpoint->counts->misses);
	pvi_debugfs_add_count("expired", dir, &endpoint->counts->expired);
	pvi_debugfs_add_count("forced", dir, &endpoint->counts->forced);
	pvi_debugfs_add_count("full", dir, &endpoint->counts->full);
	pvi_debugfs_add_count("failures", dir, &endpoint->counts->failures);
	pvi_debugfs_add_count("lost", dir, &endpoint->counts->lost);
	pvi_debugfs_add_count("live", dir, &endpoint->counts->live);
	pvi_debugfs_add_count("kept", dir, &endpoint->counts->kept);
	pvi_debugfs_add_count("kept_pages", dir, &endpoint->counts->kept_pages);
	debugfs_create_file_unsafe("orphans", 0444, dir, endpoint, &pvi_orphans_fops);
}
