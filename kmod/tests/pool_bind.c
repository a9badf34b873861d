// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs pool_main.c, pool_bind.c and pool_memory.c in user space (kernel.h), with pool_slots.c and
 * pool_ops.c: which devices have a pool and for how long, that it is mapped by the device's own
 * IOMMU, that nothing is left of it, and that a device can bind while the module is unloaded. A
 * second CPU, a thread, frees or moves a pool while the first one unmaps.
 */
#include <pthread.h>
#include <semaphore.h>

#include "pool_module.h"
#include "../pool_memory.c"
#include "../pool_bind.c"
#include "../pool_main.c"

#define CHUNKS 32

/* A device. The kernel's own flags of a device with an IOMMU are both set. */
struct test_device {
	struct pci_dev pdev;
	const char *name;
	u64 mask;
	bool has_iommu;
	/* The IOMMU has forgotten it. */
	bool is_gone;
};

static struct test_device devices[] = {
	{ .name = "disk", .has_iommu = true },
	{ .name = "card", .has_iommu = true },
	{ .name = "plain" },
};

static struct test_device *disk = &devices[0], *card = &devices[1], *plain = &devices[2];
static struct pci_driver stock, managed = { .driver_managed_dma = true };
static struct pci_driver *attached;

static struct test_device *test_of(struct device *dev)
{
	return container_of(to_pci_dev(dev), struct test_device, pdev);
}

static const char *pci_name(const struct pci_dev *pdev)
{
	return container_of(pdev, struct test_device, pdev)->name;
}

static struct pci_dev *test_next_device(struct pci_dev *before)
{
	struct test_device *next = before ? container_of(before, struct test_device, pdev) + 1
					  : devices;

	return next < devices + ARRAY_SIZE(devices) ? &next->pdev : NULL;
}

/* The mappings of the IOMMUs. */
static struct {
	struct device *dev;
	dma_addr_t address;
} mapped[256];
/* The map after which maps fail, and what is wrong with the address of the last one. */
static int maps_left;
static u64 added;
static u64 highest;

static int count_mapped(struct test_device *device)
{
	int count = 0;
	u32 i;

	for (i = 0; i < ARRAY_SIZE(mapped); i++)
		count += mapped[i].dev == &device->pdev.dev;
	return count;
}

/* The kernel's own operations are used: they are seen if the flags are. */
static void is_visible(struct device *dev)
{
	CHECK(!dev->ops && !test_of(dev)->is_gone);
	CHECK(dev->dma_iommu == test_of(dev)->has_iommu && dev->dma_skip_sync);
}

static dma_addr_t test_iommu_map(struct device *dev, void *memory, size_t bytes)
{
	u64 end = min(*dev->dma_mask, highest) + 1;
	u32 i = 0;

	is_visible(dev);
	CHECK(bytes == POOL_CHUNK_BYTES);
	if (maps_left && !--maps_left && !added)
		return DMA_MAPPING_ERROR;
	while (mapped[i].dev)
		CHECK(++i < ARRAY_SIZE(mapped));
	mapped[i].dev = dev;
	mapped[i].address = dev->dma_iommu ? end - (i + 1) * bytes : virt_to_phys(memory);
	if (!maps_left)
		mapped[i].address += added;
	return mapped[i].address;
}

static void test_iommu_unmap(struct device *dev, dma_addr_t address, size_t bytes)
{
	u32 i = 0;

	is_visible(dev);
	while (mapped[i].dev != dev || mapped[i].address != address)
		CHECK(++i < ARRAY_SIZE(mapped));
	mapped[i].dev = NULL;
}

/* The bus. */
static void notify(struct test_device *device, unsigned long event)
{
	struct device *dev = &device->pdev.dev;
	struct notifier_block *first = test_notifiers[0], *last = test_notifiers[1];

	if (!test_registered)
		return;
	/* The notifier of the IOMMU has priority 0. */
	CHECK(test_registered == 2 && first->priority > 0 && last->priority < 0);
	first->notifier_call(first, event, dev);
	if (event == BUS_NOTIFY_REMOVED_DEVICE) {
		device->is_gone = true;
		dev->ops = NULL;
	}
	last->notifier_call(last, event, dev);
	CHECK(!pool_mutex);
}

