/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel interfaces of main.c, endpoint.c and core_bind.c for user space, in addition to kernel.h.
 */
#ifndef TEST_MODULE_H
#define TEST_MODULE_H

/* The module. */
#define __init
#define __exit
#define module_param_named(name, variable, type, mode)
#define module_param_array_named(name, variable, type, count, mode)
#define MODULE_PARM_DESC(name, text)
#define MODULE_DEVICE_TABLE(bus, ids)
#define MODULE_DESCRIPTION(text)
#define MODULE_LICENSE(text)
#define module_init(function)
#define module_exit(function)
#define pr_err(...) ((void)test_complaints++)
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define iova_cache_get() 0
#define iova_cache_put() ((void)0)
#define debugfs_create_dir(name, parent) NULL
#define debugfs_remove_recursive(dir) ((void)(dir))
#define WQ_UNBOUND 0
#define WQ_MEM_RECLAIM 0
#define alloc_workqueue(name, flags, most) ((struct workqueue_struct *)1)
#define destroy_workqueue(queue) ((void)(queue))
#define INIT_DELAYED_WORK(one, with) ((one)->work.does = (with))
#define cancel_delayed_work_sync(one) ((one)->work.queued = false)
#define cancel_work_sync(one) ((one)->queued = false)
#define mutex_init(mutex) ((void)(mutex))
#define mutex_lock(mutex) ((void)(mutex))
#define mutex_unlock(mutex) ((void)(mutex))
#define strscpy(to, from, bytes) ((void)snprintf(to, bytes, "%s", from))
void *test_zeroed(size_t bytes);
#define kzalloc(bytes, gfp) test_zeroed(bytes)

/* Notifiers. */
enum {
	NOTIFY_DONE,
	NOTIFY_OK,
	BUS_NOTIFY_BIND_DRIVER,
	BUS_NOTIFY_UNBOUND_DRIVER,
	BUS_NOTIFY_DRIVER_NOT_BOUND,
	BUS_NOTIFY_REMOVED_DEVICE,
};

extern struct notifier_block *test_notifier;
#define bus_register_notifier(bus, block) (test_notifier = (block), 0)
#define bus_unregister_notifier(bus, block) ((void)(block), test_notifier = NULL)

/* PCI devices of bus 0, named by their IDs: at most 15 devices of one function. */
enum { pci_channel_io_normal = 1, pci_channel_io_frozen, pci_channel_io_perm_failure };

#define to_pci_dev(one) container_of((struct device *)(one), struct pci_dev, dev)
const char *pci_name(const struct pci_dev *pdev);
#define pci_dev_get(pdev) (pdev)
#define pci_dev_put(pdev) ((void)(pdev))
#define for_each_pci_dev(pdev) while ((pdev = test_next_device(pdev)))
struct pci_dev *test_next_device(struct pci_dev *before);
#define set_dma_ops(device, with) ((device)->ops = (with))
#define use_dma_iommu(device) false
#define device_lock(device) ((void)(device))
#define device_unlock(device) ((void)(device))
/* Returns after the unmaps in atomic context that have begun. */
#define synchronize_rcu() test_synchronize()
void test_synchronize(void);
void device_release_driver(struct device *dev);
int device_attach(struct device *dev);
#define put_iova_domain(domain) ((void)(domain))

/* Buses with small numbers are root buses, the others are of this type. */
struct pci_bus {
	struct pci_bus *parent;
	struct pci_dev *self;
};

#define pci_is_root_bus(bus) ((uintptr_t)(bus) < 16)
enum { PCI_EXP_TYPE_ROOT_PORT, PCI_EXP_TYPE_UPSTREAM, PCI_EXP_TYPE_DOWNSTREAM,
       PCI_EXP_TYPE_PCI_BRIDGE };
#define pci_is_pcie(pdev) ((pdev)->is_pcie)
#define pci_pcie_type(pdev) ((pdev)->pcie_type)

/* A guest with encrypted memory, and links from endpoints to the IOMMU. */
#define CC_ATTR_MEM_ENCRYPT 1
extern bool test_encrypted;
#define cc_platform_has(attribute) ((void)(attribute), test_encrypted)
extern int test_links;
extern struct device *test_consumer, *test_supplier;
#define DL_FLAG_STATELESS 1
#define device_link_add(consumer, supplier, flags)                                                 \
	(test_consumer = (consumer), test_supplier = (supplier), ++test_links)
#define device_link_remove(consumer, supplier) ((void)(consumer), (void)(supplier), test_links--)

struct dev_pm_ops {
	int (*prepare)(struct device *dev);
};

#define pm_sleep_ptr(ops) (ops)

/* Its driver is virtio's: the virtio device is its child. */
#define is_virtio_device(device) true
#define dev_to_virtio(dev) container_of(dev, struct virtio_device, dev)
void virtio_break_device(struct virtio_device *vdev);
typedef int (*test_visit)(struct device *dev, void *data);
int test_visit_children(struct device *dev, void *data, test_visit visit);
#define device_for_each_child(device, data, visit) test_visit_children(device, data, visit)

/* The virtio device of the module. */
struct pvi_config;

struct virtio_config_ops {
	void (*del_vqs)(struct virtio_device *vdev);
};

struct virtqueue_info {
	const char *name;
	void (*callback)(struct virtqueue *vq);
};

struct virtio_device_id {
	u32 device, vendor;
};

struct virtio_driver {
	struct {
		const char *name;
		const struct dev_pm_ops *pm;
	} driver;
	const unsigned int *feature_table;
	unsigned int feature_table_size;
	const struct virtio_device_id *id_table;
	int (*validate)(struct virtio_device *vdev);
	int (*probe)(struct virtio_device *vdev);
	void (*remove)(struct virtio_device *vdev);
	void (*shutdown)(struct virtio_device *vdev);
};

#define VIRTIO_DEV_ANY_ID U32_MAX
#define VIRTIO_F_VERSION_1 32
#define VIRTIO_RING_F_INDIRECT_DESC 28
#define VIRTIO_RING_F_EVENT_IDX 29
#define virtio_has_feature(vdev, bit) ((bit) == VIRTIO_F_VERSION_1)
#define __virtio_clear_bit(vdev, bit) ((void)(vdev))
#define virtio_device_ready(vdev) ((void)(vdev))
extern struct pvi_config *test_config;
#define virtio_cread_le(vdev, type, member, to) (*(to) = test_config->member)
int virtio_find_vqs(struct virtio_device *vdev, unsigned int count, struct virtqueue *queues[],
		    struct virtqueue_info infos[], void *affinity);
void virtio_reset_device(struct virtio_device *vdev);
int register_virtio_driver(struct virtio_driver *driver);
void unregister_virtio_driver(struct virtio_driver *driver);

#endif
