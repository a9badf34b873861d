// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs riommu_burst.c in user space (kernel.h, riommu_kernel.h). The IOMMU here keeps a copy of
 * each entry until the invalidation of its ring. A page whose last reference goes while the device
 * reaches it by such a copy is a violation. riommu_as_published.c runs this with the mode of the
 * module riommu-as-published.
 */
#define CORE_HAVE_MAP_PHYS
#include "riommu_kernel.h"

#define SLOTS 16
#define DEVICE 0x20

static struct rio rio;
static struct rio_endpoint endpoint = { .rio = &rio, .id = DEVICE };
static struct rio_ring *ring = &endpoint.rings[RIO_RING_WRITE];
static struct device dev = { .ops = &endpoint.core.ops, .coherent_dma_mask = ~0ULL };
static bool absent;
static unsigned int writes, freed, violations;
/* The memory that the device reaches by the IOMMU's copy of each slot. */
static struct {
	u64 from, bytes;
} copies[SLOTS];

static void test_freed(struct folio *folio)
{
	u64 from = PFN_PHYS(folio_pfn(folio));
	unsigned int i;

	freed++;
	for (i = 0; i < SLOTS; i++)
		violations += copies[i].bytes && copies[i].from < from + folio_size(folio) &&
			      from < copies[i].from + copies[i].bytes;
}

static bool is_free(u32 slot)
{
	u64 at;

	for (at = ring->free_slots.head; at < ring->free_slots.tail; at++)
		if ((u32)ring->free_slots.cells[at & ring->free_slots.mask] == slot)
			return true;
	return false;
}

static unsigned int free_count(void)
{
	return ring->free_slots.tail - ring->free_slots.head;
}

/* No slot is free, and no page is dropped, while the IOMMU has a copy of its entry. */
static void test_write(u64 word, u64 offset)
{
	unsigned int i;

	CHECK(offset == RIO_REG_INV && word == rio_inv_ring(DEVICE, RIO_RING_WRITE));
	for (i = 0; i < SLOTS; i++)
		CHECK(!copies[i].bytes || !is_free(i));
	writes++;
}

static u32 test_read(u64 offset)
{
	unsigned int i;

	for (i = 0; !absent && i < SLOTS; i++)
		if (!ring->table[i].second)
			copies[i].bytes = 0;
	return absent ? U32_MAX : 0;
}

/* Each page is a folio with one reference, its owner's. */
static void begin(enum rio_mode mode, bool is_interrupt)
{
	unsigned int i;

	rio_mode = mode;
	test_is_interrupt = is_interrupt;
	absent = false;
	writes = 0;
	freed = 0;
	violations = 0;
	test_complaints = 0;
	memset(copies, 0, sizeof(copies));
	for (i = 0; i < TEST_PAGES; i++) {
		test_folios[i] = (struct folio){ .references = 1, .pages = 1 };
		test_heads[i] = i;
	}
	memset(&endpoint.rings, 0, sizeof(endpoint.rings));
	for (i = RIO_RING_READ; i < RIO_RINGS; i++)
		CHECK(!rio_ring_init(&endpoint, i, SLOTS));
	memset(&endpoint.burst_tasklet, 0, sizeof(endpoint.burst_tasklet));
	memset(&endpoint.burst_timer, 0, sizeof(endpoint.burst_timer));
	endpoint.is_timer_armed = false;
	rio_burst_init(&endpoint);
	CHECK(ring->burst_slots == SLOTS / 4);
}

/* The burst has ended: no reference is left, and all slots are free. */
static void end(void)
{
	unsigned int i;

	CHECK(ring->pending == RIO_NO_SLOT && !atomic64_read(&ring->pending_count));
	for (i = 0; i < TEST_PAGES; i++)
		CHECK(test_folios[i].references <= 1);
	CHECK(free_count() == SLOTS && !test_complaints);
	rio_burst_stop(&endpoint);
	for (i = RIO_RING_READ; i < RIO_RINGS; i++)
		rio_ring_free(&endpoint.rings[i]);
}

static dma_addr_t map(u64 at, size_t bytes)
{
	dma_addr_t iova = rio_ops.map_phys(&dev, TEST_MEMORY + at, bytes, DMA_FROM_DEVICE, 0);

	if (iova != DMA_MAPPING_ERROR) {
		copies[rio_iova_slot(iova)].from = TEST_MEMORY + at;
		copies[rio_iova_slot(iova)].bytes = bytes;
	}
	return iova;
}

static void unmap(dma_addr_t iova)
{
	rio_ops.unmap_phys(&dev, iova, 0, DMA_FROM_DEVICE, 0);
}