static void bind(struct test_device *device, struct pci_driver *driver)
{
	device->pdev.dev.driver = driver;
	notify(device, BUS_NOTIFY_BIND_DRIVER);
}

/* The kernel clears the operations when a driver unbinds. That of x86 does not. */
static bool clears_ops;

static void forget_driver(struct test_device *device)
{
	device->pdev.dev.driver = NULL;
	if (clears_ops)
		device->pdev.dev.ops = NULL;
}

static void unbind(struct test_device *device, unsigned long event)
{
	forget_driver(device);
	notify(device, event);
}

static void device_release_driver(struct device *dev)
{
	attached = dev->driver;
	unbind(test_of(dev), BUS_NOTIFY_UNBOUND_DRIVER);
}

static int device_attach(struct device *dev)
{
	bind(test_of(dev), attached);
	return 1;
}

/* Its work item runs, if it is queued. */
static void works(struct pool *pool)
{
	if (!pool->release_work.queued)
		return;
	pool->release_work.queued = false;
	pool->release_work.does(&pool->release_work);
}

static u8 buffer[4096] __aligned(4096);

static dma_addr_t map(struct test_device *device)
{
	struct device *dev = &device->pdev.dev;

	return dev->ops->map_phys(dev, virt_to_phys(buffer), 100, DMA_FROM_DEVICE, 0);
}

/* A late unmap of a device, which the next synchronize_rcu() waits for. */
static struct test_device *test_late;
static dma_addr_t test_late_address;

/* The device has written. The unmap copies. */
static void unmap(struct test_device *device, dma_addr_t address)
{
	struct device *dev = &device->pdev.dev;

	memset(pool_find(pool_of(dev), address)->shadow, 'w', 100);
	memset(buffer, 'd', 100);
	dev->ops->unmap_phys(dev, address, 100, DMA_FROM_DEVICE, 0);
	CHECK(buffer[0] == 'w' && buffer[99] == 'w');
}

/*
 * The other CPU, which runs while the first one is in a section with interrupts off. It posts
 * `paused` when it waits for the end of the section, and when it has ended.
 */
static struct {
	pthread_t thread;
	sem_t paused, section_ended;
	bool waits;
	void (*does)(void);
} other_cpu;

static void test_synchronize(void)
{
	if (other_cpu.waits) {
		sem_post(&other_cpu.paused);
		sem_wait(&other_cpu.section_ended);
	}
	if (test_late)
		unmap(test_late, test_late_address);
	test_late = NULL;
}

/* No pool: the device is as the kernel made it. */
static void is_without_a_pool(struct test_device *device)
{
	CHECK(!device->pdev.dev.ops && !count_mapped(device));
	CHECK(device->pdev.dev.dma_iommu == device->has_iommu && device->pdev.dev.dma_skip_sync);
	CHECK(device->mask == U64_MAX);
}

static struct pool *has_a_pool(struct test_device *device)
{
	struct device *dev = &device->pdev.dev;
	u32 i;

	CHECK(dev->ops && !dev->dma_iommu && !dev->dma_skip_sync && device->mask == U64_MAX);
	CHECK(count_mapped(device) == CHUNKS && pool_of(dev)->pdev == &device->pdev);
	for (i = 0; i < ARRAY_SIZE(mapped); i++)
		CHECK(mapped[i].dev != dev || mapped[i].address + POOL_CHUNK_BYTES - 1 <= U32_MAX);
	return pool_of(dev);
}

static void select_devices(char *one, char *other)
{
	u32 i;

	pool_devices[0] = one;
	pool_devices[1] = other;
	pool_device_count = !!one + !!other;
	highest = U32_MAX;
	for (i = 0; i < ARRAY_SIZE(devices); i++) {
		struct device *dev = &devices[i].pdev.dev;

		devices[i].mask = U64_MAX;
		devices[i].is_gone = false;
		dev->dma_mask = &devices[i].mask;
		dev->mask = U64_MAX;
		dev->ops = NULL;
		dev->driver = NULL;
		dev->dma_iommu = devices[i].has_iommu;
		dev->dma_skip_sync = true;
	}
}

/* While the module is unloaded, a device binds, and another one is unplugged. */
static struct test_device *binds_meanwhile, *unplugged_meanwhile;

