// SPDX-License-Identifier: GPL-2.0-only
/*
 * Selection of the PCI devices behind the IOMMU. dma_map_ops must be set before a driver binds, and
 * the kernel clears them on unbind. They are therefore set each time that a driver is about to
 * bind. Devices that are bound when the module loads are rebound.
 */
#include <linux/bsearch.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/slab.h>

#include "riommu.h"

static int rio_compare_ids(const void *one, const void *other)
{
	u16 a = *(const u16 *)one;
	u16 b = *(const u16 *)other;

	return (a > b) - (a < b);
}

/* Requester IDs are those of the IOMMU's PCI segment. */
static bool rio_is_ours(struct rio *rio, struct pci_dev *pdev)
{
	u16 id = pci_dev_id(pdev);

	return pdev != rio->pdev && pci_domain_nr(pdev->bus) == pci_domain_nr(rio->pdev->bus) &&
	       bsearch(&id, rio->devices, rio->device_count, sizeof(id), rio_compare_ids);
}

/* Caller holds rio->mutex. Finds the endpoint of an unplugged device at the same address too. */
static struct rio_endpoint *rio_find_endpoint(struct rio *rio, u16 id)
{
	struct rio_endpoint *endpoint;

	list_for_each_entry(endpoint, &rio->endpoints, list) {
		if (endpoint->id == id)
			return endpoint;
	}
	return NULL;
}

/* Caller holds rio->mutex. */
static struct rio_endpoint *rio_add_endpoint(struct rio *rio, struct pci_dev *pdev)
{
	struct rio_endpoint fresh = {
		.rio = rio,
		.id = pci_dev_id(pdev),
		.ops = rio_ops,
	};
	struct rio_endpoint *endpoint = kmemdup(&fresh, sizeof(fresh), GFP_KERNEL);

	if (!endpoint)
		return NULL;
	if (rio_rdevice_init(endpoint)) {
		rio_rdevice_free(endpoint);
		kfree(endpoint);
		return NULL;
	}
	list_add(&endpoint->list, &rio->endpoints);
	rio_rdevice_attach(endpoint);
	rio_debugfs_add_endpoint(endpoint);
	return endpoint;
}

/* Called when a driver is about to bind. Without our dma_map_ops, all DMA of the device faults. */
static void rio_install(struct rio *rio, struct pci_dev *pdev)
{
	struct rio_endpoint *endpoint;

	if (!rio_is_ours(rio, pdev))
		return;
	mutex_lock(&rio->mutex);
	endpoint = rio_find_endpoint(rio, pci_dev_id(pdev)) ?: rio_add_endpoint(rio, pdev);
	if (endpoint && !endpoint->pdev)
		endpoint->pdev = pci_dev_get(pdev);
	mutex_unlock(&rio->mutex);
	if (!endpoint) {
		dev_err(&pdev->dev, "riommu: no memory for its rings, it reaches nothing\n");
		return;
	}
	if (use_dma_iommu(&pdev->dev) ||
	    (get_dma_ops(&pdev->dev) && get_dma_ops(&pdev->dev) != &endpoint->ops)) {
		dev_err(&pdev->dev, "riommu: another IOMMU translates for it\n");
		return;
	}
	set_dma_ops(&pdev->dev, &endpoint->ops);
}

static void rio_unplug(struct rio *rio, struct pci_dev *pdev)
{
	struct rio_endpoint *endpoint;

	mutex_lock(&rio->mutex);
	endpoint = rio_find_endpoint(rio, pci_dev_id(pdev));
	if (endpoint && endpoint->pdev == pdev) {
		endpoint->pdev = NULL;
		if (get_dma_ops(&pdev->dev) == &endpoint->ops)
			set_dma_ops(&pdev->dev, NULL);
		pci_dev_put(pdev);
	}
	mutex_unlock(&rio->mutex);
}

static int rio_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct rio *rio = container_of(block, struct rio, binding);
	struct pci_dev *pdev = to_pci_dev(data);

	switch (event) {
	case BUS_NOTIFY_BIND_DRIVER:
		rio_install(rio, pdev);
		return NOTIFY_OK;
	case BUS_NOTIFY_REMOVED_DEVICE:
		rio_unplug(rio, pdev);
		return NOTIFY_OK;
	default:
		return NOTIFY_DONE;
	}
}

/* Registers the notifier and rebinds the devices that were bound before. */
int rio_bind_start(struct rio *rio)
{
	struct pci_dev *pdev = NULL;
	int err;

	rio->binding.notifier_call = rio_bus_event;
	err = bus_register_notifier(&pci_bus_type, &rio->binding);
	if (err)
		return err;
	for_each_pci_dev(pdev) {
		if (!rio_is_ours(rio, pdev) || !pdev->dev.driver)
			continue;
		device_release_driver(&pdev->dev);
		if (device_attach(&pdev->dev) < 0)
			dev_warn(&pdev->dev, "riommu: its driver does not bind again\n");
	}
	return 0;
}

/* Unbinds the driver and removes our dma_map_ops. A driver that binds meanwhile is unbound too. */
static void rio_release_driver(struct pci_dev *pdev)
{
	device_lock(&pdev->dev);
	while (pdev->dev.driver) {
		device_unlock(&pdev->dev);
		device_release_driver(&pdev->dev);
		device_lock(&pdev->dev);
	}
	set_dma_ops(&pdev->dev, NULL);
	device_unlock(&pdev->dev);
}

/* On return, no endpoint has a driver. */
void rio_bind_stop(struct rio *rio)
{
	struct rio_endpoint *endpoint;

	bus_unregister_notifier(&pci_bus_type, &rio->binding);
	list_for_each_entry(endpoint, &rio->endpoints, list) {
		if (endpoint->pdev && get_dma_ops(&endpoint->pdev->dev) == &endpoint->ops)
			rio_release_driver(endpoint->pdev);
	}
}

/* Call this when the IOMMU no longer translates. */
void rio_bind_free(struct rio *rio)
{
	struct rio_endpoint *endpoint, *next;

	list_for_each_entry_safe(endpoint, next, &rio->endpoints, list) {
		list_del(&endpoint->list);
		rio_rdevice_free(endpoint);
		pci_dev_put(endpoint->pdev);
		kfree(endpoint);
	}
}
