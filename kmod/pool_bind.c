// SPDX-License-Identifier: GPL-2.0-only
/*
 * Selection of PCI devices. A device has its pool while a driver is bound, and longer if the driver
 * leaves mappings. The module then counts as used, so it is not unloaded before the last unmap.
 */
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "pool.h"

#define POOL_DEVICES_MAX 64

static char *pool_devices[POOL_DEVICES_MAX];
static int pool_device_count;
module_param_array_named(devices, pool_devices, charp, &pool_device_count, 0444);
MODULE_PARM_DESC(devices,
		 "PCI addresses, such as 0000:00:04.0; all: those that an IOMMU translates for");

static DEFINE_MUTEX(pool_mutex);
static LIST_HEAD(pools);

/* A device without an IOMMU reaches all memory, so it gets a pool only if it is named. */
static bool pool_is_selected(struct pci_dev *pdev)
{
	int i;

	for (i = 0; i < pool_device_count; i++) {
		if (!strcmp(pool_devices[i], pci_name(pdev)) ||
		    (!strcmp(pool_devices[i], "all") && use_dma_iommu(&pdev->dev)))
			return true;
	}
	return false;
}

/* Caller holds pool_mutex. */
static struct pool *pool_find_device(struct pci_dev *pdev)
{
	struct pool *pool;

	list_for_each_entry(pool, &pools, list) {
		if (pool->pdev == pdev)
			return pool;
	}
	return NULL;
}

/* Caller holds pool_mutex. Restores the IOMMU's operations, and frees the pool's memory. */
static void pool_deactivate(struct pool *pool)
{
	pool_slots_set_orphans(pool, false);
	if (pool->is_removed) {
		set_dma_ops(&pool->pdev->dev, NULL);
	} else {
		pool_restore_ops(pool);
		pool_memory_unmap(pool);
	}
	pool_memory_free(pool);
	pool->is_active = false;
	module_put(THIS_MODULE);
}

/* Caller holds pool_mutex; no driver is bound. */
static void pool_release_if_unused(struct pool *pool)
{
	if (!pool->is_active)
		return;
	/* arch_teardown_dma_ops() may clear the operations at an unbind. That of x86 is empty. */
	set_dma_ops(&pool->pdev->dev, &pool->ops);
	if (pool_live(pool)) {
		pool_slots_set_orphans(pool, true);
		/* Each later unmap queues the work; earlier ones are counted below. */
		synchronize_rcu();
	}
	if (pool_is_unused(pool))
		pool_deactivate(pool);
}

static void pool_release_work(struct work_struct *work)
{
	struct pool *pool = container_of(work, struct pool, release_work);

	device_lock(&pool->pdev->dev);
	mutex_lock(&pool_mutex);
	if (!pool->pdev->dev.driver)
		pool_release_if_unused(pool);
	mutex_unlock(&pool_mutex);
	device_unlock(&pool->pdev->dev);
}

/* The pool is not in the list, and has no memory. */
static void pool_delete(struct pool *pool)
{
	cancel_work_sync(&pool->release_work);
	pci_dev_put(pool->pdev);
	free_percpu(pool->cpus);
	kvfree(pool->index);
	kfree(pool);
}

/* Caller holds pool_mutex. */
static struct pool *pool_new(struct pci_dev *pdev)
{
	struct pool fresh = { .ops = pool_ops };
	struct pool *pool = kmemdup(&fresh, sizeof(fresh), GFP_KERNEL);

	if (!pool)
		return NULL;
	raw_spin_lock_init(&pool->lock);
	INIT_WORK(&pool->release_work, pool_release_work);
	pool->pdev = pci_dev_get(pdev);
	pool->cpus = alloc_percpu(struct pool_cpu);
	pool->index = kvcalloc(POOL_CHUNKS_MAX, sizeof(*pool->index), GFP_KERNEL);
	if (!pool->cpus || !pool->index) {
		pool_delete(pool);
		return NULL;
	}
	pool_slots_init(pool);
	list_add(&pool->list, &pools);
	pool_debugfs_add(pool);
	return pool;
}

/* Caller holds pool_mutex. Without memory the operations are installed too: all maps fail. */
static void pool_activate(struct pool *pool)
{
	struct device *dev = &pool->pdev->dev;
	int err;

	/* Fails while the module is being unloaded. */
	if (!try_module_get(THIS_MODULE)) {
		dev_warn(dev, "pooldma: is being unloaded, the device has no pool\n");
		return;
	}
	err = pool_memory_init(pool, DMA_BIT_MASK(32));
	if (err)
		dev_err(dev, "pooldma: no pool of %u MiB, DMA stays blocked: %d\n", pool_mib, err);
	if (!use_dma_iommu(dev))
		dev_warn(dev, "pooldma: no IOMMU: the device reaches all memory\n");
	pool_install_ops(pool);
	pool->is_active = true;
}

/* Caller holds pool_mutex. The pool is NULL without memory for it. */
static void pool_add(struct pool *pool, struct pci_dev *pdev)
{
	if (!pool)
		dev_err(&pdev->dev, "pooldma: no memory, the device has no pool\n");
	else if (get_dma_ops(&pdev->dev))
		dev_err(&pdev->dev, "pooldma: another module has set the dma_map_ops\n");
	else
		pool_activate(pool);
}

