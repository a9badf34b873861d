// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtio driver. A probe of a PVIOMMU device installs our dma_map_ops on the PCI devices that
 * it translates for. Its removal unbinds their drivers and removes their mappings.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#include "pviommu.h"

bool pvi_cache;
module_param_named(cache, pvi_cache, bool, 0444);
MODULE_PARM_DESC(cache, "keep unused mappings for at most T x (C + 1): devices can access buffers for that time after their unmap (default: off)");

unsigned int pvi_cache_pages = 65536;
module_param_named(limit, pvi_cache_pages, uint, 0444);
MODULE_PARM_DESC(limit, "maximum number of 4096-byte pages that a device's cache maps, 1 to 1048576 (default: 65536, or 256 MiB)");

bool pvi_as_published;
module_param_named(as_published, pvi_as_published, bool, 0444);
MODULE_PARM_DESC(as_published, "with cache=1: the paper's key (the page alone) and its one bit instead of a count of users, to show the defects (default: off)");

unsigned int pvi_cycle_ms = 10000;
module_param_named(t_ms, pvi_cycle_ms, uint, 0444);
MODULE_PARM_DESC(t_ms, "T: length of the cache's cycle in ms (default: 10000)");

unsigned int pvi_cycles = 3;
module_param_named(c, pvi_cycles, uint, 0444);
MODULE_PARM_DESC(c, "C: whole cycles for which an unused mapping is kept (default: 3)");

struct dentry *pvi_debugfs;
/* Unbound, because its work waits for the host. */
struct workqueue_struct *pvi_workqueue;

/* Starts a new cycle. Each endpoint's work removes its expired mappings. */
static void pvi_tick(struct work_struct *work)
{
	struct pvi *pvi = container_of(to_delayed_work(work), struct pvi, tick);

	WRITE_ONCE(pvi->cycle, pvi->cycle + 1);
	pvi_trim_all(pvi);
	queue_delayed_work(pvi_workqueue, &pvi->tick, msecs_to_jiffies(pvi_cycle_ms));
}

/* Reads the list of devices, whose count is valid. The host may change it during the read. */
static int pvi_read_devices(struct pvi *pvi)
{
	u32 i;

	pvi->devices = kcalloc(pvi->device_count, sizeof(*pvi->devices), GFP_KERNEL);
	if (!pvi->devices)
		return -ENOMEM;
	for (i = 0; i < pvi->device_count; i++)
		virtio_cread_le(pvi->vdev, struct pvi_config, devices[i], &pvi->devices[i]);
	if (pvi_devices_fault(pvi->devices, pvi->device_count) == PVI_CONFIG_SOUND)
		return 0;
	dev_err(&pvi->vdev->dev, "the list of devices is not in ascending order\n");
	return -EINVAL;
}

/* Reads and validates the configuration space. */
static int pvi_read_config(struct pvi *pvi)
{
	struct virtio_device *vdev = pvi->vdev;
	u32 version;

	virtio_cread_le(vdev, struct pvi_config, giova_first, &pvi->giova_first);
	virtio_cread_le(vdev, struct pvi_config, giova_last, &pvi->giova_last);
	virtio_cread_le(vdev, struct pvi_config, pages_max, &pvi->pages_max);
	virtio_cread_le(vdev, struct pvi_config, device_count, &pvi->device_count);
	virtio_cread_le(vdev, struct pvi_config, version, &version);
	switch (pvi_config_fault(pvi->giova_first, pvi->giova_last, pvi->pages_max,
				 pvi->device_count, version)) {
	case PVI_CONFIG_SOUND:
		return pvi_read_devices(pvi);
	case PVI_CONFIG_VERSION:
		dev_err(&vdev->dev, "version %u of the format is unknown\n", version);
		return -ENODEV;
	default:
		dev_err(&vdev->dev, "the configuration makes no sense\n");
		return -EINVAL;
	}
}

static int pvi_find_queues(struct pvi *pvi)
{
	struct virtqueue_info infos[] = {
		{ .name = "requests" },
		{ .name = "events", .callback = pvi_events_callback },
	};
	bool events = virtio_has_feature(pvi->vdev, PVI_F_EVENTS);
	struct virtqueue *queues[2];
	int err;

	err = virtio_find_vqs(pvi->vdev, events ? 2 : 1, queues, infos, NULL);
	if (err)
		return err;
	err = pvi_queue_init(pvi, queues[0]);
	if (err)
		return err;
	err = events ? pvi_events_init(pvi, queues[1]) : 0;
	if (err)
		return err;
	virtio_device_ready(pvi->vdev);
	if (events)
		virtqueue_kick(queues[1]);
	return 0;
}

static void pvi_release(struct pvi *pvi)
{
	virtio_reset_device(pvi->vdev);
	/* The reset device cannot queue it again. */
	cancel_delayed_work_sync(&pvi->events);
	pvi->vdev->config->del_vqs(pvi->vdev);
	pvi_bind_free(pvi);
	pvi_queue_free(pvi);
	kfree(pvi->event_buffers);
	kfree(pvi->devices);
	kfree(pvi);
}

