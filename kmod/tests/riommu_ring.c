// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs riommu_ring.c in user space (kernel.h), against an IOMMU that checks each invalidation: the
 * slot's entry is cleared before it, and the slot is not free before it is complete.
 */
#define __iomem
#define irqreturn_t int
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
/* There is one CPU. */
#define smp_wmb() ((void)0)
/* Counted: one before each invalidation. */
#define wmb() (barriers++)
#define xchg(at, value) __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST)
#define kvmalloc_array(count, bytes, gfp) test_array(count, bytes, gfp)
#define writeq(word, to) test_write(word, (u8 *)(to) - (u8 *)NULL)
#define readl(from) test_read((u8 *)(from) - (u8 *)NULL)

static unsigned int barriers;
#include "../riommu.h"

static void test_write(u64 word, u64 offset);
static u32 test_read(u64 offset);
static void *test_array(size_t count, size_t bytes, gfp_t gfp);

#include "../riommu_ring.c"

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #what);             \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define SLOTS 4
#define DEVICE 0x20
#define VALID 0x100000000ULL

u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps;
/* Registers at address 0. */
static struct rio rio;
static struct rio_endpoint endpoint = { .rio = &rio, .id = DEVICE };
static struct rio_ring *ring = &endpoint.rings[RIO_RING_WRITE];
static unsigned int writes, reads;
static bool absent;
/* The slot whose unmap is in progress. */
static u32 slot;

void *test_alloc(size_t bytes)
{
	return calloc(1, bytes);
}

void test_free(void *memory)
{
	free(memory);
}

static void *test_array(size_t count, size_t bytes, gfp_t gfp)
{
	return calloc(count, bytes);
}

void *alloc_pages_exact(size_t bytes, gfp_t gfp)
{
	return calloc(1, bytes);
}

void free_pages_exact(void *memory, size_t bytes)
{
	free(memory);
}

static void is_not_free(void)
{
	u32 i;

	for (i = 0; i < ring->free_count; i++)
		CHECK(ring->free[(ring->free_first + i) % SLOTS] != slot);
}

static void test_write(u64 word, u64 offset)
{
	CHECK(offset == RIO_REG_INV && word == rio_inv_ring(DEVICE, RIO_RING_WRITE));
	CHECK(!ring->lock.held && barriers > writes && !ring->table[slot].second);
	is_not_free();
	writes++;
}

static u32 test_read(u64 offset)
{
	CHECK(offset == RIO_REG_STS && reads + 1 == writes);
	is_not_free();
	reads++;
	return absent ? U32_MAX : 0;
}

static dma_addr_t map(u64 buffer)
{
	return rio_ring_map(ring, buffer, 100, 0);
}

static void unmap(dma_addr_t iova)
{
	slot = rio_iova_slot(iova);
	CHECK(rio_ring_unmap(&endpoint, iova));
	/* An invalidation, and the read that waits for it. */
	CHECK(reads == writes && reads == ring->unmaps && reads == ring->invalidations);
}

int main(void)
{
	dma_addr_t iova[SLOTS], bad[] = {
		rio_iova(RIO_RING_NONE, 0, 0),
		rio_iova(RIO_RINGS, 0, 0),
		rio_iova(0xffff, 0, 0),
		rio_iova(RIO_RING_WRITE, SLOTS, 0),
		DMA_MAPPING_ERROR,
	};
	unsigned int i, round;

	CHECK(!rio_ring_init(ring, RIO_RING_WRITE, SLOTS));
	for (i = 0; i < ARRAY_SIZE(bad); i++)
		CHECK(!rio_ring_unmap(&endpoint, bad[i]));
	for (i = 0; i < SLOTS; i++) {
		iova[i] = map(0x8000 + i);
		CHECK(iova[i] == rio_iova(RIO_RING_WRITE, i, 0));
		CHECK(ring->table[i].first == 0x8000 + i);
		CHECK(ring->table[i].second == (100 | (u64)RIO_WRITE << 30 | VALID));
	}
	CHECK(map(0x9000) == DMA_MAPPING_ERROR && ring->full == 1 && !writes);

	/* Slots come back in the order of their unmaps. */
	unmap(iova[2]);
	unmap(iova[0]);
	CHECK(map(0x9000) == iova[2] && map(0x9000) == iova[0]);
	CHECK(map(0x9000) == DMA_MAPPING_ERROR);

	/* The second unmap of a slot changes nothing. */
	unmap(iova[1]);
	i = ring->bad;
	CHECK(!rio_ring_unmap(&endpoint, iova[1]) && ring->bad == i + 1);
	CHECK(ring->free_count == 1);

	unmap(iova[3]);
	unmap(iova[0]);
	unmap(iova[2]);
	for (round = 0; round < 1000; round++)
		unmap(map(0x8000));
	CHECK(ring->free_count == SLOTS);
	/* The offset is that of the first byte of the buffer in the slot. */
	CHECK(rio_ring_map(ring, 0x8000, 0x200, 0x123) % 0x1000 == 0x123);
	/* Without an answer, the device may still reach the buffer. */
	absent = true;
	i = ring->free_count;
	iova[0] = map(0x8000);
	slot = rio_iova_slot(iova[0]);
	CHECK(!rio_ring_unmap(&endpoint, iova[0]) && ring->lost == 1);
	CHECK(ring->free_count == i - 1);
	is_not_free();
	rio_ring_free(ring);
	puts("all as it should be");
	return 0;
}
