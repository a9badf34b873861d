// SPDX-License-Identifier: GPL-2.0-only
/* The engine of the para-virtual IOMMU: the devices that it translates for, and their endpoints. */
#include <linux/bsearch.h>
#include <linux/device.h>
#include <linux/slab.h>

#include "pviommu.h"

static struct pvi_endpoint *pvi_endpoint(struct core_endpoint *core)
{
	return container_of(core, struct pvi_endpoint, core);
}

static int pvi_compare_devids(const void *one, const void *other)
{
	u32 a = *(const u32 *)one;
	u32 b = *(const u32 *)other;

	return (a > b) - (a < b);
}

static bool pvi_translates(struct core_iommu *core, struct pci_dev *pdev)
{
	struct pvi *pvi = container_of(core, struct pvi, core);
	u32 devid = core_devid(pdev);

	/* The host does not translate for the PVIOMMU device itself. */
	return &pdev->dev != pvi->vdev->dev.parent &&
	       bsearch(&devid, pvi->devices, pvi->device_count, sizeof(devid), pvi_compare_devids);
}

static int pvi_endpoint_init(struct core_endpoint *core)
{
	struct pvi_endpoint *endpoint = pvi_endpoint(core);
	int err;

	endpoint->pvi = container_of(core->iommu, struct pvi, core);
	err = pvi_cache_init(endpoint);
	if (err)
		return err;
	err = pvi_iova_init(endpoint);
	if (err) {
		pvi_cache_free(endpoint);
		return err;
	}
	pvi_debugfs_add_endpoint(endpoint);
	return 0;
}

static void pvi_endpoint_free(struct core_endpoint *core)
{
	struct pvi_endpoint *endpoint = pvi_endpoint(core);

	put_iova_domain(&endpoint->iovad);
	pvi_cache_free(endpoint);
}

static void pvi_endpoint_not_bound(struct core_endpoint *core)
{
	pvi_cache_evict_unused(pvi_endpoint(core));
}

static void pvi_endpoint_unbound(struct core_endpoint *core)
{
	pvi_cache_unbind(pvi_endpoint(core));
}

static u64 pvi_endpoint_count_orphans(struct core_endpoint *core)
{
	return atomic_long_read(&pvi_endpoint(core)->orphans);
}

static void pvi_endpoint_stop(struct core_endpoint *core)
{
	cancel_work_sync(&pvi_endpoint(core)->trim);
}

static int pvi_break_virtio(struct device *dev, void *data)
{
	if (is_virtio_device(dev))
		virtio_break_device(dev_to_virtio(dev));
	return 0;
}

/*
 * The driver may be waiting for maps that a broken queue never completes. Drivers of virtio devices
 * (virtio-blk) would wait forever, so their queues are broken first, which ends their requests.
 * Other drivers have time-outs.
 */
static void pvi_will_release(struct core_iommu *core, struct pci_dev *pdev)
{
	struct pvi *pvi = container_of(core, struct pvi, core);

	if (READ_ONCE(pvi->queue.broken))
		device_for_each_child(&pdev->dev, NULL, pvi_break_virtio);
}

const struct core_engine pvi_engine = {
	.name = "pviommu",
	.ops = &pvi_ops,
	.maps_pages = true,
	.endpoint_bytes = sizeof(struct pvi_endpoint),
	.translates = pvi_translates,
	.init = pvi_endpoint_init,
	.free = pvi_endpoint_free,
	.not_bound = pvi_endpoint_not_bound,
	.unbound = pvi_endpoint_unbound,
	.count_orphans = pvi_endpoint_count_orphans,
	.stop = pvi_endpoint_stop,
	.will_release = pvi_will_release,
};

/* Ends a cycle. Each endpoint's work sends the requests and waits for the answers. */
void pvi_trim_all(struct pvi *pvi)
{
	struct pvi_endpoint *endpoint;

	mutex_lock(&pvi->core.mutex);
	list_for_each_entry(endpoint, &pvi->core.endpoints, core.list)
		queue_work(pvi_workqueue, &endpoint->trim);
	mutex_unlock(&pvi->core.mutex);
}
