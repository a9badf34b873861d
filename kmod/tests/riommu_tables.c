// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs riommu_tables.c and riommu_endpoint.c in user space (kernel.h, riommu_kernel.h). The IOMMU
 * here walks the tables as docs/RIOMMU-DEVICE.md specifies. It keeps a copy of a device's context
 * entry, also of one that is not present, and of the last slot that it used of each ring, until
 * their invalidation.
 */
#define CORE_HAVE_MAP_PHYS
#include "riommu_kernel.h"

/* Two make a burst. */
#define SLOTS 8
/* Requester IDs: two functions of a device, and a device of another bus, the last one. */
#define DEVICES 3
#define SEGMENT 2

static u16 ids[DEVICES] = { 0x20, 0x21, 0xff08 };
static struct pci_dev iommu_pdev = { .id = 0x18, .bus = (void *)SEGMENT };
static struct rio rio = { .pdev = &iommu_pdev, .devices = ids, .device_count = DEVICES };
static struct rio_endpoint endpoints[DEVICES];
static struct pci_dev pdevs[DEVICES];
unsigned int rio_slots = SLOTS;

/* Entries of a device that the IOMMU has read. */
static struct {
	bool is_known;
	struct rio_entry context;
	/* The slot that was used last in each ring, with a second word that is not 0. */
	struct {
		u32 slot;
		struct rio_entry entry;
	} last[RIO_RINGS];
} known[DEVICES];

/* Stores to tables since the last barrier. */
static unsigned int unordered;
static void test_store(__le64 *at, u64 word);
#undef WRITE_ONCE
#define WRITE_ONCE(to, word) test_store(&(to), word)
#undef smp_wmb
/* Orders the stores before it. */
#define smp_wmb() ((void)(unordered = 0))

/* Pages are counted as other allocations are. */
#define get_zeroed_page(gfp) ((uintptr_t)alloc_pages_exact(PAGE_SIZE, gfp))
#undef free_page
#define free_page(at) test_free((void *)(at))
#define BUILD_BUG_ON(condition) ((void)sizeof(char[1 - 2 * !!(condition)]))
void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint)
{
}

#include "../riommu_tables.c"
#include "../riommu_endpoint.c"

static struct rio_entry *table_at(u64 word)
{
	return (struct rio_entry *)(uintptr_t)word;
}

/* The entry in memory, or NULL if the bus has no context table. */
static struct rio_entry *context_of(unsigned int device)
{
	u64 root = rio.root[ids[device] >> 8].first;

	CHECK(!rio.root[ids[device] >> 8].second);
	return root & 1 ? table_at(root & PAGE_MASK) + (ids[device] & 0xff) : NULL;
}

/* The walk from a context entry. Returns 0, or the reason of the specification for the fault. */
static int walk(struct rio_entry context, dma_addr_t iova, struct rio_entry *slot)
{
	struct rio_entry *rdevice, *rring;

	if (!(context.first & 1))
		return RIO_FAULT_CONTEXT_NOT_PRESENT;
	rdevice = table_at(context.first & PAGE_MASK);
	CHECK(rdevice && (context.first & ~PAGE_MASK) == (3 << 2 | 1));
	if (iova >> 48 >= rdevice->second)
		return RIO_FAULT_RING_BEYOND_DEVICE;
	rring = table_at(rdevice->first) + (iova >> 48);
	if ((iova >> 30 & 0x3ffff) >= rring->second)
		return RIO_FAULT_SLOT_BEYOND_RING;
	*slot = table_at(rring->first)[iova >> 30 & 0x3ffff];
	return slot->second >> 32 & 1 ? 0 : RIO_FAULT_NOT_VALID;
}

/* An access of one byte. Returns the reason, or 0 and where it is in memory. */
static int access(unsigned int device, dma_addr_t iova, bool is_write, u64 *at)
{
	u32 ring = iova >> 48, slot = iova >> 30 & 0x3ffff, offset = iova & 0x3fffffff;
	struct rio_entry entry;
	int reason;

	if (!known[device].is_known) {
		struct rio_entry *context = context_of(device);

		if (!context)
			return RIO_FAULT_ROOT_NOT_PRESENT;
		known[device].is_known = true;
		known[device].context = *context;
	}
	if (ring < RIO_RINGS && known[device].last[ring].entry.second &&
	    known[device].last[ring].slot == slot) {
		entry = known[device].last[ring].entry;
	} else {
		reason = walk(known[device].context, iova, &entry);
		if (reason)
			return reason;
		known[device].last[ring].slot = slot;
		known[device].last[ring].entry = entry;
	}
	if (offset >= (entry.second & 0x3fffffff))
		return RIO_FAULT_BEYOND_BUFFER;
	if (!(entry.second >> 30 & (is_write ? 2 : 1)))
		return is_write ? RIO_FAULT_WRITE_DENIED : RIO_FAULT_READ_DENIED;
	*at = entry.first + offset;
	return 0;
}

