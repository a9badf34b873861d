// SPDX-License-Identifier: GPL-2.0-only
/*
 * Loads the module without parameters and unloads it: main.c, endpoint.c, core_bind.c and
 * core_refuse.c over the host and the environment of host.c (kernel.h, module.h). A driver of one
 * PCI device binds and unbinds.
 */
#include "module.h"
#define TEST_PARAMETERS_OF_MAIN
#define PVI_HAVE_VIRTIO_SHUTDOWN
#include "host.c"

/* The state of the virtio device is a variable of host.c. */
static void free_unless_static(void *memory)
{
	if (memory != &pvi)
		test_free(memory);
}

#undef kfree
#define kfree(memory) free_unless_static(memory)
#include "../core_bind.c"
#include "../core_refuse.c"
#include "../endpoint.c"
#include "../main.c"

#define DEVICES 2

static union {
	struct pvi_config config;
	u8 bytes[sizeof(struct pvi_config) + DEVICES * sizeof(u32)];
} space;
struct pvi_config *test_config = &space.config;
struct notifier_block *test_notifier;
bool test_encrypted;
int test_links;
struct device *test_consumer, *test_supplier;
static struct virtqueue requests;
/* The virtio device whose transport the PCI device is, and the driver's last mapping. */
static struct virtio_device child;
static bool child_broken;
static dma_addr_t mapping;
static unsigned int resets;
/* No memory for the record of an unplugged device. */
static bool test_no_record;

void *test_zeroed(size_t bytes)
{
	if (test_no_record && bytes == sizeof(struct core_unplugged))
		return NULL;
	return bytes == sizeof(pvi) ? memset(&pvi, 0, bytes) : test_alloc(bytes);
}

/* riommu_remove.c has late unmaps. */
void test_synchronize(void)
{
}

struct pci_dev *test_next_device(struct pci_dev *before)
{
	return before ? NULL : &pdev;
}

const char *pci_name(const struct pci_dev *of)
{
	static char name[sizeof("0000:00:00.0")];

	snprintf(name, sizeof(name), "%04x:00:%02x.%x", pci_domain_nr(of->bus) & 0xffff,
		 of->id >> 3 & 0x1f, of->id & 7);
	return name;
}

static void notify(unsigned long event)
{
	if (test_notifier)
		test_notifier->notifier_call(test_notifier, event, &pdev.dev);
}

static void driver_binds(void)
{
	notify(BUS_NOTIFY_BIND_DRIVER);
	CHECK(pvi.core.endpoints.next != &pvi.core.endpoints);
	endpoint = list_first_entry(&pvi.core.endpoints, struct pvi_endpoint, core.list);
	CHECK(pdev.dev.ops == &endpoint->core.ops && endpoint->core.devid == 0x20);
	pdev.dev.driver = &pdev;
}

int device_attach(struct device *dev)
{
	CHECK(dev == &pdev.dev && !dev->driver);
	driver_binds();
	return 1;
}

/* The driver unmaps its buffer, if the PCI core did not tell it that the device has failed. */
void device_release_driver(struct device *dev)
{
	CHECK(dev == &pdev.dev && dev->driver);
	CHECK(pdev.error_state == pci_channel_io_normal);
	if (mapping)
		unmap(mapping);
	mapping = 0;
	dev->driver = NULL;
	notify(BUS_NOTIFY_UNBOUND_DRIVER);
}

int test_visit_children(struct device *dev, void *data, test_visit visit)
{
	CHECK(dev == &pdev.dev);
	return visit(&child.dev, data);
}

void virtio_break_device(struct virtio_device *broken)
{
	CHECK(broken == &child);
	child_broken = true;
}

int virtio_find_vqs(struct virtio_device *of, unsigned int count, struct virtqueue *queues[],
		    struct virtqueue_info infos[], void *affinity)
{
	CHECK(of == &vdev && count == 1);
	queues[0] = &requests;
	return 0;
}

/* A reset removes every mapping. */
void virtio_reset_device(struct virtio_device *of)
{
	CHECK(of == &vdev);
	host.mapped_count = 0;
	host.asked_count = 0;
	host.used_count = 0;
	resets++;
}

static void queues_deleted(struct virtio_device *of)
{
	CHECK(of == &vdev && resets);
}

static const struct virtio_config_ops config_ops = { .del_vqs = queues_deleted };

int register_virtio_driver(struct virtio_driver *driver)
{
	vdev.config = &config_ops;
	return driver->validate(&vdev) ?: driver->probe(&vdev);
}

