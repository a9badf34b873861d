// SPDX-License-Identifier: GPL-2.0-only
/*
 * Selection of the PCI devices that are endpoints. dma_map_ops must be set before a driver binds,
 * and the kernel clears them on unbind. They are therefore set each time that a driver is about to
 * bind. Devices that are bound when the module loads are rebound.
 */
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "core.h"

#define CORE_DEVICES_MAX 64

static char *core_devices[CORE_DEVICES_MAX];
static int core_device_count;
module_param_array_named(devices, core_devices, charp, &core_device_count, 0444);
MODULE_PARM_DESC(devices,
		 "PCI addresses, such as 0000:00:04.0; default: all that the IOMMU translates for");

/* Returns true if the IOMMU translates for the device and the user has selected it. */
static bool core_is_ours(struct core_iommu *iommu, struct pci_dev *pdev)
{
	int i;

	if (!iommu->engine->translates(iommu, pdev))
		return false;
	for (i = 0; i < core_device_count; i++) {
		if (!strcmp(core_devices[i], pci_name(pdev)))
			return true;
	}
	return !core_device_count;
}

/* Caller holds iommu->mutex. */
static struct core_endpoint *core_find_endpoint(struct core_iommu *iommu, struct pci_dev *pdev)
{
	struct core_endpoint *endpoint;

	list_for_each_entry(endpoint, &iommu->endpoints, list) {
		if (endpoint->pdev == pdev)
			return endpoint;
	}
	return NULL;
}

/*
 * Caller holds iommu->mutex. The link orders the shutdown: the device shuts down first, then its
 * IOMMU. It is stateless, because a driver of the device can bind while that of the IOMMU is being
 * probed.
 */
static void core_attach_device(struct core_endpoint *endpoint, struct pci_dev *pdev)
{
	endpoint->pdev = pci_dev_get(pdev);
	if (!device_link_add(&pdev->dev, endpoint->iommu->dev, DL_FLAG_STATELESS))
		dev_warn(&pdev->dev, "%s: device link failed: may shut down after the IOMMU\n",
			 endpoint->iommu->engine->name);
}

/* Caller holds iommu->mutex. Reuses the endpoint of an unplugged device at the same PCI address. */
static struct core_endpoint *core_reuse_endpoint(struct core_iommu *iommu, struct pci_dev *pdev)
{
	u32 devid = core_devid(pdev);
	struct core_endpoint *endpoint;

	list_for_each_entry(endpoint, &iommu->endpoints, list) {
		if (!endpoint->pdev && endpoint->devid == devid) {
			core_attach_device(endpoint, pdev);
			return endpoint;
		}
	}
	return NULL;
}

/*
 * An unplugged device with orphaned mappings. It keeps our dma_map_ops until the module is
 * unloaded, because the owners of the mappings unmap them with its struct device.
 */
struct core_unplugged {
	struct list_head list;
	struct pci_dev *pdev;
};

/* Caller holds iommu->mutex. Transfers or drops the endpoint's reference to the device. */
static void core_detach_device(struct core_endpoint *endpoint)
{
	const struct core_engine *engine = endpoint->iommu->engine;
	struct pci_dev *pdev = endpoint->pdev;

	endpoint->pdev = NULL;
	device_link_remove(&pdev->dev, endpoint->iommu->dev);
	if (engine->count_orphans(endpoint)) {
		struct core_unplugged *unplugged = kzalloc(sizeof(*unplugged), GFP_KERNEL);

		if (unplugged) {
			unplugged->pdev = pdev;
			list_add(&unplugged->list, &endpoint->unplugged);
			return;
		}
		/* Without our operations, an unmap leaves its addresses reserved. */
		dev_warn(&pdev->dev, "%s: out of memory: late unmaps free no addresses\n",
			 engine->name);
	}
	if (get_dma_ops(&pdev->dev) == &endpoint->ops)
		set_dma_ops(&pdev->dev, NULL);
	pci_dev_put(pdev);
}