/*
 * The IOMMU may read an entry at any time. When a context entry becomes present, all that it leads
 * to has been stored before, with a barrier between. No other device has its domain.
 */
static void test_store(__le64 *at, u64 word)
{
	unsigned int i, other, ring;

	*at = word;
	unordered++;
	for (i = 0; i < DEVICES; i++) {
		struct rio_entry *context = context_of(i);
		struct rio_entry slot;

		CHECK(at != &context->second || !(context->first & 1));
		if (at != &context->first)
			continue;
		CHECK(context->first & 1);
		CHECK(unordered == 1);
		for (other = 0; other < DEVICES; other++)
			CHECK(other == i || !(context_of(other)->first & 1) ||
			      context_of(other)->second != context->second);
		CHECK(!(context->second & ~0xffff00ULL));
		for (ring = RIO_RING_READ; ring < RIO_RINGS; ring++)
			CHECK(walk(*context, (u64)ring << 48, &slot) == RIO_FAULT_NOT_VALID);
	}
}

static void test_write(u64 word, u64 offset)
{
	u32 ring = word >> 16 & 0xffff;
	unsigned int i;

	CHECK(offset == RIO_REG_INV && word >> 32 <= 1);
	for (i = 0; i < DEVICES && ids[i] != (word & 0xffff); i++)
		;
	CHECK(i < DEVICES);
	if (word >> 32) {
		CHECK(!ring && context_of(i)->first & 1);
		memset(&known[i], 0, sizeof(known[i]));
	} else {
		CHECK(ring < RIO_RINGS);
		known[i].last[ring].entry.second = 0;
	}
}

static u32 test_read(u64 offset)
{
	CHECK(offset == RIO_REG_STS);
	return 0;
}

/* No page is freed while a device reaches it by the IOMMU's copy of a slot. */
static void test_freed(struct folio *folio)
{
	u64 from = PFN_PHYS(folio_pfn(folio));
	unsigned int i, ring;

	for (i = 0; i < DEVICES; i++) {
		for (ring = 0; ring < RIO_RINGS; ring++) {
			struct rio_entry entry = known[i].last[ring].entry;

			CHECK(!entry.second || entry.first - from >= PAGE_SIZE);
		}
	}
}

static void are_blocked(int reason)
{
	unsigned int i;
	u64 at;

	for (i = 0; i < DEVICES; i++)
		CHECK(access(i, (u64)RIO_RING_READ << 48, false, &at) == reason);
}

static void free_tables(void)
{
	rio_tables_free(&rio);
	CHECK(!test_allocations);
	rio.root = NULL;
	memset(rio.contexts, 0, sizeof(rio.contexts));
	memset(known, 0, sizeof(known));
}

/* A context table for each bus that has a device. After a failure, nothing is left. */
static void root_and_context_tables(void)
{
	int succeed;

	for (succeed = 0; succeed < 3; succeed++) {
		test_allocations_left = succeed;
		CHECK(rio_tables_init(&rio) == -ENOMEM);
		free_tables();
	}
	test_allocations_left = INT32_MAX;
	CHECK(!rio_tables_init(&rio) && test_allocations == 3);
	are_blocked(RIO_FAULT_CONTEXT_NOT_PRESENT);
	free_tables();
}

/* As core_bind.c does. */
static int init(unsigned int device)
{
	struct rio_endpoint *endpoint = &endpoints[device];

	memset(endpoint, 0, sizeof(*endpoint));
	endpoint->core.iommu = &rio.core;
	endpoint->core.devid = SEGMENT << 16 | ids[device];
	memcpy((void *)&endpoint->core.ops, rio_engine.ops, sizeof(rio_ops));
	pdevs[device].id = ids[device];
	pdevs[device].dev.ops = &endpoint->core.ops;
	return rio_engine.init(&endpoint->core);
}

/* Each page is a folio with one reference, its owner's. */
static void begin(enum rio_mode mode)
{
	unsigned int i;

	rio_mode = mode;
	test_complaints = 0;
	for (i = 0; i < TEST_PAGES; i++) {
		test_folios[i] = (struct folio){ .references = 1, .pages = 1 };
		test_heads[i] = i;
	}
	CHECK(!rio_tables_init(&rio));
	are_blocked(RIO_FAULT_CONTEXT_NOT_PRESENT);
	for (i = 0; i < DEVICES; i++)
		CHECK(!init(i));
	are_blocked(RIO_FAULT_NOT_VALID);
}