void unregister_virtio_driver(struct virtio_driver *driver)
{
	driver->remove(&vdev);
}

int pvi_iova_init(struct pvi_endpoint *of)
{
	return 0;
}

int pvi_events_init(struct pvi *of, struct virtqueue *vq)
{
	return 0;
}

void pvi_events_work(struct work_struct *work)
{
}

void pvi_events_callback(struct virtqueue *vq)
{
}

void pvi_debugfs_add(struct pvi *of)
{
}

void pvi_debugfs_add_endpoint(struct pvi_endpoint *of)
{
}

static void load(const char *name)
{
	const struct pvi_config config = {
		.giova_first = 0x10000,
		.giova_last = 0xffffffff,
		.pages_max = 512,
		.device_count = DEVICES,
		.version = PVI_VERSION,
	};

	test_case = name;
	memset(&host, 0, sizeof(host));
	memset(taken, 0, sizeof(taken));
	memset(&pdev, 0, sizeof(pdev));
	pdev.id = 0x20;
	host.chains = 64;
	host.prompt = true;
	space.config = config;
	space.config.devices[0] = 0x20;
	/* Device 0x30 of segment 2. */
	space.config.devices[1] = 0x20030;
	pdev.error_state = pci_channel_io_normal;
	pdev.dev.mask = ~0ULL;
	child_broken = false;
	resets = 0;
	CHECK(!pvi_init());
	CHECK(test_notifier && !pdev.dev.driver);
}

/* The cache keeps mappings for T x (C + 1) after their unmap. Nobody gets it unasked. */
static void an_unmap_reaches_the_host_by_default(void)
{
	unsigned int round;

	load("default");
	CHECK(!pvi.tick.work.queued);
	driver_binds();
	for (round = 0; round < 3; round++) {
		mapping = map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE);
		CHECK(host.mapped_count == 3 && device_writes(mapping, 1));
		unmap(mapping);
		CHECK(!host.mapped_count && !device_writes(mapping, 1));
		CHECK(!COUNTS->kept && !COUNTS->hits);
	}
	mapping = 0;
	pvi_exit();
	CHECK(!pdev.dev.ops && resets == 1);
}

/* The error state belongs to the PCI core: AER changes it at the same time. */
static void the_error_state_of_a_device_is_not_written(void)
{
	int broken;

	for (broken = 0; broken < 2; broken++) {
		load(broken ? "unload with a broken queue" : "unload");
		driver_binds();
		mapping = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
		CHECK(mapping != DMA_MAPPING_ERROR);
		if (broken) {
			host.broken = true;
			CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) == DMA_MAPPING_ERROR);
		}
		pvi_exit();
		CHECK(pdev.error_state == pci_channel_io_normal);
		CHECK(child_broken == broken && !pdev.dev.driver && !pdev.dev.ops);
		CHECK(resets == 1 && !host.mapped_count);
	}
}

/* After a shutdown the host knows no memory of this kernel, and nothing is sent to it. */
static void a_shutdown_ends_all_mappings(void)
{
	load("shutdown");
	driver_binds();
	mapping = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(device_writes(mapping, 1));
	pvi_driver.shutdown(&vdev);
	CHECK(resets == 1 && !device_writes(mapping, 1) && host.broken);
	CHECK(!pvi.tick.work.queued && !pvi.events.work.queued);
	pvi.queue.requests = 0;
	CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) == DMA_MAPPING_ERROR);
	unmap(mapping);
	CHECK(!pvi.queue.requests && !host.asked_count);
	mapping = 0;
	pvi_exit();
}

/* A device whose driver is bound when the module loads gets the operations, too. */
static void a_bound_driver_binds_again(void)
{
	load("before");
	pvi_exit();
	pdev.dev.driver = &pdev;
	CHECK(!pvi_init() && pdev.dev.driver && pdev.dev.ops == &endpoint->core.ops);
	pvi_exit();
	CHECK(!pdev.dev.driver && !pdev.dev.ops);
}

/* Binds a driver to `of`, and returns true if the device gets operations. */
static bool is_bound(struct pci_dev *of)
{
	test_notifier->notifier_call(test_notifier, BUS_NOTIFY_BIND_DRIVER, &of->dev);
	if (of->dev.ops)
		endpoint = list_first_entry(&pvi.core.endpoints, struct pvi_endpoint, core.list);
	return of->dev.ops;
}

