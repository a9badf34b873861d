// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs cache.c and evict.c in user space, with the environment of host.c: residency and limit of
 * the cache (crates/pviommu/vectors/cache.txt), room for maps, mappings left by a driver, and
 * accesses that only the PVIOMMU paper's cache permits (attacks.c).
 */
#define AS_PUBLISHED false
#include "host.c"
#include "attacks.c"
#include "cache_vectors.c"

static void cycles(void)
{
	dma_addr_t one, two, later, held;
	u64 cycle;

	begin_with_queue("cycles", true, 64);
	pvi.cycle = 7;
	one = map(0, PAGE_SIZE, DMA_TO_DEVICE);
	two = map(PAGE_SIZE, PAGE_SIZE, DMA_TO_DEVICE);
	later = map(3 * PAGE_SIZE, PAGE_SIZE, DMA_TO_DEVICE);
	held = map(2 * PAGE_SIZE, PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(map(2 * PAGE_SIZE + 64, 64, DMA_TO_DEVICE) == held + 64);
	unmap(held + 64);
	unmap(one);
	unmap(two);
	pvi.queue.requests = 0;
	for (cycle = 8; cycle <= 7 + pvi_cycles; cycle++) {
		pvi.cycle = cycle;
		pvi_cache_expire(endpoint, cycle);
		if (cycle == 8)
			unmap(later);
		CHECK(COUNTS->kept == 3 && !pvi.queue.requests);
	}
	/* A map in the other direction does not reuse it. */
	CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) != one);
	CHECK(map(0, PAGE_SIZE, DMA_TO_DEVICE) == one);
	CHECK(COUNTS->kept == 2);
	pvi.queue.requests = 0;
	pvi.cycle = cycle;
	pvi_cache_expire(endpoint, cycle);
	CHECK(COUNTS->kept == 1 && COUNTS->expired == 1 && pvi.queue.requests == 1);
	pvi_cache_expire(endpoint, cycle + 1);
	CHECK(COUNTS->kept == 0 && COUNTS->expired == 2 && pvi.queue.requests == 2);
	/* Mappings in use stay. A driver that never unmaps them leaves them behind. */
	CHECK(COUNTS->live == 3 && host.mapped_count == 3);
	end();
	CHECK(test_complaints == 1 && !host.mapped_count);
}

/* Maps and unmaps `count` pages, `apart` pages from each other, so that the cache keeps them. */
static void keep(unsigned int count, unsigned int apart)
{
	unsigned int i;

	for (i = 0; i < count; i++) {
		dma_addr_t one = map((u64)i * apart * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);

		CHECK(one != DMA_MAPPING_ERROR);
		unmap(one);
	}
}

/*
 * The cache is full. A further mapping is unmapped with its last user, and no map waits for more
 * than its own request. The worker makes room.
 */