/* Compound pages: the first one, and their number. */
static void join(unsigned int first, unsigned int pages)
{
	unsigned int i;

	test_folios[first].pages = pages;
	for (i = 0; i < pages; i++)
		test_heads[first + i] = first;
}

static void burst_ends(void)
{
	struct hrtimer *timer = &endpoint.burst_timer;

	if (rio_mode == RIO_BURST) {
		CHECK(!endpoint.burst_tasklet.is_scheduled);
		CHECK(endpoint.is_timer_armed && timer->due);
		timer->due = 0;
		timer->does(timer);
		return;
	}
	CHECK(endpoint.burst_tasklet.is_scheduled);
	endpoint.burst_tasklet.is_scheduled = false;
	endpoint.burst_tasklet.does(&endpoint.burst_tasklet);
}

static void pages_are_held_until_the_invalidation(void)
{
	dma_addr_t iova[3];
	unsigned int i;

	begin(RIO_BURST, true);
	iova[0] = map(0x10, 100);
	/* The end of a page and the begin of a compound one. */
	join(2, 4);
	iova[1] = map(0x1ff0, 0x20);
	/* Within it. */
	iova[2] = map(0x4100, 0x1000);
	for (i = 0; i < 3; i++) {
		unmap(iova[i]);
		CHECK(!writes && !is_free(rio_iova_slot(iova[i])));
		CHECK(!ring->table[rio_iova_slot(iova[i])].second);
	}
	CHECK(test_folios[0].references == 2 && test_folios[1].references == 2);
	CHECK(test_folios[2].references == 3 && test_folios[6].references == 1);
	/* A second unmap is an error, and drops nothing. */
	unmap(iova[0]);
	CHECK(test_complaints == 1 && atomic64_read(&ring->bad) == 1);
	test_complaints = 0;
	/* The owner frees the pages. The kernel gets them after the invalidation. */
	for (i = 0; i < 3; i++)
		folio_put(&test_folios[i]);
	CHECK(!freed);
	burst_ends();
	CHECK(writes == 1 && freed == 3 && !violations);
	CHECK(atomic64_read(&ring->deferred) == 3 && atomic64_read(&ring->held) == 3);
	end();
}

/* One reference holds a compound page, of any size, but only for a buffer within it. */
static void long_buffers_in_compound_pages(void)
{
	begin(RIO_BURST, true);
	join(1, 20);
	unmap(map(0x1800, (64 << 10) + 1));
	CHECK(!writes && test_folios[1].references == 2);
	folio_put(&test_folios[1]);
	CHECK(!freed);
	burst_ends();
	CHECK(writes == 1 && freed == 1 && !violations);
	end();
	begin(RIO_BURST, true);
	join(1, 17);
	unmap(map(0x1800, 17 * PAGE_SIZE));
	CHECK(writes == 1 && test_folios[1].references == 1 && !atomic64_read(&ring->held));
	/* Its last page does not exist. */
	unmap(map(TEST_PAGES * PAGE_SIZE - 0x800, 0x1000));
	CHECK(writes == 2 && !atomic64_read(&ring->held));
	end();
}

/* The byte that the device reaches at this address. */
static u8 *reached(dma_addr_t iova)
{
	u64 first = ring->table[rio_iova_slot(iova)].first;

	return first - TEST_MEMORY < sizeof(test_memory) ? phys_to_virt(first) : (u8 *)first;
}

/*
 * A small buffer in a slab, whose object has another owner at once: the device has a copy. It reads
 * the buffer's bytes as of the map or a sync, and writes that come late reach nobody.
 */
