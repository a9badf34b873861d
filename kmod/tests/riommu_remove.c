// SPDX-License-Identifier: GPL-2.0-only
/*
 * Removes the driver of a ring IOMMU while a late unmap runs: core_bind.c over riommu_endpoint.c
 * and riommu_tables.c (kernel.h, riommu_kernel.h, module.h). page_pool unmaps the page of an
 * unbound network driver from a softirq that has read our operations before their removal. It is
 * slow: it runs at the end of a grace period that waits for it, or after the removal.
 */
#define CORE_HAVE_MAP_PHYS
#include "riommu_kernel.h"
#undef kzalloc
#undef ARRAY_SIZE
#include "module.h"

#define SLOTS 8

unsigned int rio_slots = SLOTS;
struct notifier_block *test_notifier;
/* Freed memory must not be in use, so the sanitizer finds a late access. */
#define get_zeroed_page(gfp) ((uintptr_t)alloc_pages_exact(PAGE_SIZE, gfp))
#undef free_page
#define free_page(at) test_free((void *)(at))
#define BUILD_BUG_ON(condition) ((void)sizeof(char[1 - 2 * !!(condition)]))
static int test_compare_first(const u16 *id, const u16 *ids, size_t count)
{
	return count && *id == *ids;
}

#define bsearch(id, ids, count, size, compare)                                                     \
	((void)(size), (void)(compare), test_compare_first(id, ids, count))
void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint)
{
}

const struct dma_map_ops core_refusing_ops;
const char *core_refusal(struct core_iommu *iommu, struct pci_dev *pdev)
{
	return NULL;
}

#include "../riommu_tables.c"
#include "../riommu_endpoint.c"
#include "../core_bind.c"

static u16 ids[] = { 0x20 };
static struct pci_dev iommu_pdev = { .id = 0x18 }, card = { .id = 0x20 };
static struct rio rio = { .pdev = &iommu_pdev, .devices = ids, .device_count = 1 };
/* The unmap in progress: the operations that it has read, or NULL. */
static const struct dma_map_ops *late_ops;
static dma_addr_t late_address;

static void test_write(u64 word, u64 offset)
{
}

static u32 test_read(u64 offset)
{
	return 0;
}

static void test_freed(struct folio *folio)
{
}

void *test_zeroed(size_t bytes)
{
	return test_alloc(bytes);
}

const char *pci_name(const struct pci_dev *pdev)
{
	return "0000:00:04.0";
}

struct pci_dev *test_next_device(struct pci_dev *before)
{
	return before ? NULL : &card;
}

static void notify(unsigned long event)
{
	if (test_notifier)
		test_notifier->notifier_call(test_notifier, event, &card.dev);
}

static void driver_binds(void)
{
	card.dev.driver = &card;
	notify(BUS_NOTIFY_BIND_DRIVER);
}

/* As the kernel does, clears the operations. */
void device_release_driver(struct device *dev)
{
	dev->driver = NULL;
	dev->ops = NULL;
	notify(BUS_NOTIFY_UNBOUND_DRIVER);
}

int device_attach(struct device *dev)
{
	return 1;
}

static void late_unmap_runs(void)
{
	const struct dma_map_ops *ops = late_ops;

	late_ops = NULL;
	if (!ops)
		return;
	/* What core_endpoint_of() finds by the operations that the unmap has read. */
	card.dev.ops = ops;
	ops->unmap_phys(&card.dev, late_address, 4096, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	card.dev.ops = NULL;
}

/* No unmap begins after the removal of the operations. */
void test_synchronize(void)
{
	CHECK(!card.dev.ops);
	late_unmap_runs();
}

/* The driver unbinds before the late unmap, or is bound until the removal. */
static void removal_waits_for_a_late_unmap(enum rio_mode mode, bool is_bound)
{
	struct rio_endpoint *endpoint;
	unsigned int i;

	rio_mode = mode;
	for (i = 0; i < TEST_PAGES; i++) {
		test_folios[i] = (struct folio){ .references = 1, .pages = 1 };
		test_heads[i] = i;
	}
	CHECK(!rio_tables_init(&rio));
	core_init(&rio.core, &rio_engine, &iommu_pdev.dev);
	CHECK(!core_start(&rio.core));
	driver_binds();
	endpoint = rio_endpoint_of(&card.dev);
	late_address = card.dev.ops->map_phys(&card.dev, TEST_MEMORY, 4096, DMA_FROM_DEVICE, 0);
	if (!is_bound)
		device_release_driver(&card.dev);
	CHECK(rio_engine.count_orphans(&endpoint->core) == !is_bound);
	late_ops = card.dev.ops;
	core_stop(&rio.core);
	CHECK(!card.dev.ops);
	/* Also the burst that the unmap began has ended. */
	CHECK(late_ops || (!endpoint->burst_timer.due && test_folios[0].references == 1));
	core_free(&rio.core);
	rio_tables_free(&rio);
	memset(rio.contexts, 0, sizeof(rio.contexts));
	late_unmap_runs();
	CHECK(!test_allocations && !test_links);
}

/* An earlier driver's mask, set with operations without syncs, must not suppress the syncs. */
static void syncs_are_not_skipped(enum rio_mode mode)
{
	rio_mode = mode;
	CHECK(!rio_tables_init(&rio));
	core_init(&rio.core, &rio_engine, &iommu_pdev.dev);
	CHECK(!core_start(&rio.core));
	card.dev.dma_skip_sync = true;
	driver_binds();
	CHECK(card.dev.dma_skip_sync == (mode == RIO_STRICT));
	core_stop(&rio.core);
	core_free(&rio.core);
	rio_tables_free(&rio);
	memset(rio.contexts, 0, sizeof(rio.contexts));
}

int test_links;
struct device *test_consumer, *test_supplier;

int main(void)
{
	unsigned int i;

	for (i = 0; i < 4; i++)
		removal_waits_for_a_late_unmap(i & 1 ? RIO_BURST : RIO_STRICT, i & 2);
	syncs_are_not_skipped(RIO_STRICT);
	syncs_are_not_skipped(RIO_BURST);
	puts("all as it should be");
	return 0;
}
