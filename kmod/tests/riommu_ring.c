// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs riommu_ring.c and riommu_ops.c in user space (kernel.h), against an IOMMU that checks each
 * invalidation: the entries are cleared before it, and no slot is free before it is complete.
 */
#define CORE_HAVE_MAP_PHYS
#include "riommu_kernel.h"

#define SLOTS 4
#define DEVICE 0x20
#define VALID 0x100000000ULL

static struct rio rio;
static struct rio_endpoint endpoint = { .rio = &rio, .id = DEVICE };
static struct rio_ring *ring = &endpoint.rings[RIO_RING_WRITE];
static struct pci_dev pdev = { .dev.ops = &endpoint.core.ops, .dev.coherent_dma_mask = ~0ULL };
static unsigned int writes, reads;
static bool absent;
/* The slots that an unmap in progress clears. */
static u32 cleared[SLOTS];
static unsigned int cleared_count;

/* The position of a slot in the queue of free ones, or -1. */
static int place_of(u32 slot)
{
	u64 at;

	for (at = ring->free_slots.head; at < ring->free_slots.tail; at++)
		if ((u32)ring->free_slots.cells[at & ring->free_slots.mask] == slot)
			return at - ring->free_slots.head;
	return -1;
}

static unsigned int free_count(void)
{
	return ring->free_slots.tail - ring->free_slots.head;
}

static void are_not_free(void)
{
	unsigned int i;

	for (i = 0; i < cleared_count; i++)
		CHECK(place_of(cleared[i]) < 0);
}

static void test_write(u64 word, u64 offset)
{
	unsigned int i;

	CHECK(offset == RIO_REG_INV && word == rio_inv_ring(DEVICE, RIO_RING_WRITE));
	CHECK(barriers > writes);
	for (i = 0; i < cleared_count; i++)
		CHECK(!ring->table[cleared[i]].second);
	are_not_free();
	writes++;
}

static void test_freed(struct folio *folio)
{
}

static u32 test_read(u64 offset)
{
	CHECK(offset == RIO_REG_STS && reads + 1 == writes);
	are_not_free();
	reads++;
	return absent ? U32_MAX : 0;
}

static dma_addr_t map(u64 buffer)
{
	return rio_ops.map_phys(&pdev.dev, buffer, 100, DMA_FROM_DEVICE, 0);
}

static void unmap(dma_addr_t iova)
{
	unsigned int before = writes;

	cleared[0] = rio_iova_slot(iova);
	cleared_count = 1;
	CHECK(rio_ring_unmap(&endpoint, iova));
	/* An invalidation, and the read that waits for it. */
	CHECK(writes == before + 1 && reads == writes);
	CHECK((long)writes == atomic64_read(&ring->invalidations));
	CHECK(place_of(cleared[0]) == (int)free_count() - 1);
}