static void test_directory_removed(void)
{
	/* The files of all pools were readable until now. */
	CHECK(!list_empty(&pools) == !!test_references);
	test_is_unloading = true;
	if (binds_meanwhile)
		bind(binds_meanwhile, &stock);
	if (unplugged_meanwhile)
		notify(unplugged_meanwhile, BUS_NOTIFY_REMOVED_DEVICE);
	binds_meanwhile = NULL;
	unplugged_meanwhile = NULL;
	test_is_unloading = false;
}

static void stop(void)
{
	CHECK(!test_users && !test_chunks);
	pool_exit();
	CHECK(!test_registered && !test_references && !test_has_directory);
	INIT_LIST_HEAD(&pools);
}

/* Without a selection, or if a registration fails, nothing is registered. */
static void starts_and_fails(void)
{
	select_devices(NULL, NULL);
	CHECK(pool_init() == -EINVAL && !test_registered && !test_has_directory);
	select_devices("disk", NULL);
	for (test_failing = 1; test_failing <= 2; test_failing++)
		CHECK(pool_init() == -ENOMEM && !test_registered && !test_has_directory);
	test_failing = 0;
	pool_mib = POOL_MIB_MIN - 1;
	CHECK(pool_init() == -EINVAL && !test_registered);
	pool_mib = POOL_MIB_MIN;
	test_encrypted = true;
	CHECK(pool_init() == -EOPNOTSUPP && !test_registered);
	test_encrypted = false;
}

/* A device that binds during the exit gets no pool. An unplugged one has lost its file. */
static void devices_change_during_the_exit(void)
{
	select_devices("all", NULL);
	CHECK(!pool_init());
	bind(disk, &stock);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	binds_meanwhile = card;
	unplugged_meanwhile = disk;
	stop();
	CHECK(!card->pdev.dev.ops && !count_mapped(card));
}

/* `all` are the devices with an IOMMU; others have a pool if they are named. */
static void selects_devices(void)
{
	select_devices("all", NULL);
	disk->pdev.dev.driver = &stock;
	plain->pdev.dev.driver = &stock;
	CHECK(!pool_init());
	/* Those with a driver are bound again. */
	has_a_pool(disk);
	is_without_a_pool(card);
	is_without_a_pool(plain);
	bind(card, &managed);
	is_without_a_pool(card);
	bind(card, &stock);
	has_a_pool(card);
	CHECK(test_users == 2 && test_references == 2);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	unbind(card, BUS_NOTIFY_UNBOUND_DRIVER);
	is_without_a_pool(disk);
	is_without_a_pool(card);
	stop();

	select_devices("card", "plain");
	CHECK(!pool_init());
	bind(disk, &stock);
	is_without_a_pool(disk);
	test_complaints = 0;
	bind(plain, &stock);
	/* The log warns that it reaches all memory. */
	CHECK(has_a_pool(plain) && test_complaints == 1);
	unbind(plain, BUS_NOTIFY_UNBOUND_DRIVER);
	is_without_a_pool(plain);

	/* Another module maps for it, or this one is being unloaded. */
	card->pdev.dev.ops = &pool_ops;
	bind(card, &stock);
	CHECK(card->pdev.dev.ops == &pool_ops && !count_mapped(card) && !test_users);
	card->pdev.dev.ops = NULL;
	test_is_unloading = true;
	bind(card, &stock);
	is_without_a_pool(card);
	test_is_unloading = false;
	stop();
}

/* A driver unbinds and leaves mappings: the pool stays until the last late unmap, which copies. */
static void mappings_that_a_driver_leaves(void)
{
	struct pool *pool;
	dma_addr_t one, other;

	select_devices("disk", NULL);
	CHECK(!pool_init());
	bind(disk, &stock);
	pool = has_a_pool(disk);
	/* The work item of an earlier driver changes nothing while one is bound. */
	pool->release_work.queued = true;
	works(pool);
	CHECK(has_a_pool(disk) == pool && test_users == 1);
	one = map(disk);
	other = map(disk);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	CHECK(has_a_pool(disk) == pool && test_users == 1 && pool->has_orphans);
	unmap(disk, one);
	CHECK(pool->release_work.queued);
	works(pool);
	CHECK(has_a_pool(disk) == pool && test_users == 1);
	/* The next driver has the same pool, and the late unmap of the earlier one. */
	bind(disk, &stock);
	CHECK(has_a_pool(disk) == pool && test_users == 1 && !pool->has_orphans);
	one = map(disk);
	CHECK(one != other);
	unmap(disk, other);
	unmap(disk, one);
	CHECK(has_a_pool(disk) == pool);
	one = map(disk);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	unmap(disk, one);
	works(pool);
	is_without_a_pool(disk);
	CHECK(!test_users && !test_chunks);

	/* An unmap that began before the unbind queues no work, and is waited for. */
	bind(disk, &stock);
	test_late_address = map(disk);
	test_late = disk;
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	is_without_a_pool(disk);
	CHECK(!test_users && !test_late);
	works(pool);
	is_without_a_pool(disk);

	/* A probe fails and leaves a mapping. The kernel forgets the driver after the event. */
	bind(disk, &stock);
	other = map(disk);
	notify(disk, BUS_NOTIFY_DRIVER_NOT_BOUND);
	forget_driver(disk);
	works(pool);
	CHECK(has_a_pool(disk) == pool && test_users == 1);
	unmap(disk, other);
	works(pool);
	is_without_a_pool(disk);
	stop();
}