/* Caller holds iommu->mutex. */
static struct core_endpoint *core_add_endpoint(struct core_iommu *iommu, struct pci_dev *pdev)
{
	const struct core_engine *engine = iommu->engine;
	struct core_endpoint *endpoint = kzalloc(engine->endpoint_bytes, GFP_KERNEL);

	if (!endpoint)
		return NULL;
	endpoint->iommu = iommu;
	endpoint->devid = core_devid(pdev);
	INIT_LIST_HEAD(&endpoint->unplugged);
	strscpy(endpoint->name, pci_name(pdev), sizeof(endpoint->name));
	/* Allocated memory is not const, so a write through the cast is valid. */
	memcpy((void *)&endpoint->ops, engine->ops, sizeof(endpoint->ops));
	if (engine->init(endpoint)) {
		kfree(endpoint);
		return NULL;
	}
	core_attach_device(endpoint, pdev);
	list_add(&endpoint->list, &iommu->endpoints);
	return endpoint;
}

/*
 * Called when a driver is about to bind. Without our dma_map_ops, the device would use addresses
 * that the IOMMU does not translate.
 */
static void core_install(struct core_iommu *iommu, struct pci_dev *pdev)
{
	const char *name = iommu->engine->name;
	struct core_endpoint *endpoint;
	const char *refusal;

	if (!core_is_ours(iommu, pdev))
		return;
	refusal = core_refusal(iommu, pdev);
	if (refusal) {
		dev_err(&pdev->dev, "%s: refused: %s\n", name, refusal);
		if (!use_dma_iommu(&pdev->dev) && !get_dma_ops(&pdev->dev))
			set_dma_ops(&pdev->dev, &core_refusing_ops);
		return;
	}
	mutex_lock(&iommu->mutex);
	endpoint = core_find_endpoint(iommu, pdev) ?: core_reuse_endpoint(iommu, pdev) ?:
						      core_add_endpoint(iommu, pdev);
	mutex_unlock(&iommu->mutex);
	if (!endpoint) {
		dev_err(&pdev->dev, "%s: out of memory: DMA stays blocked\n", name);
		return;
	}
	if (use_dma_iommu(&pdev->dev) ||
	    (get_dma_ops(&pdev->dev) && get_dma_ops(&pdev->dev) != &endpoint->ops)) {
		dev_err(&pdev->dev, "%s: another IOMMU translates for this device\n", name);
		return;
	}
	set_dma_ops(&pdev->dev, &endpoint->ops);
	/* An earlier driver may have set its mask with operations that have no syncs. */
	if (endpoint->ops.sync_single_for_device)
		core_set_skip_sync(&pdev->dev, false);
}

static int core_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct core_iommu *iommu = container_of(block, struct core_iommu, binding);
	const struct core_engine *engine = iommu->engine;
	struct pci_dev *pdev = to_pci_dev(data);
	struct core_endpoint *endpoint;

	if (event == BUS_NOTIFY_BIND_DRIVER) {
		core_install(iommu, pdev);
		return NOTIFY_OK;
	}
	if (event != BUS_NOTIFY_UNBOUND_DRIVER && event != BUS_NOTIFY_DRIVER_NOT_BOUND &&
	    event != BUS_NOTIFY_REMOVED_DEVICE)
		return NOTIFY_DONE;
	mutex_lock(&iommu->mutex);
	endpoint = core_find_endpoint(iommu, pdev);
	mutex_unlock(&iommu->mutex);
	if (!endpoint)
		return NOTIFY_OK;
	/* After a failed probe, devres frees the device's allocations only after this event. */
	if (event == BUS_NOTIFY_DRIVER_NOT_BOUND) {
		if (engine->not_bound)
			engine->not_bound(endpoint);
		return NOTIFY_OK;
	}
	engine->unbound(endpoint);
	if (event == BUS_NOTIFY_UNBOUND_DRIVER) {
		/* The owners of orphaned mappings unmap them with these operations later. */
		if (engine->count_orphans(endpoint))
			set_dma_ops(&pdev->dev, &endpoint->ops);
		return NOTIFY_OK;
	}
	mutex_lock(&iommu->mutex);
	core_detach_device(endpoint);
	mutex_unlock(&iommu->mutex);
	return NOTIFY_OK;
}

