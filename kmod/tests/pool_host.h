/* SPDX-License-Identifier: GPL-2.0-only */
/* A pool of eight chunks, for three CPUs. */
#include "pool_kernel.h"

#define CHUNKS 8
/* Chunks are not in the order of their addresses, and have gaps between them. */
#define ADDRESS(i) ((dma_addr_t)((i) ^ 5) * 2 * POOL_CHUNK_BYTES + 0x40000000)
/* ADDRESS(2) is the highest address. */
#define LAST (ADDRESS(2) + POOL_CHUNK_BYTES - 1)

static struct pool_cpu cpus[TEST_CPUS];
static struct pool_chunk *test_index[POOL_CHUNKS_MAX];
static struct pool_chunk chunks[CHUNKS];
static struct pool pool = { .cpus = cpus, .index = test_index };
static struct device dev = { .ops = &pool.ops };
static u64 test_seed = 1;

/* Another pool for a smaller mask: the tests have none. */
int pool_move(struct pool *one, u64 mask)
{
	return -EBUSY;
}

static u32 test_random(void)
{
	test_seed = test_seed * 6364136223846793005ULL + 1442695040888963407ULL;
	return test_seed >> 33;
}

/* All slots are free, and in the chunks. */
static void pool_restart(void)
{
	pool_slots_init(&pool);
}

static void pool_start(void)
{
	int i;

	pool.chunks = chunks;
	pool.chunk_count = CHUNKS;
	pool.last = LAST;
	for (i = 0; i < CHUNKS; i++) {
		chunks[i].memory = aligned_alloc(4096, POOL_CHUNK_BYTES);
		chunks[i].slots = calloc(POOL_SLOTS, sizeof(struct pool_slot));
		chunks[i].address = ADDRESS(i);
	}
	pool_slots_init(&pool);
}

static void pool_stop(void)
{
	int i;

	for (i = 0; i < CHUNKS; i++) {
		free(chunks[i].memory);
		free(chunks[i].slots);
	}
}

/* Slots that a CPU keeps. */
static int cached_slots(int cpu)
{
	int count = 0, class;

	for (class = 0; class < (int)POOL_CLASSES; class++)
		count += cpus[cpu].caches[class].count;
	return count;
}

/* Bytes that all CPUs may keep. */
static u64 cacheable_bytes(void)
{
	u64 bytes = 0;
	int cpu, class;

	for (cpu = 0; cpu < TEST_CPUS; cpu++) {
		for (class = 0; class < (int)POOL_CLASSES; class++) {
			CHECK(cpus[cpu].caches[class].count <= cpus[cpu].caches[class].limit);
			bytes += (u64)cpus[cpu].caches[class].limit << (class + POOL_SLOT_SHIFT);
		}
	}
	return bytes;
}
