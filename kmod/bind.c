// SPDX-License-Identifier: GPL-2.0-only
/*
 * Selection of the PCI devices that are endpoints. dma_map_ops must be set before a driver binds,
 * and the kernel clears them on unbind. They are therefore set each time that a driver is about to
 * bind. Devices that are bound when the module loads are rebound.
 */
#include <linux/bsearch.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "pviommu.h"

#define PVI_DEVICES_MAX 64

static char *pvi_devices[PVI_DEVICES_MAX];
static int pvi_device_count;
module_param_array_named(devices, pvi_devices, charp, &pvi_device_count, 0444);
MODULE_PARM_DESC(devices, "endpoints by PCI address, such as 0000:00:04.0; default: all that the host translates for");

static u32 pvi_devid(struct pci_dev *pdev)
{
	return (u32)pci_domain_nr(pdev->bus) << 16 | pci_dev_id(pdev);
}

static int pvi_compare_devids(const void *one, const void *other)
{
	u32 a = *(const u32 *)one;
	u32 b = *(const u32 *)other;

	return (a > b) - (a < b);
}

/* Returns true if the host translates for the device and the user has selected it. */
static bool pvi_is_ours(struct pvi *pvi, struct pci_dev *pdev)
{
	u32 devid = pvi_devid(pdev);
	int i;

	/* The host does not translate for the PVIOMMU device itself. */
	if (&pdev->dev == pvi->vdev->dev.parent ||
	    !bsearch(&devid, pvi->devices, pvi->device_count, sizeof(devid), pvi_compare_devids))
		return false;
	for (i = 0; i < pvi_device_count; i++) {
		if (!strcmp(pvi_devices[i], pci_name(pdev)))
			return true;
	}
	return !pvi_device_count;
}

/* Caller holds pvi->mutex. */
static struct pvi_endpoint *pvi_find_endpoint(struct pvi *pvi, struct pci_dev *pdev)
{
	struct pvi_endpoint *endpoint;

	list_for_each_entry(endpoint, &pvi->endpoints, list) {
		if (endpoint->pdev == pdev)
			return endpoint;
	}
	return NULL;
}

/* Caller holds pvi->mutex. Reuses the endpoint of an unplugged device at the same PCI address. */
static struct pvi_endpoint *pvi_reuse_endpoint(struct pvi *pvi, struct pci_dev *pdev)
{
	u32 devid = pvi_devid(pdev);
	struct pvi_endpoint *endpoint;

	list_for_each_entry(endpoint, &pvi->endpoints, list) {
		if (!endpoint->pdev && endpoint->devid == devid) {
			endpoint->pdev = pci_dev_get(pdev);
			return endpoint;
		}
	}
	return NULL;
}

/*
 * An unplugged device with remaining mappings. It keeps our dma_map_ops until the module is
 * unloaded, because the owners of the mappings unmap them with its struct device.
 */
struct pvi_unplugged {
	struct list_head list;
	struct pci_dev *pdev;
};

/* Caller holds pvi->mutex. Transfers or drops the endpoint's reference to the device. */
static void pvi_unplug(struct pvi_endpoint *endpoint)
{
	struct pci_dev *pdev = endpoint->pdev;
	struct pvi_unplugged *unplugged = NULL;

	endpoint->pdev = NULL;
	if (READ_ONCE(endpoint->orphans))
		unplugged = kzalloc(sizeof(*unplugged), GFP_KERNEL);
	if (unplugged) {
		unplugged->pdev = pdev;
		list_add(&unplugged->list, &endpoint->unplugged);
		return;
	}
	if (get_dma_ops(&pdev->dev) == &endpoint->ops)
		set_dma_ops(&pdev->dev, NULL);
	pci_dev_put(pdev);
}

/* Caller holds pvi->mutex. */
static struct pvi_endpoint *pvi_add_endpoint(struct pvi *pvi, struct pci_dev *pdev)
{
	struct pvi_endpoint fresh = {
		.pvi = pvi,
		.devid = pvi_devid(pdev),
		.ops = pvi_ops,
	};
	struct pvi_endpoint *endpoint = kmemdup(&fresh, sizeof(fresh), GFP_KERNEL);

	if (!endpoint)
		return NULL;
	if (pvi_cache_init(endpoint))
		goto free;
	if (pvi_iova_init(endpoint))
		goto free_cache;
	INIT_LIST_HEAD(&endpoint->unplugged);
	strscpy(endpoint->name, pci_name(pdev), sizeof(endpoint->name));
	endpoint->pdev = pci_dev_get(pdev);
	list_add(&endpoint->list, &pvi->endpoints);
	pvi_debugfs_add_endpoint(endpoint);
	return endpoint;

free_cache:
	pvi_cache_free(endpoint);
free:
	kfree(endpoint);
	return NULL;
}

/*
 * Called when a driver is about to bind. Without our dma_map_ops, the device would use addresses
 * that the host does not map.
 */
static void pvi_install(struct pvi *pvi, struct pci_dev *pdev)
{
	struct pvi_endpoint *endpoint;

	if (!pvi_is_ours(pvi, pdev))
		return;
	mutex_lock(&pvi->mutex);
	endpoint = pvi_find_endpoint(pvi, pdev) ?: pvi_reuse_endpoint(pvi, pdev) ?:
						   pvi_add_endpoint(pvi, pdev);
	mutex_unlock(&pvi->mutex);
	if (!endpoint) {
		dev_err(&pdev->dev, "pviommu: no memory for its mappings, it reaches nothing\n");
		return;
	}
	if (use_dma_iommu(&pdev->dev) ||
	    (get_dma_ops(&pdev->dev) && get_dma_ops(&pdev->dev) != &endpoint->ops)) {
		dev_err(&pdev->dev, "pviommu: another IOMMU translates for it\n");
		return;
	}
	set_dma_ops(&pdev->dev, &endpoint->ops);
}