/* Called when a driver is about to bind. */
static void pool_install(struct pci_dev *pdev)
{
	struct pool *pool;

	/* vfio and others manage the IOMMU themselves. */
	if (to_pci_driver(pdev->dev.driver)->driver_managed_dma)
		return;
	mutex_lock(&pool_mutex);
	pool = pool_find_device(pdev);
	if (pool && pool->is_active) {
		/* Mappings of an earlier driver, or of a failed probe, remain. */
		pool_slots_set_orphans(pool, false);
		set_dma_ops(&pdev->dev, &pool->ops);
	} else if (pool_is_selected(pdev)) {
		pool_add(pool ?: pool_new(pdev), pdev);
	}
	mutex_unlock(&pool_mutex);
}

/* Called when the last driver has unbound. */
static void pool_unbound(struct pci_dev *pdev)
{
	struct pool *pool;

	mutex_lock(&pool_mutex);
	pool = pool_find_device(pdev);
	if (pool)
		pool_release_if_unused(pool);
	if (pool && pool->is_active)
		dev_warn(&pdev->dev, "pooldma: its driver has left %llu mappings\n",
			 pool_live(pool));
	mutex_unlock(&pool_mutex);
}

/* Called before the IOMMU forgets the device. It reaches nothing; late unmaps still copy. */
static void pool_removed(struct pci_dev *pdev)
{
	struct pool *pool;

	mutex_lock(&pool_mutex);
	pool = pool_find_device(pdev);
	if (pool) {
		debugfs_remove(pool->debugfs);
		if (!pool->is_active)
			list_del(&pool->list);
	}
	if (pool && pool->is_active) {
		pool_restore_ops(pool);
		pool_memory_unmap(pool);
		pool->is_removed = true;
		pool_install_ops(pool);
		pool = NULL;
	}
	mutex_unlock(&pool_mutex);
	if (pool)
		pool_delete(pool);
}

static int pool_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pdev = to_pci_dev(data);
	struct pool *pool;

	switch (event) {
	case BUS_NOTIFY_BIND_DRIVER:
		pool_install(pdev);
		return NOTIFY_OK;
	case BUS_NOTIFY_UNBOUND_DRIVER:
		pool_unbound(pdev);
		return NOTIFY_OK;
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
		/* devres frees the device's allocations only after this event. */
		mutex_lock(&pool_mutex);
		pool = pool_find_device(pdev);
		if (pool && pool->is_active)
			schedule_work(&pool->release_work);
		mutex_unlock(&pool_mutex);
		return NOTIFY_OK;
	case BUS_NOTIFY_REMOVED_DEVICE:
		pool_removed(pdev);
		return NOTIFY_OK;
	default:
		return NOTIFY_DONE;
	}
}

/* Runs before the notifiers of the IOMMU and of dma-debug, which look for mappings. */
static struct notifier_block pool_binding = {
	.notifier_call = pool_bus_event,
	.priority = 1,
};

/* The IOMMU's driver may have cleared the operations of a removed device. */
static int pool_last_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pdev = to_pci_dev(data);
	struct pool *pool;

	if (event != BUS_NOTIFY_REMOVED_DEVICE)
		return NOTIFY_DONE;
	mutex_lock(&pool_mutex);
	pool = pool_find_device(pdev);
	if (pool && pool->is_active)
		set_dma_ops(&pdev->dev, &pool->ops);
	mutex_unlock(&pool_mutex);
	return NOTIFY_OK;
}

/* Runs after the notifier of the IOMMU. */
static struct notifier_block pool_last_binding = {
	.notifier_call = pool_last_event,
	.priority = INT_MIN,
};

/* Registers the notifiers and rebinds the devices that were bound before. */
int pool_bind_start(void)
{
	struct pci_dev *pdev = NULL;
	int err;

	if (!pool_device_count) {
		pr_err("pooldma: requires devices=ADDRESS,... or devices=all\n");
		return -EINVAL;
	}
	err = bus_register_notifier(&pci_bus_type, &pool_binding);
	if (err)
		return err;
	err = bus_register_notifier(&pci_bus_type, &pool_last_binding);
	if (err) {
		bus_unregister_notifier(&pci_bus_type, &pool_binding);
		return err;
	}
	for_each_pci_dev(pdev) {
		if (!pool_is_selected(pdev) || !pdev->dev.driver)
			continue;
		device_release_driver(&pdev->dev);
		if (device_attach(&pdev->dev) < 0)
			dev_warn(&pdev->dev, "pooldma: its driver does not bind again\n");
	}
	return 0;
}

/* On return, no event adds or removes a pool or its file. */
void pool_bind_stop(void)
{
	bus_unregister_notifier(&pci_bus_type, &pool_last_binding);
	bus_unregister_notifier(&pci_bus_type, &pool_binding);
}

/*
 * Call this after pool_bind_stop(), when no file shows a pool. No pool is active, because an active
 * pool holds a reference to the module.
 */
void pool_bind_free(void)
{
	struct pool *pool, *next;

	list_for_each_entry_safe(pool, next, &pools, list) {
		list_del(&pool->list);
		pool_delete(pool);
	}
}