static void unmaps_of_what_is_not_mapped(void)
{
	static const dma_addr_t bad[] = {
		(dma_addr_t)RIO_RING_NONE << 48,
		(dma_addr_t)RIO_RINGS << 48,
		0xffffULL << 48,
		(dma_addr_t)RIO_RING_WRITE << 48 | (dma_addr_t)SLOTS << 30,
		DMA_MAPPING_ERROR,
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK(!rio_ring_unmap(&endpoint, bad[i]));
	CHECK(!writes && atomic64_read(&ring->bad) == 1);
}

static void slots_come_back_in_order(void)
{
	dma_addr_t iova[SLOTS];
	unsigned int i, round;

	for (i = 0; i < SLOTS; i++) {
		iova[i] = map(0x8000 + i);
		CHECK(iova[i] == rio_iova(RIO_RING_WRITE, i, 0));
		CHECK(ring->table[i].first == 0x8000 + i);
		CHECK(ring->table[i].second == (100 | (u64)RIO_WRITE << 30 | VALID));
	}
	CHECK(map(0x9000) == DMA_MAPPING_ERROR && atomic64_read(&ring->full) == 1 && !writes);
	unmap(iova[2]);
	unmap(iova[0]);
	CHECK(map(0x9000) == iova[2] && map(0x9000) == iova[0]);
	CHECK(map(0x9000) == DMA_MAPPING_ERROR);

	/* The second unmap of a slot changes nothing. */
	unmap(iova[1]);
	i = atomic64_read(&ring->bad);
	CHECK(!rio_ring_unmap(&endpoint, iova[1]) && atomic64_read(&ring->bad) == i + 1);
	CHECK(free_count() == 1);

	unmap(iova[3]);
	unmap(iova[0]);
	unmap(iova[2]);
	for (round = 0; round < 1000; round++)
		unmap(map(0x8000));
	CHECK(free_count() == SLOTS);
}

/*
 * Unmaps by the operations that drivers call. The ring of the address counts, not the direction. An
 * unmap of another address changes nothing, and is reported.
 */
static void unmaps_of_drivers(void)
{
	struct rio_ring *other = &endpoint.rings[RIO_RING_READ];
	unsigned int before = writes, complaints = test_complaints;
	dma_addr_t iova[2] = { map(0x8000), map(0x9000) };
	long bad = atomic64_read(&ring->bad);

	CHECK(!rio_ring_init(&endpoint, RIO_RING_READ, SLOTS));
	cleared_count = 1;
	cleared[0] = rio_iova_slot(iova[0]);
	rio_ops.unmap_phys(&pdev.dev, iova[0], 100, DMA_FROM_DEVICE, 0);
	CHECK(writes == before + 1 && free_count() == SLOTS - 1);
	cleared[0] = rio_iova_slot(iova[1]);
	rio_ops.unmap_phys(&pdev.dev, iova[1], 100, DMA_TO_DEVICE, 0);
	CHECK(writes == before + 2 && free_count() == SLOTS && test_complaints == complaints);
	cleared_count = 0;

	rio_ops.unmap_phys(&pdev.dev, iova[1], 100, DMA_FROM_DEVICE, 0);
	rio_ops.unmap_phys(&pdev.dev, rio_iova(RIO_RING_WRITE, SLOTS, 0), 100, DMA_FROM_DEVICE, 0);
	CHECK(test_complaints == complaints + 2 && atomic64_read(&ring->bad) == bad + 2);
	/* The same slot of another ring. */
	iova[0] = map(0x8000);
	rio_ops.unmap_phys(&pdev.dev, rio_iova(RIO_RING_READ, rio_iova_slot(iova[0]), 0), 100,
			   DMA_FROM_DEVICE, 0);
	CHECK(test_complaints == complaints + 3 && atomic64_read(&other->bad) == 1);
	CHECK(ring->table[rio_iova_slot(iova[0])].second && writes == before + 2);
	unmap(iova[0]);
	cleared_count = 0;
	rio_ops.unmap_phys(&pdev.dev, rio_iova(RIO_RING_NONE, 0, 0), 100, DMA_FROM_DEVICE, 0);
	rio_ops.unmap_phys(&pdev.dev, rio_iova(RIO_RINGS, 0, 0), 100, DMA_FROM_DEVICE, 0);
	rio_ops.unmap_phys(&pdev.dev, DMA_MAPPING_ERROR, 100, DMA_TO_DEVICE, 0);
	CHECK(test_complaints == complaints + 6 && writes == before + 3);
	CHECK(free_count() == SLOTS && other->free_slots.tail - other->free_slots.head == SLOTS);

	/* Without an answer, the slot is lost. */
	absent = true;
	iova[0] = map(0x8000);
	rio_ops.unmap_phys(&pdev.dev, iova[0], 100, DMA_FROM_DEVICE, 0);
	absent = false;
	CHECK(test_complaints == complaints + 7 && atomic64_read(&ring->lost) == 1);
	CHECK(free_count() == SLOTS - 1);
	rio_slot_queue_put(&ring->free_slots, rio_iova_slot(iova[0]));
	atomic64_dec(&ring->lost);
	rio_ring_free(other);
}

/*
 * A device that needs low bits of addresses reaches the bytes from the last multiple of the
 * alignment to the buffer, and none behind the buffer.
 */
static void low_bits_of_addresses(void)
{
	static const struct {
		u32 mask;
		u64 buffer, from;
	} cases[] = {
		{ 0, 0x8fff, 0x8fff },
		{ 0x1ff, 0x8623, 0x8600 },
		{ 0xfff, 0x8123, 0x8000 },
		{ 0xfff, 0x8000, 0x8000 },
		{ 0xfff, 0x8fff, 0x8000 },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		u64 before = cases[i].buffer - cases[i].from;
		struct rio_entry *entry;
		dma_addr_t iova;

		pdev.dev.dma_parms->min_align_mask = cases[i].mask;
		iova = map(cases[i].buffer);
		entry = &ring->table[rio_iova_slot(iova)];
		CHECK(rio_iova_offset(iova) == before && entry->first == cases[i].from);
		CHECK((iova & cases[i].mask) == (cases[i].buffer & cases[i].mask));
		CHECK(rio_rpte_bytes(entry->second) == before + 100);
		unmap(iova);
	}
	pdev.dev.dma_parms->min_align_mask = 0;
}

/*
 * An untrusted device must not reach bytes before a buffer. If it needs low bits of addresses, it
 * gets no coherent memory either, so that its driver fails at once.
 */
static void low_bits_of_an_untrusted_device(void)
{
	unsigned int complaints = test_complaints;
	struct scatterlist list[2] = {};
	dma_addr_t iova;

	pdev.untrusted = true;
	iova = map(0x8123);
	CHECK(ring->table[rio_iova_slot(iova)].first == 0x8123);
	unmap(iova);
	unmap(rio_map_memory(&pdev.dev, 0x8000, 100, DMA_FROM_DEVICE, 0, NULL));
	pdev.dev.dma_parms->min_align_mask = 0xfff;
	unmap(map(0x8000));
	cleared_count = 0;
	CHECK(test_complaints == complaints && map(0x8123) == DMA_MAPPING_ERROR);
	CHECK(test_complaints == complaints + 1 && free_count() == SLOTS);
	CHECK(rio_map_memory(&pdev.dev, 0x8000, 100, DMA_FROM_DEVICE, 0, NULL) ==
	      DMA_MAPPING_ERROR);
	sg_init_one(&list[0], (void *)0x8000, 100);
	sg_init_one(&list[1], (void *)0x9001, 100);
	CHECK(rio_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(free_count() == SLOTS && test_complaints == complaints + 3);
	pdev.dev.dma_parms->min_align_mask = 0;
	pdev.untrusted = false;
}

/* One invalidation for a list, after all its entries are cleared. */
static void lists(void)
{
	struct scatterlist list[SLOTS + 1] = {};
	unsigned int before = writes;
	unsigned int i;

	for (i = 0; i <= SLOTS; i++)
		sg_init_one(&list[i], (void *)(uintptr_t)(0x8000 + 0x1000 * i), 100);
	CHECK(rio_ops.map_sg(&pdev.dev, list, SLOTS, DMA_FROM_DEVICE, 0) == SLOTS && !free_count());
	for (i = 0; i < SLOTS; i++) {
		cleared[i] = rio_iova_slot(sg_dma_address(&list[i]));
		CHECK(ring->table[cleared[i]].first == 0x8000 + 0x1000 * i);
	}
	cleared_count = SLOTS;
	rio_ops.unmap_sg(&pdev.dev, list, SLOTS, DMA_FROM_DEVICE, 0);
	CHECK(writes == before + 1 && free_count() == SLOTS);
	for (i = 0; i < SLOTS; i++)
		CHECK(place_of(cleared[i]) == (int)i);

	/* An entry that is named twice is unmapped once. */
	CHECK(rio_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == 2);
	list[1].dma_address = list[0].dma_address;
	cleared_count = 0;
	rio_ops.unmap_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0);
	CHECK(free_count() == SLOTS - 1 && writes == before + 2);
	for (i = 0; !ring->table[i].second; i++)
		;
	unmap(rio_iova(RIO_RING_WRITE, i, 0));

	/* Only a full ring is worth a retry. What is mapped before the failure is unmapped. */
	before = writes;
	cleared_count = 0;
	CHECK(rio_ops.map_sg(&pdev.dev, list, SLOTS + 1, DMA_FROM_DEVICE, 0) == -EINVAL);
	list[1].length = 0;
	CHECK(rio_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == -EINVAL);
	list[1].length = 1 << 30;
	CHECK(rio_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == -EINVAL);
	list[1].length = 100;
	test_peer = 0x9000;
	CHECK(rio_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == -EREMOTEIO);
	CHECK(map(0x9000) == DMA_MAPPING_ERROR && free_count() == SLOTS);
	test_peer = 0;
	CHECK(writes == before + 3);
	map(0x8000);
	CHECK(rio_ops.map_sg(&pdev.dev, list, SLOTS, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(free_count() == SLOTS - 1);
	for (i = 0; !ring->table[i].second; i++)
		;
	unmap(rio_iova(RIO_RING_WRITE, i, 0));
	CHECK(free_count() == SLOTS);
}

/* A driver unbinds and leaves two buffers: they are not reached, and their slots are not reused. */
static void slots_that_a_driver_leaves(void)
{
	dma_addr_t left[2] = { map(0x8000), map(0x9000) }, other;
	unsigned int before = writes;

	unmap(map(0xa000));
	cleared_count = 2;
	cleared[0] = rio_iova_slot(left[0]);
	cleared[1] = rio_iova_slot(left[1]);
	CHECK(rio_ring_unbind(ring) == 2 && writes == before + 2);
	CHECK(atomic64_read(&ring->orphans) == 2 && free_count() == SLOTS - 2);
	CHECK(!rio_ring_unbind(ring) && writes == before + 2);
	other = map(0xb000);
	map(0xb000);
	CHECK(map(0xb000) == DMA_MAPPING_ERROR);
	/* A late unmap concerns no buffer of the next driver. */
	unmap(left[0]);
	CHECK(!rio_ring_unmap(&endpoint, left[0]) && atomic64_read(&ring->orphans) == 1);
	CHECK(rio_iova_slot(map(0xc000)) == rio_iova_slot(left[0]));
	unmap(left[0]);
	unmap(other);
	unmap(left[1]);
	CHECK(!atomic64_read(&ring->orphans));
	cleared_count = 0;
	rio_ring_unbind(ring);
}

/* Without an answer, the device may still reach the buffer. */
static void an_absent_iommu(void)
{
	unsigned int before;
	dma_addr_t iova;

	rio_ring_free(ring);
	memset(ring, 0, sizeof(*ring));
	CHECK(!rio_ring_init(&endpoint, RIO_RING_WRITE, SLOTS));
	absent = true;
	before = free_count();
	iova = map(0x8000);
	cleared[0] = rio_iova_slot(iova);
	cleared_count = 1;
	CHECK(!rio_ring_unmap(&endpoint, iova) && atomic64_read(&ring->lost) == 1);
	CHECK(free_count() == before - 1);
	are_not_free();
	absent = false;
	cleared_count = 0;
}

int main(void)
{
	memcpy((void *)&endpoint.core.ops, &rio_ops, sizeof(rio_ops));
	CHECK(!rio_ring_init(&endpoint, RIO_RING_WRITE, SLOTS));
	unmaps_of_what_is_not_mapped();
	slots_come_back_in_order();
	unmaps_of_drivers();
	low_bits_of_addresses();
	low_bits_of_an_untrusted_device();
	lists();
	slots_that_a_driver_leaves();
	an_absent_iommu();
	rio_ring_free(ring);
	puts("all as it should be");
	return 0;
}