static void as_many_as_the_limit(void)
{
	dma_addr_t one, two;

	begin_with_queue("as many as the limit", true, 64);
	pvi_cache_pages = 64;
	keep(64, 1);
	CHECK(COUNTS->kept == 64 && COUNTS->kept_pages == 64 && !endpoint->trim.queued);
	pvi.queue.requests = 0;
	one = map(64 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(pvi.queue.requests == 1 && COUNTS->full == 1 && COUNTS->kept == 64);
	unmap(one);
	CHECK(pvi.queue.requests == 2 && !device_writes(one, 'a') && COUNTS->kept == 64);
	/* The worker evicts the oldest sixteenth with one request. */
	work();
	CHECK(pvi.queue.requests == 3 && COUNTS->kept == 60 && COUNTS->forced == 4);
	CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) && COUNTS->hits == 0);
	CHECK(map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE) && COUNTS->hits == 1);
	end();

	/* The limit counts pages, in use or unused. */
	begin_with_queue("pages of the limit", true, 64);
	pvi_cache_pages = 64;
	one = map(0, 40 * PAGE_SIZE, DMA_FROM_DEVICE);
	two = map(40 * PAGE_SIZE, 25 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(CACHED_PAGES == 40 && COUNTS->full == 1 && !endpoint->trim.queued);
	unmap(two);
	CHECK(host.mapped_count == 40 && !COUNTS->kept);
	two = map(40 * PAGE_SIZE, 24 * PAGE_SIZE, DMA_FROM_DEVICE);
	unmap(one);
	unmap(two);
	CHECK(COUNTS->kept_pages == 64 && host.mapped_count == 64);
	/* The oldest mapping is evicted even if it exceeds a sixteenth alone. */
	one = map(80 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	work();
	CHECK(COUNTS->kept_pages == 24 && host.mapped_count == 25);
	unmap(one);
	end();
}

/* The review's proof (K2): thousands are unused, and one map finds no room in the host. */
static void no_room_in_the_host(void)
{
	struct scatterlist list[8];
	dma_addr_t one;
	u64 begun;

	begin_with_queue("no room, thousands kept", true, 64);
	pvi_cache_pages = 16384;
	keep(4000, 1);
	CHECK(COUNTS->kept == 4000);
	host.room = 4000;
	pvi.queue.requests = 0;
	test_most_steps = 0;
	test_atomic = true;
	begun = test_now_us;
	one = map(4000 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR && pvi.queue.requests == 3);
	CHECK(COUNTS->kept == 4000 - PVI_ROOM_PAGES && test_now_us - begun < 1000);
	CHECK(test_most_steps <= PVI_ROOM_PAGES);
	unmap(one);
	test_atomic = false;
	work();
	CHECK(COUNTS->kept == 4001 - PVI_ROOM_PAGES - 1024 && test_naps == 0);
	end();

	/* A map that needs more room than one request makes fails, and the worker continues. */
	begin_with_queue("no room for so much", true, 64);
	keep(2000, 1);
	host.room = 2000;
	pvi.queue.requests = 0;
	one = map(4096 * PAGE_SIZE, 200 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one == DMA_MAPPING_ERROR && COUNTS->kept == 2000 - PVI_ROOM_PAGES);
	CHECK(pvi.queue.requests <= 6 && COUNTS->failures == 1 && !COUNTS->lost);
	/* A list makes room once, not for each of its entries. */
	host.room = 100;
	pvi.queue.requests = 0;
	fill(list, 8, PAGE_SIZE);
	for (one = 0; one < 8; one++)
		list[one].memory = buffers + (5000 + one) * PAGE_SIZE;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 8, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(pvi.queue.requests == 3 && COUNTS->kept == 2000 - 2 * PVI_ROOM_PAGES);
	work();
	CHECK(!COUNTS->kept);
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 8, DMA_FROM_DEVICE, 0) == 8);
	pvi_ops.unmap_sg(&pdev.dev, list, 8, DMA_FROM_DEVICE, 0);
	end();
}

/* No addresses are left. A map evicts as much as one request allows, and the worker more. */
static void no_addresses_left(void)
{
	struct scatterlist list[3];
	dma_addr_t one;

	begin_with_queue("no addresses left", true, 64);
	pdev.dev.bus_dma_limit = ((u64)1001 << PAGE_SHIFT) - 1;
	keep(1000, 1);
	pvi.queue.requests = 0;
	one = map(2000 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR && pvi.queue.requests == 2);
	CHECK(COUNTS->kept == 1000 - PVI_ROOM_PAGES);
	unmap(one);
	pvi.queue.requests = 0;
	/* Its first entry would fit then, and the second would need as much again. */
	fill(list, 3, 200 * PAGE_SIZE);
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 3, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(pvi.queue.requests == 1 && !COUNTS->live);
	CHECK(COUNTS->kept == 1001 - 2 * PVI_ROOM_PAGES);
	work();
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 3, DMA_FROM_DEVICE, 0) == 3);
	pvi_ops.unmap_sg(&pdev.dev, list, 3, DMA_FROM_DEVICE, 0);
	pdev.dev.bus_dma_limit = 0;
	end();
}

/* Mappings of one page with many lengths do not share a bucket. */
static void lengths_of_one_page(void)
{
	unsigned int i, longest = 0;

	begin_with_queue("lengths of one page", true, 64);
	for (i = 0; i < 300; i++)
		unmap(map(0, (1 + i) * PAGE_SIZE, DMA_TO_DEVICE));
	for (i = 0; i < 1u << endpoint->table_bits; i++) {
		struct pvi_mapping *mapping;
		unsigned int length = 0;

		hlist_for_each_entry(mapping, &endpoint->by_page[i], by_page)
			length++;
		longest = max(longest, length);
	}
	CHECK(COUNTS->kept + COUNTS->full == 300 && longest <= 8);
	CHECK(1u << endpoint->table_bits >= pvi_cache_pages / 2);
	end();
}