/* Only a device that the host lists and the user has selected gets operations and an endpoint. */
static void other_devices_get_no_operations(void)
{
	struct pci_dev unlisted = { .id = 0x28, .dev.mask = ~0ULL };
	struct pci_dev segments[] = {
		{ .bus = (void *)2, .id = 0x20, .dev.mask = ~0ULL },
		{ .bus = NULL, .id = 0x30, .dev.mask = ~0ULL },
		{ .bus = (void *)2, .id = 0x30, .dev.mask = ~0ULL },
	};

	load("not in the host's list");
	CHECK(!is_bound(&unlisted) && list_empty(&pvi.core.endpoints));
	CHECK(is_bound(&pdev) && !list_empty(&pvi.core.endpoints));
	pdev.dev.driver = &pdev;
	pvi_exit();

	load("the device of the IOMMU itself");
	vdev.dev.parent = &pdev.dev;
	CHECK(!is_bound(&pdev) && list_empty(&pvi.core.endpoints));
	vdev.dev.parent = NULL;
	pvi_exit();

	/* Segment 0 has a listed device 0x20, and segment 2 a listed device 0x30. */
	load("of another segment");
	CHECK(!is_bound(&segments[0]) && !is_bound(&segments[1]));
	CHECK(list_empty(&pvi.core.endpoints));
	CHECK(is_bound(&segments[2]) && endpoint->core.devid == 0x20030);
	CHECK(segments[2].dev.ops == &endpoint->core.ops);
	pvi_exit();
	CHECK(!segments[2].dev.ops);

	core_device_count = 1;
	core_devices[0] = "0000:00:05.0";
	load("not selected");
	CHECK(!is_bound(&pdev) && !is_bound(&unlisted) && list_empty(&pvi.core.endpoints));
	pvi_exit();
	core_devices[0] = "0000:00:04.0";
	load("selected");
	CHECK(is_bound(&pdev) && !is_bound(&unlisted));
	pdev.dev.driver = &pdev;
	pvi_exit();
	core_device_count = 2;
	core_devices[0] = "0000:00:05.0";
	core_devices[1] = "0000:00:04.0";
	load("selected as the second");
	CHECK(is_bound(&pdev));
	pdev.dev.driver = &pdev;
	pvi_exit();
	core_device_count = 0;
}

/* A device at the address of an unplugged one gets its endpoint, another device another one. */
static void a_device_is_replaced(void)
{
	struct pci_dev next = { .id = 0x20, .dev.mask = ~0ULL };
	struct pci_dev other = { .bus = (void *)2, .id = 0x30, .dev.mask = ~0ULL };
	struct pvi_endpoint *first;

	load("replaced");
	CHECK(is_bound(&pdev));
	first = endpoint;
	mapping = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(host.mapped_count == 1);
	notify(BUS_NOTIFY_REMOVED_DEVICE);
	/* What the driver left is not mapped, and its owner can unmap it later. */
	CHECK(!host.mapped_count && pdev.dev.ops == &first->core.ops && ORPHANS == 1);
	CHECK(is_bound(&next) && endpoint == first && endpoint->core.pdev == &next);
	CHECK(is_bound(&other) && endpoint != first);
	endpoint = first;
	unmap(mapping);
	CHECK(!ORPHANS && test_complaints);
	mapping = 0;
	pvi_exit();
	CHECK(!pdev.dev.ops && !next.dev.ops && !other.dev.ops);
}

/* Without memory for its record, an unplugged device loses the operations, and the log says so. */
static void an_unplugged_device_has_no_record(void)
{
	load("unplugged without a record");
	CHECK(is_bound(&pdev));
	map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	test_no_record = true;
	test_complaints = 0;
	notify(BUS_NOTIFY_REMOVED_DEVICE);
	/* One complaint is that of the driver's mapping. */
	CHECK(!host.mapped_count && !pdev.dev.ops && ORPHANS == 1 && test_complaints == 2);
	test_no_record = false;
	pvi_exit();
}

/* Devices of such a guest reach only pages that it shares: its IOMMU is not driven. */
static void a_guest_with_encrypted_memory_is_refused(void)
{
	test_case = "encrypted";
	test_encrypted = true;
	test_complaints = 0;
	CHECK(pvi_init() == -EOPNOTSUPP && !test_notifier && test_complaints == 1);
	test_encrypted = false;
}