static int pvi_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pvi *pvi = container_of(block, struct pvi, binding);
	struct pci_dev *pdev = to_pci_dev(data);
	struct pvi_endpoint *endpoint;

	if (event == BUS_NOTIFY_BIND_DRIVER) {
		pvi_install(pvi, pdev);
		return NOTIFY_OK;
	}
	if (event != BUS_NOTIFY_UNBOUND_DRIVER && event != BUS_NOTIFY_DRIVER_NOT_BOUND &&
	    event != BUS_NOTIFY_REMOVED_DEVICE)
		return NOTIFY_DONE;
	mutex_lock(&pvi->mutex);
	endpoint = pvi_find_endpoint(pvi, pdev);
	mutex_unlock(&pvi->mutex);
	if (!endpoint)
		return NOTIFY_OK;
	/* After a failed probe, devres frees the device's allocations only after this event. */
	if (event == BUS_NOTIFY_DRIVER_NOT_BOUND) {
		pvi_cache_evict_unused(endpoint);
		return NOTIFY_OK;
	}
	pvi_cache_unbind(endpoint);
	if (event == BUS_NOTIFY_UNBOUND_DRIVER) {
		/* The owners of the remaining mappings unmap them with these operations later. */
		if (READ_ONCE(endpoint->orphans))
			set_dma_ops(&pdev->dev, &endpoint->ops);
		return NOTIFY_OK;
	}
	mutex_lock(&pvi->mutex);
	pvi_unplug(endpoint);
	mutex_unlock(&pvi->mutex);
	return NOTIFY_OK;
}

/* Registers the notifier and rebinds the devices that were bound before. */
int pvi_bind_start(struct pvi *pvi)
{
	struct pci_dev *pdev = NULL;
	int err;

	pvi->binding.notifier_call = pvi_bus_event;
	err = bus_register_notifier(&pci_bus_type, &pvi->binding);
	if (err)
		return err;
	for_each_pci_dev(pdev) {
		if (!pvi_is_ours(pvi, pdev) || !pdev->dev.driver)
			continue;
		device_release_driver(&pdev->dev);
		if (device_attach(&pdev->dev) < 0)
			dev_warn(&pdev->dev, "pviommu: its driver does not bind again\n");
	}
	return 0;
}

static int pvi_break_virtio(struct device *dev, void *data)
{
	if (is_virtio_device(dev))
		virtio_break_device(dev_to_virtio(dev));
	return 0;
}

/*
 * Unbinds the driver and removes our dma_map_ops. The driver may be waiting for maps that a broken
 * queue never completes. Drivers of virtio devices (virtio-blk) would wait forever, so their queues
 * are broken first, which ends their requests. Other drivers have time-outs. A driver that binds in
 * the meantime is unbound as well.
 */
static void pvi_release_driver(struct pvi *pvi, struct pci_dev *pdev)
{
	if (READ_ONCE(pvi->queue.broken))
		device_for_each_child(&pdev->dev, NULL, pvi_break_virtio);
	device_lock(&pdev->dev);
	while (pdev->dev.driver) {
		device_unlock(&pdev->dev);
		device_release_driver(&pdev->dev);
		device_lock(&pdev->dev);
	}
	set_dma_ops(&pdev->dev, NULL);
	device_unlock(&pdev->dev);
}

/* Removes our dma_map_ops from unplugged devices, so that they no longer refer to the endpoint. */
static void pvi_forget_unplugged(struct pvi_endpoint *endpoint)
{
	struct pvi_unplugged *unplugged, *next;

	list_for_each_entry_safe(unplugged, next, &endpoint->unplugged, list) {
		set_dma_ops(&unplugged->pdev->dev, NULL);
		pci_dev_put(unplugged->pdev);
		kfree(unplugged);
	}
}

/* On return, no endpoint has a driver or a mapping in use. */
void pvi_bind_stop(struct pvi *pvi)
{
	struct pvi_endpoint *endpoint, *next;

	/* The endpoint's reference to the device outlives its driver. */
	bus_unregister_notifier(&pci_bus_type, &pvi->binding);
	list_for_each_entry_safe(endpoint, next, &pvi->endpoints, list) {
		if (endpoint->pdev && get_dma_ops(&endpoint->pdev->dev) == &endpoint->ops)
			pvi_release_driver(pvi, endpoint->pdev);
		pvi_forget_unplugged(endpoint);
		pvi_cache_unbind(endpoint);
		cancel_work_sync(&endpoint->trim);
	}
}

/* Call this after a reset of the device: its addresses are no longer in use. */
void pvi_bind_free(struct pvi *pvi)
{
	struct pvi_endpoint *endpoint, *next;

	list_for_each_entry_safe(endpoint, next, &pvi->endpoints, list) {
		list_del(&endpoint->list);
		put_iova_domain(&endpoint->iovad);
		pvi_cache_free(endpoint);
		pci_dev_put(endpoint->pdev);
		kfree(endpoint);
	}
}

/* Ends a cycle. Each endpoint's work sends the requests and waits for the answers. */
void pvi_trim_all(struct pvi *pvi)
{
	struct pvi_endpoint *endpoint;

	mutex_lock(&pvi->mutex);
	list_for_each_entry(endpoint, &pvi->endpoints, list)
		queue_work(pvi_workqueue, &endpoint->trim);
	mutex_unlock(&pvi->mutex);
}