/*
 * A driver unbinds and leaves mappings (K3). They are unmapped, their addresses are not reused, and
 * its late unmaps do not affect the next driver's mappings.
 */
static void left_by_a_driver(void)
{
	dma_addr_t left, shared, next, address;
	int cached, refused;
	char *memory;

	for (cached = 0; cached < 2; cached++) {
		begin_with_queue("left by a driver", cached, 64);
		left = map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE);
		shared = map(8 * PAGE_SIZE, 64, DMA_FROM_DEVICE);
		if (cached)
			CHECK(map(8 * PAGE_SIZE + 64, 64, DMA_FROM_DEVICE) == shared + 64);
		memory = pvi_ops.alloc(&pdev.dev, PAGE_SIZE, &address, 0, 0);
		pvi_cache_unbind(endpoint);
		CHECK(!host.mapped_count && !COUNTS->live && ORPHANS == 3);
		CHECK(test_complaints == 1 && COUNTS->lost == 0);
		/* The next driver, and a late unmap. */
		next = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
		CHECK(next != left && next != shared && next != address);
		CHECK(COUNTS->hits == (cached ? 1 : 0));
		unmap(left);
		CHECK(device_writes(next, 'a') && ORPHANS == 2);
		unmap(shared);
		if (cached) {
			CHECK(ORPHANS == 2);
			unmap(shared + 64);
		}
		pvi_ops.free(&pdev.dev, PAGE_SIZE, memory, address, 0);
		CHECK(!ORPHANS && !pages_lent && test_complaints == 1);
		CHECK(device_writes(next, 'a') && COUNTS->live == 1);
		/* Their addresses are free now, and a second unmap finds no mapping. */
		CHECK(map(16 * PAGE_SIZE, 3 * PAGE_SIZE, DMA_TO_DEVICE) == left);
		unmap(next);
		unmap(left);
		unmap(address);
		CHECK(COUNTS->failures == 1);
		end();
	}

	/* The host refuses to unmap them: the addresses are never reused. */
	for (refused = 0; refused < 2; refused++) {
		begin_with_queue("left by a driver, and refused", true, 64);
		left = map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE);
		host.prompt = refused;
		host.refuse_after = 1;
		host.refuse_with = PVI_FAILED;
		pvi_cache_unbind(endpoint);
		CHECK(COUNTS->lost == 3 && !ORPHANS && !COUNTS->live);
		unmap(left);
		if (refused)
			CHECK(map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE) > left);
		end();
	}
}

static dma_addr_t unmapped_meanwhile;

static void host_answers_after_a_late_unmap(void)
{
	unmap(unmapped_meanwhile);
	host.prompt = true;
	host_answers_all();
}

/* The driver unmaps during the request to the host. Only one of them frees the addresses. */
static void left_and_unmapped_meanwhile(void)
{
	dma_addr_t left;

	begin_with_queue("left and unmapped during the request", true, 64);
	left = map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE);
	unmapped_meanwhile = left;
	host.prompt = false;
	on_wait = host_answers_after_a_late_unmap;
	pvi_cache_unbind(endpoint);
	CHECK(!ORPHANS && !host.mapped_count && !COUNTS->live);
	CHECK(map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE) == left);
	end();
}

/*
 * The host answers each request late and has no room: a map takes ten seconds in total, including
 * the request for room.
 */
static void room_from_a_slow_host(void)
{
	dma_addr_t one;
	u64 begun;

	begin_with_queue("room from a slow host", true, 64);
	keep(4, 1);
	host.room = 4;
	host.prompt = false;
	host.delay_us = 6000000;
	begun = test_now_us;
	one = map(8 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one == DMA_MAPPING_ERROR && test_now_us - begun < 10100000);
	host.delay_us = 0;
	end();
}

int main(int argc, char **argv)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	if (argc != 2 || !buffers) {
		fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
		return 2;
	}
	cycles();
	as_many_as_the_limit();
	no_room_in_the_host();
	no_addresses_left();
	lengths_of_one_page();
	left_by_a_driver();
	left_and_unmapped_meanwhile();
	attacks();
	vectors(argv[1]);
	room_from_a_slow_host();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
