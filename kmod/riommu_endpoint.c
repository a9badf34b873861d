// SPDX-License-Identifier: GPL-2.0-only
/* The engine of a ring IOMMU: the devices behind it, and their endpoints. */
#include <linux/bsearch.h>

#include "riommu.h"

static struct rio_endpoint *rio_endpoint(struct core_endpoint *core)
{
	return container_of(core, struct rio_endpoint, core);
}

static int rio_compare_ids(const void *one, const void *other)
{
	u16 a = *(const u16 *)one;
	u16 b = *(const u16 *)other;

	return (a > b) - (a < b);
}

/* Requester IDs are those of the IOMMU's PCI segment. */
static bool rio_translates(struct core_iommu *core, struct pci_dev *pdev)
{
	struct rio *rio = container_of(core, struct rio, core);
	u16 id = pci_dev_id(pdev);

	return pdev != rio->pdev && pci_domain_nr(pdev->bus) == pci_domain_nr(rio->pdev->bus) &&
	       bsearch(&id, rio->devices, rio->device_count, sizeof(id), rio_compare_ids);
}

static int rio_endpoint_init(struct core_endpoint *core)
{
	struct rio_endpoint *endpoint = rio_endpoint(core);
	int err;

	endpoint->rio = container_of(core->iommu, struct rio, core);
	endpoint->id = core->devid;
	if (rio_mode == RIO_BURST)
		memcpy((void *)&core->ops, &rio_burst_ops, sizeof(core->ops));
	err = rio_rdevice_init(endpoint);
	if (err) {
		rio_rdevice_free(endpoint);
		return err;
	}
	rio_burst_init(endpoint);
	rio_rdevice_attach(endpoint);
	rio_debugfs_add_endpoint(endpoint);
	return 0;
}

static void rio_endpoint_free(struct core_endpoint *core)
{
	rio_rdevice_free(rio_endpoint(core));
}

/*
 * Unmaps what the driver left. Its slots stay out of use until their owners unmap them (page_pool
 * does this), so that a late unmap does not affect another driver's buffer.
 */
static void rio_endpoint_unbound(struct core_endpoint *core)
{
	struct rio_endpoint *endpoint = rio_endpoint(core);
	u64 left = 0;
	int i;

	rio_burst_end_all(endpoint);
	for (i = RIO_RING_READ; i < RIO_RINGS; i++)
		left += rio_ring_unbind(&endpoint->rings[i]);
	if (left)
		dev_warn(core->iommu->dev,
			 "%s: the driver left %llu mappings, now unmapped; slots stay reserved\n",
			 core->name, left);
}

static u64 rio_endpoint_count_orphans(struct core_endpoint *core)
{
	struct rio_endpoint *endpoint = rio_endpoint(core);
	u64 left = 0;
	int i;

	for (i = RIO_RING_READ; i < RIO_RINGS; i++)
		left += atomic64_read(&endpoint->rings[i].orphans);
	return left;
}

static void rio_endpoint_stop(struct core_endpoint *core)
{
	rio_burst_stop(rio_endpoint(core));
}

const struct core_engine rio_engine = {
	.name = "riommu",
	.ops = &rio_ops,
	.endpoint_bytes = sizeof(struct rio_endpoint),
	.translates = rio_translates,
	.init = rio_endpoint_init,
	.free = rio_endpoint_free,
	.unbound = rio_endpoint_unbound,
	.count_orphans = rio_endpoint_count_orphans,
	.stop = rio_endpoint_stop,
};