static void small_buffers_in_slabs(void)
{
	u8 *buffer = phys_to_virt(TEST_MEMORY + 0x100), *device;
	struct scatterlist entry = {};
	dma_addr_t iova;

	begin(RIO_BURST, true);
	test_folios[0].page.has_type = true;
	memset(buffer, 'a', 65);
	iova = map(0x100, 64);
	device = reached(iova);
	CHECK(device != buffer && !memcmp(device, buffer, 64) && test_shadows == 1);
	device[1] = 'b';
	CHECK(buffer[1] == 'a');
	rio_burst_ops.sync_single_for_cpu(&dev, iova + 1, 1, DMA_FROM_DEVICE);
	CHECK(buffer[1] == 'b');
	buffer[2] = 'c';
	rio_burst_ops.sync_single_for_device(&dev, iova + 2, 1000, DMA_BIDIRECTIONAL);
	CHECK(device[2] == 'c' && device[1] == 'b');
	/* The device's writes since the last sync are not lost. */
	device[2] = 'g';
	rio_burst_ops.sync_single_for_device(&dev, iova, 64, DMA_FROM_DEVICE);
	sg_init_one(&entry, (void *)(TEST_MEMORY + 0x100), 64);
	sg_dma_address(&entry) = iova;
	sg_dma_len(&entry) = 64;
	rio_burst_ops.sync_sg_for_device(&dev, &entry, 1, DMA_FROM_DEVICE);
	CHECK(device[2] == 'g');
	buffer[2] = 'h';
	rio_burst_ops.sync_sg_for_device(&dev, &entry, 1, DMA_BIDIRECTIONAL);
	CHECK(device[2] == 'h');
	/* An address outside the buffer changes nothing. */
	rio_burst_ops.sync_single_for_cpu(&dev, iova + 64, 1, DMA_FROM_DEVICE);
	device[3] = 'd';
	unmap(iova);
	CHECK(!writes && buffer[3] == 'd' && test_folios[0].references == 1);
	/* The object is another user's now. The shadow is not freed before the invalidation. */
	device[3] = 'e';
	CHECK(test_shadows == 1);
	CHECK(buffer[3] == 'd' && ring->table[rio_iova_slot(iova)].second == 0);
	burst_ends();
	CHECK(writes == 1 && atomic64_read(&ring->shadows_used) == 1 && !test_shadows);

	/* The driver copies by itself. */
	iova = rio_ops.map_phys(&dev, TEST_MEMORY + 0x100, 64, DMA_FROM_DEVICE,
				DMA_ATTR_SKIP_CPU_SYNC);
	*reached(iova) = 'f';
	rio_ops.unmap_phys(&dev, iova, 64, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	CHECK(*buffer == 'a');
	burst_ends();
	/* Without a copy at the map, the unmap copies bytes that the device has not written. */
	iova = rio_ops.map_phys(&dev, TEST_MEMORY + 0x100, 64, DMA_FROM_DEVICE,
				DMA_ATTR_SKIP_CPU_SYNC);
	*reached(iova) = 'f';
	buffer[9] = 'x';
	rio_ops.unmap_phys(&dev, iova, 64, DMA_FROM_DEVICE, 0);
	CHECK(buffer[0] == 'f' && buffer[8] == 'a' && buffer[9] == 'a');
	burst_ends();

	/* The driver calls no sync: no copy, and the unmap does not wait. */
	iova = rio_ops.map_phys(&dev, TEST_MEMORY + 0x100, 64, DMA_FROM_DEVICE,
				DMA_ATTR_REQUIRE_COHERENT);
	CHECK(reached(iova) == buffer && !test_shadows);
	writes = 0;
	rio_ops.unmap_phys(&dev, iova, 64, DMA_FROM_DEVICE, DMA_ATTR_REQUIRE_COHERENT);
	CHECK(writes == 1 && ring->pending == RIO_NO_SLOT);

	/* A buffer in a page that can be held, and one that is not small, have no copy. */
	iova = map(0x1100, 64);
	CHECK(reached(iova) == phys_to_virt(TEST_MEMORY + 0x1100));
	unmap(iova);
	burst_ends();
	iova = map(0x100, RIO_SHADOW_BYTES + 1);
	CHECK(reached(iova) == buffer);
	unmap(iova);
	end();
	CHECK(!test_shadows);
}

/* A device that only reads cannot change the buffer. */
static void shadows_of_buffers_that_are_read(void)
{
	struct rio_ring *reads = &endpoint.rings[RIO_RING_READ];
	u8 *buffer = phys_to_virt(TEST_MEMORY);
	dma_addr_t iova;

	begin(RIO_BURST, true);
	test_folios[0].page.has_type = true;
	*buffer = 'a';
	iova = rio_ops.map_phys(&dev, TEST_MEMORY, 64, DMA_TO_DEVICE, 0);
	CHECK(atomic64_read(&reads->shadows_used) == 1);
	*buffer = 'b';
	rio_ops.unmap_phys(&dev, iova, 64, DMA_TO_DEVICE, 0);
	CHECK(*buffer == 'b' && reads->pending == rio_iova_slot(iova));
	/* The write ring's IOMMU of this test does not know the other ring. */
	reads->pending = RIO_NO_SLOT;
	end();
}

static void what_cannot_be_held(void)
{
	enum { SLAB, RESERVED, ZONE_DEVICE, NO_REFERENCE, LARGE, NO_PAGE, LAST, COUNT };
	unsigned int i;

	for (i = 0; i < COUNT; i++) {
		u64 at = i == NO_PAGE ? TEST_PAGES * PAGE_SIZE : 0x1800;
		size_t bytes = i == LARGE ? (64 << 10) + 1 : 0x1000;
		struct folio *folio = &test_folios[i == LAST ? 2 : 1];

		begin(RIO_BURST, true);
		folio->page.has_type = i == SLAB || i == LAST;
		folio->is_reserved = i == RESERVED;
		folio->is_zone_device = i == ZONE_DEVICE;
		if (i == NO_REFERENCE)
			folio->references = 0;
		unmap(map(at, bytes));
		CHECK(writes == 1 && !endpoint.burst_tasklet.is_scheduled);
		CHECK(!atomic64_read(&ring->held) && !atomic64_read(&ring->deferred));
		/* The reference to the first page, if it was held, is dropped once. */
		CHECK(test_folios[1].references == (i != NO_REFERENCE));
		CHECK(test_folios[2].references == 1);
		end();
	}
}

static void process_context(void)
{
	begin(RIO_BURST, false);
	unmap(map(0, 100));
	CHECK(!writes && test_folios[0].references == 2);
	burst_ends();
	end();
}

static void coherent_memory(void)
{
	dma_addr_t iova;

	begin(RIO_BURST, true);
	iova = rio_map_memory(&dev, TEST_MEMORY, PAGE_SIZE, DMA_FROM_DEVICE, 0, NULL);
	CHECK(rio_unmap_memory(&dev, iova) && writes == 1);
	CHECK(!endpoint.burst_tasklet.is_scheduled && !atomic64_read(&ring->deferred));
	end();
}

/* Addresses have 50 bits. The mask of a driver that sets none has 32, and maps do not check it. */
static void small_masks(void)
{
	static const struct {
		u64 mask, bus_limit;
		bool is_refused;
	} cases[] = {
		{ ~0ULL, 0, false },
		{ DMA_BIT_MASK(50), 0, false },
		{ DMA_BIT_MASK(49), 0, true },
		{ DMA_BIT_MASK(32), 0, true },
		{ ~0ULL, DMA_BIT_MASK(49), true },
		{ ~0ULL, DMA_BIT_MASK(50), false },
	};
	dma_addr_t iova;
	unsigned int i;

	begin(RIO_STRICT, true);
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		test_complaints = 0;
		dev.coherent_dma_mask = cases[i].mask;
		dev.bus_dma_limit = cases[i].bus_limit;
		iova = rio_map_memory(&dev, TEST_MEMORY, PAGE_SIZE, DMA_FROM_DEVICE, 0, NULL);
		CHECK((iova == DMA_MAPPING_ERROR) == cases[i].is_refused);
		CHECK(test_complaints == cases[i].is_refused);
		if (!cases[i].is_refused)
			rio_unmap_memory(&dev, iova);
	}
	dev.coherent_dma_mask = ~0ULL;
	dev.bus_dma_limit = 0;
	test_complaints = 0;
	end();
}