/* The drivers are unbound. */
static void end(void)
{
	unsigned int i;

	for (i = 0; i < DEVICES; i++) {
		rio_engine.unbound(&endpoints[i].core);
		rio_engine.stop(&endpoints[i].core);
		CHECK(!endpoints[i].burst_timer.due && !endpoints[i].burst_tasklet.is_scheduled);
	}
	/* The IOMMU no longer translates. */
	for (i = 0; i < DEVICES; i++)
		rio_engine.free(&endpoints[i].core);
	free_tables();
}

/* After a failure, nothing is left, and the device reaches no table. */
static void an_endpoint_without_memory(void)
{
	int succeed;

	CHECK(!rio_tables_init(&rio));
	/* The rDEVICE, and three for each ring. */
	for (succeed = 0; succeed < 10; succeed++) {
		int before = test_allocations;

		test_allocations_left = succeed;
		CHECK(init(0) == -ENOMEM && test_allocations == before);
		are_blocked(RIO_FAULT_CONTEXT_NOT_PRESENT);
	}
	test_allocations_left = INT32_MAX;
	CHECK(!init(0));
	rio_engine.free(&endpoints[0].core);
	free_tables();
}

static struct folio *folio_of(unsigned int device, enum dma_data_direction direction)
{
	return &test_folios[device * DMA_NONE + direction];
}

static u64 page_of(unsigned int device, enum dma_data_direction direction)
{
	return PFN_PHYS(folio_pfn(folio_of(device, direction)));
}

static dma_addr_t map(unsigned int device, enum dma_data_direction direction)
{
	return endpoints[device].core.ops.map_phys(&pdevs[device].dev, page_of(device, direction),
						   100, direction, 0);
}

static void unmap(unsigned int device, dma_addr_t iova, enum dma_data_direction direction)
{
	endpoints[device].core.ops.unmap_phys(&pdevs[device].dev, iova, 100, direction, 0);
}

/* The same addresses reach each device's own buffers, in the direction that each buffer has. */
static void devices_reach_their_buffers(void)
{
	dma_addr_t iova[DEVICES][DMA_NONE];
	unsigned int device, direction;
	u64 at;

	begin(RIO_STRICT);
	for (device = 0; device < DEVICES; device++)
		for (direction = 0; direction < DMA_NONE; direction++)
			iova[device][direction] = map(device, direction);
	for (device = 0; device < DEVICES; device++) {
		for (direction = 0; direction < DMA_NONE; direction++) {
			int read = direction == DMA_FROM_DEVICE ? RIO_FAULT_READ_DENIED : 0;
			int write = direction == DMA_TO_DEVICE ? RIO_FAULT_WRITE_DENIED : 0;
			dma_addr_t last = iova[device][direction] + 99;

			CHECK(last == iova[0][direction] + 99);
			CHECK(access(device, last, false, &at) == read);
			CHECK(access(device, last, true, &at) == write);
			CHECK(at == page_of(device, direction) + 99);
			unmap(device, iova[device][direction], direction);
			CHECK(access(device, last, true, &at) == RIO_FAULT_NOT_VALID);
		}
	}
	CHECK(!test_complaints);
	end();
}

/* A device has the rings and the slots that its driver uses, and no other ones. */
static void rings_have_their_slots(void)
{
	dma_addr_t iova[SLOTS];
	unsigned int ring, i;
	u64 at;

	begin(RIO_STRICT);
	for (i = 0; i < SLOTS; i++)
		iova[i] = map(0, DMA_FROM_DEVICE);
	for (i = 0; i < SLOTS; i++) {
		CHECK(!access(0, iova[i], true, &at));
		unmap(0, iova[i], DMA_FROM_DEVICE);
	}
	for (ring = RIO_RING_READ; ring < RIO_RINGS; ring++)
		CHECK(access(0, rio_iova(ring, SLOTS, 0), true, &at) == RIO_FAULT_SLOT_BEYOND_RING);
	CHECK(access(0, rio_iova(RIO_RING_NONE, 0, 0), true, &at) == RIO_FAULT_SLOT_BEYOND_RING);
	CHECK(access(0, rio_iova(RIO_RINGS, 0, 0), true, &at) == RIO_FAULT_RING_BEYOND_DEVICE);
	end();
}

/*
 * A driver unbinds and leaves one, two and three buffers in its rings. Its device no longer reaches
 * them, and the core learns of all of them until their late unmaps.
 */
