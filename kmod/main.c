// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtio driver. A probe of a PVIOMMU device installs our dma_map_ops on the PCI devices that
 * it translates for. Its removal unbinds their drivers and removes their mappings.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/pm.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#include "hit.h"
#include "pviommu.h"

bool pvi_cache = PVI_CACHE_DEFAULT;
module_param_named(cache, pvi_cache, bool, 0444);
MODULE_PARM_DESC(cache,
		 "devices can access buffers up to T x (C + 1) after their unmap (default: off)");

unsigned int pvi_cache_pages = 65536;
module_param_named(limit, pvi_cache_pages, uint, 0444);
MODULE_PARM_DESC(limit,
		 "maximum number of 4096-byte pages in a cache, 1 to 1048576 (default: 65536)");

unsigned int pvi_cycle_ms = 10000;
module_param_named(t_ms, pvi_cycle_ms, uint, 0444);
MODULE_PARM_DESC(t_ms, "T: length of the cache's cycle in ms (default: 10000)");

unsigned int pvi_cycles = 3;
module_param_named(c, pvi_cycles, uint, 0444);
MODULE_PARM_DESC(c, "C: whole cycles for which an unused mapping is kept, 0 to 1000 (default: 3)");

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
	if (pvi_check_devices(pvi->devices, pvi->device_count) == PVI_CONFIG_OK)
		return 0;
	dev_err(&pvi->vdev->dev, "device list is not ascending\n");
	return -EINVAL;
}

/* Reads and validates the configuration space. */
static int pvi_read_config(struct pvi *pvi)
{
	struct virtio_device *vdev = pvi->vdev;
	enum pvi_config_error err;
	u32 version;

	virtio_cread_le(vdev, struct pvi_config, giova_first, &pvi->giova_first);
	virtio_cread_le(vdev, struct pvi_config, giova_last, &pvi->giova_last);
	virtio_cread_le(vdev, struct pvi_config, pages_max, &pvi->pages_max);
	virtio_cread_le(vdev, struct pvi_config, device_count, &pvi->device_count);
	virtio_cread_le(vdev, struct pvi_config, version, &version);
	err = pvi_check_config(pvi->giova_first, pvi->giova_last, pvi->pages_max,
			       pvi->device_count, version);
	switch (err) {
	case PVI_CONFIG_OK:
		return pvi_read_devices(pvi);
	case PVI_CONFIG_VERSION:
		dev_err(&vdev->dev, "version %u of the format is unknown\n", version);
		return -ENODEV;
	default:
		dev_err(&vdev->dev, "invalid configuration space (error %d)\n", err);
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
	core_free(&pvi->core);
	pvi_queue_free(pvi);
	kfree(pvi->event_buffers);
	kfree(pvi->devices);
	kfree(pvi);
}

static int pvi_probe(struct virtio_device *vdev)
{
	struct pvi *pvi;
	int err;

	err = core_check_machine(&vdev->dev);
	if (err)
		return err;
	pvi = kzalloc(sizeof(*pvi), GFP_KERNEL);
	if (!pvi)
		return -ENOMEM;
	pvi->vdev = vdev;
	vdev->priv = pvi;
	core_init(&pvi->core, &pvi_engine, &vdev->dev);
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
	err = core_start(&pvi->core);
	if (err) {
		debugfs_remove_recursive(pvi->debugfs);
		pvi_release(pvi);
		return err;
	}
	if (pvi_cache)
		queue_delayed_work(pvi_workqueue, &pvi->tick, msecs_to_jiffies(pvi_cycle_ms));
	return 0;
}

static void pvi_remove(struct virtio_device *vdev)
{
	struct pvi *pvi = vdev->priv;

	cancel_delayed_work_sync(&pvi->tick);
	core_stop(&pvi->core);
	debugfs_remove_recursive(pvi->debugfs);
	pvi_release(pvi);
}

/*
 * Before a reboot or kexec, after the shutdown of the devices behind it. The reset ends all
 * mappings, and the host no longer writes answers and events to the memory of this kernel.
 */
static void pvi_shutdown(struct virtio_device *vdev)
{
	struct pvi *pvi = vdev->priv;

	pvi_queue_stop(pvi);
	cancel_delayed_work_sync(&pvi->tick);
	virtio_reset_device(vdev);
	cancel_delayed_work_sync(&pvi->events);
}

#ifndef PVI_HAVE_VIRTIO_SHUTDOWN
/* The bus of these kernels has no shutdown of its own. */
static void pvi_driver_shutdown(struct device *dev)
{
	pvi_shutdown(dev_to_virtio(dev));
}
#endif

static int pvi_prepare(struct device *dev)
{
	struct pvi *pvi = dev_to_virtio(dev)->priv;

	return core_refuse_sleep(&pvi->core);
}

static const struct dev_pm_ops pvi_pm = { .prepare = pvi_prepare };

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

#ifndef PVI_LOADED_BY_HAND
MODULE_DEVICE_TABLE(virtio, pvi_ids);
#endif

static struct virtio_driver pvi_driver = {
	.driver.name = "pviommu",
	.driver.pm = pm_sleep_ptr(&pvi_pm),
	.feature_table = pvi_features,
	.feature_table_size = ARRAY_SIZE(pvi_features),
	.id_table = pvi_ids,
	.validate = pvi_validate,
	.probe = pvi_probe,
	.remove = pvi_remove,
#ifdef PVI_HAVE_VIRTIO_SHUTDOWN
	.shutdown = pvi_shutdown,
#else
	.driver.shutdown = pvi_driver_shutdown,
#endif
};

static int __init pvi_init(void)
{
	int err;

	if (!pvi_cycle_ms || pvi_cycle_ms > 3600000 || !pvi_cache_pages ||
	    pvi_cache_pages > PVI_LIMIT_MAX || pvi_cycles > PVI_CYCLES_MAX) {
		pr_err("pviommu: t_ms must be 1 to 3600000, limit 1 to %u, c 0 to %u\n",
		       PVI_LIMIT_MAX, PVI_CYCLES_MAX);
		return -EINVAL;
	}
	pvi_warn_of_key();
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