/* A burst has a limit of slots, and ends when a map needs them. */
static void limit_of_slots(void)
{
	dma_addr_t iova[SLOTS];
	unsigned int i;

	begin(RIO_BURST, true);
	for (i = 0; i < SLOTS; i++)
		iova[i] = map(i * PAGE_SIZE, PAGE_SIZE);
	for (i = 0; i < SLOTS; i++) {
		unmap(iova[i]);
		CHECK(writes == (i + 1) / (SLOTS / 4));
	}
	for (i = 0; i < SLOTS; i++)
		CHECK(map(i * PAGE_SIZE, PAGE_SIZE) == iova[i]);
	CHECK(map(0, 1) == DMA_MAPPING_ERROR && atomic64_read(&ring->full) == 1);
	unmap(iova[3]);
	CHECK(writes == 4 && !free_count());
	CHECK(map(0, 1) == iova[3] && writes == 5 && atomic64_read(&ring->full) == 1);
	for (i = 0; i < SLOTS; i++)
		unmap(iova[i]);
	end();
}

/* A burst that no softirq ends is ended by the timer, which runs once for all its unmaps. */
static void limit_of_time(void)
{
	struct hrtimer *timer = &endpoint.burst_timer;

	begin(RIO_BURST, true);
	unmap(map(0, 100));
	unmap(map(0x1000, 100));
	CHECK(!writes && timer->starts == 1 && timer->due == 1000 * 1000);
	timer->does(timer);
	CHECK(writes == 1 && test_folios[0].references == 1);
	unmap(map(0, 100));
	CHECK(timer->starts == 2);
	timer->does(timer);
	CHECK(writes == 2);
	end();
}