static void buffers_that_a_driver_leaves(enum rio_mode mode)
{
	static const enum dma_data_direction directions[] = {
		DMA_TO_DEVICE,	   DMA_FROM_DEVICE,   DMA_FROM_DEVICE,
		DMA_BIDIRECTIONAL, DMA_BIDIRECTIONAL, DMA_BIDIRECTIONAL,
	};
	dma_addr_t iova[ARRAY_SIZE(directions)], other;
	unsigned int i;
	u64 at;

	begin(mode);
	other = map(1, DMA_BIDIRECTIONAL);
	for (i = 0; i < ARRAY_SIZE(directions); i++) {
		iova[i] = map(0, directions[i]);
		CHECK(!access(0, iova[i], directions[i] != DMA_TO_DEVICE, &at));
	}
	rio_engine.unbound(&endpoints[0].core);
	for (i = 0; i < ARRAY_SIZE(directions); i++)
		CHECK(access(0, iova[i], directions[i] != DMA_TO_DEVICE, &at) ==
		      RIO_FAULT_NOT_VALID);
	CHECK(test_complaints == 1 && rio_engine.count_orphans(&endpoints[0].core) == 6);
	CHECK(!access(1, other, true, &at) && !rio_engine.count_orphans(&endpoints[1].core));
	rio_engine.unbound(&endpoints[0].core);
	for (i = 0; i < ARRAY_SIZE(directions); i++)
		unmap(0, iova[i], directions[i]);
	CHECK(test_complaints == 1 && !rio_engine.count_orphans(&endpoints[0].core));
	unmap(1, other, DMA_BIDIRECTIONAL);
	end();
}

/* A burst ends when the driver unbinds: the device does not reach what was unmapped before. */
static void a_burst_ends_with_its_driver(void)
{
	struct folio *folio = folio_of(0, DMA_FROM_DEVICE);
	dma_addr_t iova;
	u64 at;

	begin(RIO_BURST);
	iova = map(0, DMA_FROM_DEVICE);
	CHECK(!access(0, iova, true, &at));
	unmap(0, iova, DMA_FROM_DEVICE);
	folio_put(folio);
	CHECK(!access(0, iova, true, &at) && folio->references == 1);
	CHECK(endpoints[0].burst_timer.due);
	rio_engine.unbound(&endpoints[0].core);
	CHECK(access(0, iova, true, &at) == RIO_FAULT_NOT_VALID && !folio->references);
	CHECK(!test_complaints && !rio_engine.count_orphans(&endpoints[0].core));
	end();
}

/* Only bursts have shadows, which a sync copies. As the kernel does, it calls what there is. */
static void shadows_are_copied(void)
{
	struct rio_endpoint *endpoint = &endpoints[0];
	u64 buffer = page_of(0, DMA_FROM_DEVICE), at;
	dma_addr_t iova;

	begin(RIO_STRICT);
	CHECK(!endpoint->core.ops.sync_single_for_cpu);
	end();
	begin(RIO_BURST);
	folio_of(0, DMA_FROM_DEVICE)->page.has_type = true;
	iova = map(0, DMA_FROM_DEVICE);
	CHECK(!access(0, iova, true, &at) && at != buffer);
	*(u8 *)(uintptr_t)at = 7;
	if (endpoint->core.ops.sync_single_for_cpu)
		endpoint->core.ops.sync_single_for_cpu(&pdevs[0].dev, iova, 1, DMA_FROM_DEVICE);
	CHECK(*(u8 *)phys_to_virt(buffer) == 7);
	unmap(0, iova, DMA_FROM_DEVICE);
	end();
}

/* Devices of the IOMMU's segment that it lists, but not itself, even if the host lists it. */
static void devices_behind_the_iommu(void)
{
	static const struct {
		uintptr_t segment;
		unsigned int id;
		bool is_behind;
	} cases[] = {
		{ SEGMENT, 0x20, true },     { SEGMENT, 0x21, true },	 { SEGMENT, 0xff08, true },
		{ SEGMENT, 0x08, false },    { SEGMENT, 0x1f, false },	 { SEGMENT, 0x120, false },
		{ SEGMENT, 0xff20, false },  { SEGMENT, 0xffff, false }, { 0, 0x20, false },
		{ SEGMENT + 1, 0xff08, false },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		struct pci_dev pdev = { .id = cases[i].id, .bus = (void *)cases[i].segment };

		CHECK(rio_engine.translates(&rio.core, &pdev) == cases[i].is_behind);
	}
	iommu_pdev.id = ids[1];
	CHECK(!rio_engine.translates(&rio.core, &iommu_pdev));
}

int main(void)
{
	devices_behind_the_iommu();
	root_and_context_tables();
	an_endpoint_without_memory();
	devices_reach_their_buffers();
	rings_have_their_slots();
	buffers_that_a_driver_leaves(RIO_STRICT);
	buffers_that_a_driver_leaves(RIO_BURST);
	a_burst_ends_with_its_driver();
	shadows_are_copied();
	puts("all as it should be");
	return 0;
}