static void *other_cpu_runs(void *unused)
{
	other_cpu.does();
	sem_post(&other_cpu.paused);
	return NULL;
}

/* The unmap is counted, and has not returned its slot. The memory must still exist. */
static void unmap_is_interrupted(void)
{
	int irqs_off = test_irqs_off;

	test_before_lock = NULL;
	test_irqs_off = 0;
	CHECK(!pthread_create(&other_cpu.thread, NULL, other_cpu_runs, NULL));
	sem_wait(&other_cpu.paused);
	CHECK(test_chunks == CHUNKS && count_mapped(disk) == CHUNKS);
	test_irqs_off = irqs_off;
}

static u8 large[POOL_CHUNK_BYTES];

/* Maps a buffer whose slot no CPU keeps, for a driver that leaves it. */
static dma_addr_t map_an_orphan(void)
{
	struct device *dev = &disk->pdev.dev;
	dma_addr_t address;

	bind(disk, &stock);
	address = dev->ops->map_phys(dev, virt_to_phys(large), sizeof(large), DMA_TO_DEVICE, 0);
	CHECK(address != DMA_MAPPING_ERROR);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	has_a_pool(disk);
	return address;
}

/* Unmaps while the other CPU does this. */
static void unmap_during(void (*does)(void), dma_addr_t address)
{
	struct device *dev = &disk->pdev.dev;

	sem_init(&other_cpu.paused, 0, 0);
	sem_init(&other_cpu.section_ended, 0, 0);
	other_cpu.does = does;
	other_cpu.waits = true;
	test_before_lock = unmap_is_interrupted;
	dev->ops->unmap_phys(dev, address, sizeof(large), DMA_TO_DEVICE, 0);
	other_cpu.waits = false;
	sem_post(&other_cpu.section_ended);
	CHECK(!test_before_lock && !pthread_join(other_cpu.thread, NULL));
}

static void release(void)
{
	struct pool *pool = pool_of(&disk->pdev.dev);

	pool->release_work.does(&pool->release_work);
}

/* The next driver sets a smaller mask. */
static void narrow(void)
{
	struct device *dev = &disk->pdev.dev;

	CHECK(dev->ops->dma_supported(dev, DMA_BIT_MASK(28)));
}

/* A pool is freed, or moved, only after the last unmap has returned its slot. */
static void unmaps_in_progress(void)
{
	struct pool *pool;
	dma_addr_t left;

	select_devices("disk", NULL);
	CHECK(!pool_init());
	left = map_an_orphan();
	pool = has_a_pool(disk);
	unmap_during(release, left);
	is_without_a_pool(disk);
	works(pool);
	CHECK(!test_users && !test_chunks);

	left = map_an_orphan();
	bind(disk, &stock);
	unmap_during(narrow, left);
	CHECK(has_a_pool(disk) == pool && pool->last <= DMA_BIT_MASK(28));
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	is_without_a_pool(disk);
	stop();
}