void core_init(struct core_iommu *iommu, const struct core_engine *engine, struct device *dev)
{
	iommu->engine = engine;
	iommu->dev = dev;
	mutex_init(&iommu->mutex);
	INIT_LIST_HEAD(&iommu->endpoints);
	iommu->binding.notifier_call = core_bus_event;
}

/* Registers the notifier and rebinds the devices that were bound before. */
int core_start(struct core_iommu *iommu)
{
	struct pci_dev *pdev = NULL;
	int err;

	err = bus_register_notifier(&pci_bus_type, &iommu->binding);
	if (err)
		return err;
	for_each_pci_dev(pdev) {
		if (!core_is_ours(iommu, pdev) || !pdev->dev.driver)
			continue;
		device_release_driver(&pdev->dev);
		if (device_attach(&pdev->dev) < 0)
			dev_warn(&pdev->dev, "%s: its driver does not bind again\n",
				 iommu->engine->name);
	}
	return 0;
}

/*
 * Unbinds the device's driver and removes our dma_map_ops. A driver that binds in the meantime is
 * unbound as well.
 */
static void core_release_driver(struct core_iommu *iommu, struct pci_dev *pdev)
{
	if (iommu->engine->will_release)
		iommu->engine->will_release(iommu, pdev);
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
static void core_forget_unplugged(struct core_endpoint *endpoint)
{
	struct core_unplugged *unplugged, *next;

	list_for_each_entry_safe(unplugged, next, &endpoint->unplugged, list) {
		set_dma_ops(&unplugged->pdev->dev, NULL);
		pci_dev_put(unplugged->pdev);
		kfree(unplugged);
	}
}

/*
 * On return, no endpoint has a driver or a mapping in use. A late unmap (page_pool) may have read
 * our operations before they were removed, and uses the endpoint after that. If it runs in atomic
 * context, as in a softirq, synchronize_rcu() waits for it. It does not wait for an unmap that is
 * preempted or sleeps.
 */
void core_stop(struct core_iommu *iommu)
{
	const struct core_engine *engine = iommu->engine;
	struct core_endpoint *endpoint;
	struct pci_dev *pdev = NULL;

	/* The endpoint's reference to the device outlives its driver. */
	bus_unregister_notifier(&pci_bus_type, &iommu->binding);
	list_for_each_entry(endpoint, &iommu->endpoints, list) {
		if (endpoint->pdev && get_dma_ops(&endpoint->pdev->dev) == &endpoint->ops)
			core_release_driver(iommu, endpoint->pdev);
		core_forget_unplugged(endpoint);
	}
	synchronize_rcu();
	list_for_each_entry(endpoint, &iommu->endpoints, list) {
		engine->unbound(endpoint);
		if (engine->stop)
			engine->stop(endpoint);
	}
	for_each_pci_dev(pdev) {
		if (get_dma_ops(&pdev->dev) == &core_refusing_ops && core_is_ours(iommu, pdev))
			core_release_driver(iommu, pdev);
	}
}

/* Call this when the IOMMU no longer translates: the endpoints' addresses are not in use. */
void core_free(struct core_iommu *iommu)
{
	struct core_endpoint *endpoint, *next;

	list_for_each_entry_safe(endpoint, next, &iommu->endpoints, list) {
		list_del(&endpoint->list);
		iommu->engine->free(endpoint);
		if (endpoint->pdev)
			device_link_remove(&endpoint->pdev->dev, iommu->dev);
		pci_dev_put(endpoint->pdev);
		kfree(endpoint);
	}
}