/* Maps nothing for a device, and returns true if its driver fails. */
static bool is_refused(struct pci_dev *of)
{
	struct scatterlist entry = { .memory = buffers, .length = 8 };
	const struct dma_map_ops *ops;
	dma_addr_t address;
	bool is_mapped;

	test_notifier->notifier_call(test_notifier, BUS_NOTIFY_BIND_DRIVER, &of->dev);
	ops = of->dev.ops;
	if (ops != &core_refusing_ops)
		return false;
	is_mapped = ops->map_phys(&of->dev, 0, 8, DMA_TO_DEVICE, 0) != DMA_MAPPING_ERROR ||
		    ops->alloc(&of->dev, PAGE_SIZE, &address, 0, 0) ||
		    ops->map_sg(&of->dev, &entry, 1, DMA_TO_DEVICE, 0) > 0;
	CHECK(!is_mapped && !ops->dma_supported(&of->dev, ~0ULL));
	of->dev.ops = NULL;
	return true;
}

/* Untrusted devices, and devices whose requests have the ID of another one, are refused. */
static void devices_that_cannot_be_isolated_are_refused(void)
{
	unsigned long mask = 1;
	struct pci_dev bridge = { .is_pcie = true, .pcie_type = PCI_EXP_TYPE_ROOT_PORT };
	struct pci_bus bus = { .self = &bridge };
	struct pci_bus virtual = { .parent = &bus };
	struct pci_dev of = { .id = 0x20, .dev.mask = ~0ULL };

	load("refused");
	of.untrusted = true;
	CHECK(is_refused(&of) && list_empty(&pvi.core.endpoints) && test_complaints);
	of.untrusted = false;
	of.dma_alias_mask = &mask;
	CHECK(is_refused(&of));
	of.dma_alias_mask = NULL;
	CHECK(!core_has_alias(&of));
	of.bus = &virtual;
	CHECK(!core_has_alias(&of));
	bridge.pcie_type = PCI_EXP_TYPE_PCI_BRIDGE;
	CHECK(core_has_alias(&of));
	bridge.is_pcie = false;
	bridge.pcie_type = PCI_EXP_TYPE_ROOT_PORT;
	CHECK(core_has_alias(&of));
	pvi_exit();
	/* A driver that is bound to a refused device is unbound with the module. */
	load("refused and bound");
	pdev.untrusted = true;
	notify(BUS_NOTIFY_BIND_DRIVER);
	pdev.dev.driver = &pdev;
	CHECK(pdev.dev.ops == &core_refusing_ops);
	pvi_exit();
	CHECK(!pdev.dev.ops && !pdev.dev.driver);
}

/* The device is suspended and shut down before its IOMMU, which refuses to be suspended. */
static void an_endpoint_is_linked_to_its_iommu(void)
{
	test_links = 0;
	load("linked");
	driver_binds();
	CHECK(test_links == 1 && test_consumer == &pdev.dev && test_supplier == &vdev.dev);
	device_release_driver(&pdev.dev);
	driver_binds();
	CHECK(test_links == 1);
	CHECK(pvi_driver.driver.pm->prepare(&vdev.dev) == -EBUSY);
	pdev.dev.driver = NULL;
	notify(BUS_NOTIFY_REMOVED_DEVICE);
	CHECK(!test_links);
	CHECK(is_bound(&pdev) && test_links == 1);
	pvi_exit();
	CHECK(!test_links);
}

/* Parameters that make no sense are refused, before any device is probed. */
static void parameters_have_limits(void)
{
	test_case = "parameters";
	pvi_cycles = PVI_CYCLES_MAX + 1;
	CHECK(pvi_init() == -EINVAL && !test_notifier);
	pvi_cycles = 3;
	pvi_cache_pages = PVI_LIMIT_MAX + 1;
	CHECK(pvi_init() == -EINVAL && !test_notifier);
	pvi_cache_pages = 65536;
}

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	CHECK(buffers);
	an_unmap_reaches_the_host_by_default();
	the_error_state_of_a_device_is_not_written();
	a_shutdown_ends_all_mappings();
	a_bound_driver_binds_again();
	other_devices_get_no_operations();
	a_device_is_replaced();
	an_unplugged_device_has_no_record();
	a_guest_with_encrypted_memory_is_refused();
	devices_that_cannot_be_isolated_are_refused();
	an_endpoint_is_linked_to_its_iommu();
	parameters_have_limits();
	CHECK(!allocations);
	free(buffers);
	puts("all as it should be");
	return 0;
}