/* An unplugged device reaches nothing, and late unmaps copy. */
static void unplugged_devices(void)
{
	struct pool *pool;
	dma_addr_t left;

	select_devices("all", NULL);
	CHECK(!pool_init());
	bind(disk, &stock);
	bind(card, &stock);
	unbind(card, BUS_NOTIFY_UNBOUND_DRIVER);
	pool = has_a_pool(disk);
	left = map(disk);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	notify(disk, BUS_NOTIFY_REMOVED_DEVICE);
	CHECK(!count_mapped(disk) && test_users == 1 && test_chunks == CHUNKS);
	CHECK(disk->pdev.dev.ops == &pool->ops && !disk->pdev.dev.dma_iommu);
	unmap(disk, left);
	works(pool);
	CHECK(!disk->pdev.dev.ops && !test_users && !test_chunks);
	/* Nothing is left of a device without mappings. */
	CHECK(test_references == 2);
	notify(card, BUS_NOTIFY_REMOVED_DEVICE);
	CHECK(test_references == 1 && !pool_find_device(&card->pdev));
	stop();
}

/* Every map of a device without a pool fails, and nothing stays mapped or allocated. */
static void is_without_memory(struct test_device *device)
{
	struct pool *pool;

	test_complaints = 0;
	bind(device, &stock);
	pool = pool_of(&device->pdev.dev);
	CHECK(!count_mapped(device) && !test_chunks && device->mask == U64_MAX);
	CHECK(test_complaints >= 1 && test_users == 1);
	CHECK(device->pdev.dev.ops == &pool->ops && map(device) == DMA_MAPPING_ERROR);
	notify(device, BUS_NOTIFY_DRIVER_NOT_BOUND);
	forget_driver(device);
	works(pool);
	is_without_a_pool(device);
	CHECK(!test_users);
}

static void pools_that_fail(void)
{
	select_devices("disk", "plain");
	CHECK(!pool_init());
	for (test_most_chunks = 0; test_most_chunks < CHUNKS; test_most_chunks += 31)
		is_without_memory(disk);
	test_most_chunks = INT32_MAX;
	maps_left = 7;
	is_without_memory(disk);
	/* An address that is not aligned, or above the mask. */
	maps_left = 7;
	added = PAGE_SIZE;
	is_without_memory(disk);
	maps_left = 7;
	added = 1ULL << 32;
	is_without_memory(disk);
	/* The kernel has mapped a bounce buffer. */
	maps_left = 7;
	added = POOL_CHUNK_BYTES;
	is_without_memory(plain);
	added = 0;
	bind(disk, &stock);
	has_a_pool(disk);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	stop();
}

/* A driver with a smaller mask gets its pool below it, if nothing is mapped. */
static void smaller_masks(void)
{
	struct device *dev = &disk->pdev.dev;
	dma_addr_t address;
	struct pool *pool;

	select_devices("disk", NULL);
	CHECK(!pool_init());
	bind(disk, &stock);
	pool = has_a_pool(disk);
	CHECK(dev->ops->dma_supported(dev, DMA_BIT_MASK(32)));
	address = map(disk);
	CHECK(address > DMA_BIT_MASK(28));
	CHECK(!dev->ops->dma_supported(dev, DMA_BIT_MASK(28)) && has_a_pool(disk) == pool);
	unmap(disk, address);
	CHECK(dev->ops->dma_supported(dev, DMA_BIT_MASK(28)) && has_a_pool(disk) == pool);
	CHECK(pool->last <= DMA_BIT_MASK(28) && test_chunks == CHUNKS);
	address = map(disk);
	CHECK(address <= DMA_BIT_MASK(28));
	unmap(disk, address);
	/* The second move fails: no map succeeds. */
	maps_left = 3;
	CHECK(!dev->ops->dma_supported(dev, DMA_BIT_MASK(24)));
	CHECK(!count_mapped(disk) && !test_chunks && map(disk) == DMA_MAPPING_ERROR);
	CHECK(!dev->dma_iommu && dev->ops && disk->mask == U64_MAX);
	unbind(disk, BUS_NOTIFY_UNBOUND_DRIVER);
	is_without_a_pool(disk);
	stop();
}

int main(void)
{
	int round;

	pool_mib = POOL_MIB_MIN;
	for (round = 0; round < 2; round++) {
		clears_ops = round;
		starts_and_fails();
		devices_change_during_the_exit();
		selects_devices();
		mappings_that_a_driver_leaves();
		unmaps_in_progress();
		unplugged_devices();
		pools_that_fail();
		smaller_masks();
	}
	munmap(test_low, TEST_LOW_CHUNKS * POOL_CHUNK_BYTES);
	puts("all as it should be");
	return 0;
}