/*
 * A resume resets the device, which drops every mapping, and the drivers would not map again.
 * Suspend therefore fails, before any device is suspended.
 */
static int pvi_pm_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pvi *pvi = container_of(block, struct pvi, sleep);

	if (event != PM_SUSPEND_PREPARE && event != PM_HIBERNATION_PREPARE)
		return NOTIFY_DONE;
	dev_err(&pvi->vdev->dev, "the devices behind it cannot be suspended\n");
	return notifier_from_errno(-EOPNOTSUPP);
}

static int pvi_probe(struct virtio_device *vdev)
{
	struct pvi *pvi = kzalloc(sizeof(*pvi), GFP_KERNEL);
	int err;

	if (!pvi)
		return -ENOMEM;
	pvi->vdev = vdev;
	vdev->priv = pvi;
	mutex_init(&pvi->mutex);
	INIT_LIST_HEAD(&pvi->endpoints);
	INIT_DELAYED_WORK(&pvi->tick, pvi_tick);
	INIT_DELAYED_WORK(&pvi->events, pvi_events_work);
	err = pvi_read_config(pvi);
	if (err) {
		kfree(pvi->devices);
		kfree(pvi);
		return err;
	}
	err = pvi_find_queues(pvi);
	if (err) {
		pvi_release(pvi);
		return err;
	}
	pvi_debugfs_add(pvi);
	pvi->sleep.notifier_call = pvi_pm_event;
	err = register_pm_notifier(&pvi->sleep);
	if (err)
		goto release;
	err = pvi_bind_start(pvi);
	if (err)
		goto unregister;
	if (pvi_cache)
		queue_delayed_work(pvi_workqueue, &pvi->tick, msecs_to_jiffies(pvi_cycle_ms));
	return 0;

unregister:
	unregister_pm_notifier(&pvi->sleep);
release:
	debugfs_remove_recursive(pvi->debugfs);
	pvi_release(pvi);
	return err;
}

static void pvi_remove(struct virtio_device *vdev)
{
	struct pvi *pvi = vdev->priv;

	cancel_delayed_work_sync(&pvi->tick);
	pvi_bind_stop(pvi);
	unregister_pm_notifier(&pvi->sleep);
	debugfs_remove_recursive(pvi->debugfs);
	pvi_release(pvi);
}

/*
 * Without indirect descriptors and event indices, a request takes two descriptors and a kick is a
 * flag. Sending a request then needs no memory allocation, and the rings share a minimum of state.
 */
static int pvi_validate(struct virtio_device *vdev)
{
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1))
		return -EINVAL;
	__virtio_clear_bit(vdev, VIRTIO_RING_F_INDIRECT_DESC);
	__virtio_clear_bit(vdev, VIRTIO_RING_F_EVENT_IDX);
	return 0;
}

static const unsigned int pvi_features[] = { PVI_F_EVENTS };

static const struct virtio_device_id pvi_ids[] = {
	{ PVI_DEVICE_TYPE, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, pvi_ids);

static struct virtio_driver pvi_driver = {
	.driver.name = "pviommu",
	.feature_table = pvi_features,
	.feature_table_size = ARRAY_SIZE(pvi_features),
	.id_table = pvi_ids,
	.validate = pvi_validate,
	.probe = pvi_probe,
	.remove = pvi_remove,
};

static int __init pvi_init(void)
{
	int err;

	if (!pvi_cycle_ms || pvi_cycle_ms > 3600000 || !pvi_cache_pages ||
	    pvi_cache_pages > PVI_LIMIT_MAX || (pvi_as_published && !pvi_cache)) {
		pr_err("pviommu: t_ms must be 1 to 3600000, limit 1 to %u, and as_published=1 requires cache=1\n",
		       PVI_LIMIT_MAX);
		return -EINVAL;
	}
	if (pvi_as_published)
		pr_warn("pviommu: as_published=1, the paper's key and one bit: devices can access buffers that they must not, and lose access to others\n");
	/* Freeing memory may depend on a disk behind this device. */
	pvi_workqueue = alloc_workqueue("pviommu", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!pvi_workqueue)
		return -ENOMEM;
	err = iova_cache_get();
	if (err)
		goto destroy_workqueue;
	err = pvi_mapping_slab_init();
	if (err)
		goto put_iova_cache;
	pvi_debugfs = debugfs_create_dir("pviommu", NULL);
	err = register_virtio_driver(&pvi_driver);
	if (!err)
		return 0;
	debugfs_remove_recursive(pvi_debugfs);
	pvi_mapping_slab_exit();
put_iova_cache:
	iova_cache_put();
destroy_workqueue:
	destroy_workqueue(pvi_workqueue);
	return err;
}

static void __exit pvi_exit(void)
{
	unregister_virtio_driver(&pvi_driver);
	debugfs_remove_recursive(pvi_debugfs);
	pvi_mapping_slab_exit();
	iova_cache_put();
	destroy_workqueue(pvi_workqueue);
}

module_init(pvi_init);
module_exit(pvi_exit);
MODULE_DESCRIPTION("Frontend of Ringfence's para-virtual IOMMU");
MODULE_LICENSE("GPL");