static void lists(void)
{
	struct scatterlist list[4] = {};
	unsigned int i, slab;

	for (slab = 0; slab < 2; slab++) {
		begin(RIO_BURST, true);
		ring->burst_slots = SLOTS;
		test_folios[2].page.has_type = slab;
		/* Longer than a shadow. */
		for (i = 0; i < 4; i++)
			sg_init_one(&list[i], (void *)(TEST_MEMORY + i * PAGE_SIZE), 4000);
		unmap(map(0x8000, 100));
		CHECK(rio_ops.map_sg(&dev, list, 4, DMA_FROM_DEVICE, 0) == 4);
		for (i = 0; i < 4; i++) {
			copies[rio_iova_slot(sg_dma_address(&list[i]))].from = sg_phys(&list[i]);
			copies[rio_iova_slot(sg_dma_address(&list[i]))].bytes = 4000;
		}
		rio_ops.unmap_sg(&dev, list, 4, DMA_FROM_DEVICE, 0);
		CHECK(writes == slab && (long)atomic64_read(&ring->deferred) == (slab ? 1 : 5));
		for (i = 0; i < 4; i++)
			folio_put(&test_folios[i]);
		if (!slab)
			burst_ends();
		CHECK(writes == 1 && freed == 4 && !violations);
		end();
	}
}

/* The device may still reach the pages, so they are never dropped, and the slots not reused. */
static void an_absent_iommu(void)
{
	begin(RIO_BURST, true);
	unmap(map(0, 100));
	folio_put(&test_folios[0]);
	absent = true;
	burst_ends();
	CHECK(!freed && test_folios[0].references == 1 && free_count() == SLOTS - 1);
	CHECK(atomic64_read(&ring->lost) == 1);
	rio_slot_queue_put(&ring->free_slots, 0);
	end();
}

/* The end of the endpoint ends its bursts. */
static void stopped(void)
{
	begin(RIO_BURST, true);
	unmap(map(0, 100));
	rio_burst_stop(&endpoint);
	CHECK(writes == 1 && test_folios[0].references == 1);
	CHECK(!endpoint.burst_tasklet.is_scheduled && !endpoint.burst_timer.due);
	end();
}

#ifdef RIO_AS_PUBLISHED
/*
 * As published: the slot is not used again, but the device reaches a page of another user. A
 * softirq or the timer ends the burst. Process context has no softirq, and its unmap ends a burst.
 * Buffers in slabs have no copies.
 */
static void as_published(void)
{
	dma_addr_t one, other;

	begin(RIO_BURST_PAPER, true);
	one = map(0, 100);
	unmap(one);
	CHECK(!writes && !is_free(rio_iova_slot(one)) && test_folios[0].references == 1);
	folio_put(&test_folios[0]);
	CHECK(freed == 1 && violations == 1);
	burst_ends();
	CHECK(writes == 1 && is_free(rio_iova_slot(one)));
	end();

	begin(RIO_BURST_PAPER, true);
	one = map(0, 100);
	other = map(0x1000, 100);
	unmap(one);
	CHECK(!writes);
	test_is_interrupt = false;
	unmap(other);
	CHECK(writes == 1 && atomic64_read(&ring->deferred) == 1);
	end();

	begin(RIO_BURST_PAPER, true);
	unmap(map(0, 100));
	CHECK(endpoint.burst_timer.starts == 1 && endpoint.burst_tasklet.is_scheduled);
	endpoint.burst_timer.does(&endpoint.burst_timer);
	CHECK(writes == 1);
	end();

	begin(RIO_BURST_PAPER, true);
	test_folios[0].page.has_type = true;
	one = map(0x100, 64);
	CHECK(reached(one) == phys_to_virt(TEST_MEMORY + 0x100));
	unmap(one);
	burst_ends();
	end();
}
#else
/* The module riommu has no code for this mode, whatever its variable says. */
static void as_published(void)
{
	begin(RIO_BURST_PAPER, true);
	unmap(map(0, 100));
	CHECK(writes == 1 && !atomic64_read(&ring->deferred));
	CHECK(!endpoint.burst_tasklet.is_scheduled);
	folio_put(&test_folios[0]);
	CHECK(!violations);
	end();
}
#endif

int main(void)
{
	memcpy((void *)&endpoint.core.ops, &rio_ops, sizeof(rio_ops));
	pages_are_held_until_the_invalidation();
	long_buffers_in_compound_pages();
	small_buffers_in_slabs();
	shadows_of_buffers_that_are_read();
	what_cannot_be_held();
	process_context();
	coherent_memory();
	small_masks();
	limit_of_slots();
	limit_of_time();
	lists();
	an_absent_iommu();
	stopped();
	as_published();
	puts("all as it should be");
	return 0;
}
