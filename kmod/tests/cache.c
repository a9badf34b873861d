// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs cache.c and evict.c in user space, with the environment of host.c: residency and limit of
 * the cache (crates/pviommu/vectors/cache.txt), room for maps, and mappings left by a driver. With
 * as_published=1 the device gets the accesses that the PVIOMMU paper's cache allows; with
 * as_published=0 it does not.
 */
#include "host.c"
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
		CHECK(endpoint->kept == 3 && !pvi.queue.requests);
	}
	/* A map in the other direction does not reuse it. */
	CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) != one);
	CHECK(map(0, PAGE_SIZE, DMA_TO_DEVICE) == one);
	CHECK(endpoint->kept == 2);
	pvi.queue.requests = 0;
	pvi.cycle = cycle;
	pvi_cache_expire(endpoint, cycle);
	CHECK(endpoint->kept == 1 && endpoint->expired == 1 && pvi.queue.requests == 1);
	pvi_cache_expire(endpoint, cycle + 1);
	CHECK(endpoint->kept == 0 && endpoint->expired == 2 && pvi.queue.requests == 2);
	/* Mappings in use stay. A driver that never unmaps them leaves them behind. */
	CHECK(endpoint->live == 3 && host.mapped_count == 3);
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
	CHECK(endpoint->kept == 64 && endpoint->kept_pages == 64 && !endpoint->trim.queued);
	pvi.queue.requests = 0;
	one = map(64 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(pvi.queue.requests == 1 && endpoint->full == 1 && endpoint->kept == 64);
	unmap(one);
	CHECK(pvi.queue.requests == 2 && !device_writes(one, 'a') && endpoint->kept == 64);
	/* The worker evicts the oldest sixteenth with one request. */
	work();
	CHECK(pvi.queue.requests == 3 && endpoint->kept == 60 && endpoint->forced == 4);
	CHECK(map(0, PAGE_SIZE, DMA_FROM_DEVICE) && endpoint->hits == 0);
	CHECK(map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE) && endpoint->hits == 1);
	end();

	/* The limit counts pages, in use or unused. */
	begin_with_queue("pages of the limit", true, 64);
	pvi_cache_pages = 64;
	one = map(0, 40 * PAGE_SIZE, DMA_FROM_DEVICE);
	two = map(40 * PAGE_SIZE, 25 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(endpoint->cached_pages == 40 && endpoint->full == 1 && !endpoint->trim.queued);
	unmap(two);
	CHECK(host.mapped_count == 40 && !endpoint->kept);
	two = map(40 * PAGE_SIZE, 24 * PAGE_SIZE, DMA_FROM_DEVICE);
	unmap(one);
	unmap(two);
	CHECK(endpoint->kept_pages == 64 && host.mapped_count == 64);
	/* The oldest mapping is evicted even if it exceeds a sixteenth alone. */
	one = map(80 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	work();
	CHECK(endpoint->kept_pages == 24 && host.mapped_count == 25);
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
	CHECK(endpoint->kept == 4000);
	host.room = 4000;
	pvi.queue.requests = 0;
	test_most_steps = 0;
	test_atomic = true;
	begun = test_now_us;
	one = map(4000 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR && pvi.queue.requests == 3);
	CHECK(endpoint->kept == 4000 - PVI_ROOM_PAGES && test_now_us - begun < 1000);
	CHECK(test_most_steps <= PVI_ROOM_PAGES);
	unmap(one);
	test_atomic = false;
	work();
	CHECK(endpoint->kept == 4001 - PVI_ROOM_PAGES - 1024 && test_naps == 0);
	end();

	/* A map that needs more room than one request makes fails, and the worker continues. */
	begin_with_queue("no room for so much", true, 64);
	keep(2000, 1);
	host.room = 2000;
	pvi.queue.requests = 0;
	one = map(4096 * PAGE_SIZE, 200 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(one == DMA_MAPPING_ERROR && endpoint->kept == 2000 - PVI_ROOM_PAGES);
	CHECK(pvi.queue.requests <= 6 && endpoint->failures == 1 && !endpoint->lost);
	/* A list makes room once, not for each of its entries. */
	host.room = 100;
	pvi.queue.requests = 0;
	fill(list, 8, PAGE_SIZE);
	for (one = 0; one < 8; one++)
		list[one].memory = buffers + (5000 + one) * PAGE_SIZE;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 8, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(pvi.queue.requests == 3 && endpoint->kept == 2000 - 2 * PVI_ROOM_PAGES);
	work();
	CHECK(!endpoint->kept);
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
	CHECK(endpoint->kept == 1000 - PVI_ROOM_PAGES);
	unmap(one);
	pvi.queue.requests = 0;
	/* Its first entry would fit then, and the second would need as much again. */
	fill(list, 3, 200 * PAGE_SIZE);
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 3, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(pvi.queue.requests == 1 && !endpoint->live);
	CHECK(endpoint->kept == 1001 - 2 * PVI_ROOM_PAGES);
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
	CHECK(endpoint->kept + endpoint->full == 300 && longest <= 8);
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
		CHECK(!host.mapped_count && !endpoint->live && endpoint->orphans == 3);
		CHECK(test_complaints == 1 && endpoint->lost == 0);
		/* The next driver, and a late unmap. */
		next = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
		CHECK(next != left && next != shared && next != address);
		CHECK(endpoint->hits == (cached ? 1 : 0));
		unmap(left);
		CHECK(device_writes(next, 'a') && endpoint->orphans == 2);
		unmap(shared);
		if (cached) {
			CHECK(endpoint->orphans == 2);
			unmap(shared + 64);
		}
		pvi_ops.free(&pdev.dev, PAGE_SIZE, memory, address, 0);
		CHECK(!endpoint->orphans && !pages_lent && test_complaints == 1);
		CHECK(device_writes(next, 'a') && endpoint->live == 1);
		/* Their addresses are free now, and a second unmap finds no mapping. */
		CHECK(map(16 * PAGE_SIZE, 3 * PAGE_SIZE, DMA_TO_DEVICE) == left);
		unmap(next);
		unmap(left);
		unmap(address);
		CHECK(endpoint->failures == 1);
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
		CHECK(endpoint->lost == 3 && !endpoint->orphans && !endpoint->live);
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
	CHECK(!endpoint->orphans && !host.mapped_count && !endpoint->live);
	CHECK(map(0, 3 * PAGE_SIZE, DMA_FROM_DEVICE) == left);
	end();
}

/* A buffer for device reads, in a page that the device has written before (A28). */
static void kept_for_the_other_direction(bool as_published)
{
	dma_addr_t one, two;

	begin_with_queue("kept for the other direction", true, 64);
	pvi_as_published = as_published;
	one = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	unmap(one);
	buffers[8] = 'a';
	two = map(8, 64, DMA_TO_DEVICE);
	CHECK(device_writes(two, 'b') == as_published);
	CHECK(buffers[8] == (as_published ? 'b' : 'a'));
	CHECK(leads(two, virt_to_phys(buffers) + 8, 64, DMA_TO_DEVICE) == !as_published);
	CHECK((one + 8 == two) == as_published && endpoint->hits == as_published);
	unmap(two);
	CHECK(!endpoint->live && endpoint->kept == (as_published ? 1 : 2) && !test_complaints);
	end();
}

/* A buffer of two pages, one of which is mapped, followed by another buffer's page (A28). */
static void kept_for_another_length(bool as_published)
{
	dma_addr_t one, other, two;

	begin_with_queue("kept for another length", true, 64);
	pvi_as_published = as_published;
	one = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	other = map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(other == one + PAGE_SIZE);
	unmap(one);
	buffers[PAGE_SIZE] = 'a';
	buffers[4 * PAGE_SIZE] = 'a';
	two = map(0, 2 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(device_writes(two + PAGE_SIZE, 'b'));
	CHECK(buffers[PAGE_SIZE] == (as_published ? 'a' : 'b'));
	CHECK(buffers[4 * PAGE_SIZE] == (as_published ? 'b' : 'a'));
	unmap(two);
	/*
	 * The longer mapping does not serve a shorter buffer either, because it would expose more.
	 */
	CHECK((map(0, PAGE_SIZE, DMA_FROM_DEVICE) == two) == as_published);
	unmap(one);
	unmap(other);
	CHECK(!endpoint->live && !test_complaints);
	end();
}

/* Two buffers in a page, one of which is unmapped (A29). */
static void two_users(bool as_published)
{
	dma_addr_t one, two, other;

	begin_with_queue("two users", true, 64);
	pvi_as_published = as_published;
	one = map(0, 64, DMA_FROM_DEVICE);
	two = map(64, 64, DMA_FROM_DEVICE);
	CHECK(two == one + 64 && endpoint->live == 1);
	unmap(one);
	CHECK(endpoint->live == !as_published && endpoint->kept == as_published);
	pvi_cache_expire(endpoint, pvi_cycles + 1);
	/* The device loses access to a buffer in use. */
	CHECK(device_writes(two, 'a') == !as_published);
	/*
	 * The device then reaches another buffer by its address, until the driver unmaps that as
	 * well.
	 */
	buffers[4 * PAGE_SIZE + 64] = 'a';
	other = map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK((other == one) == as_published && device_writes(two, 'b'));
	CHECK(buffers[4 * PAGE_SIZE + 64] == (as_published ? 'b' : 'a'));
	unmap(two);
	pvi_cache_evict_unused(endpoint);
	CHECK(device_writes(other, 'c') == !as_published);
	/* An unmap without a mapping is ignored. */
	unmap(other);
	CHECK(!endpoint->live && !endpoint->failures && !test_complaints);
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
	bool as_published = false;

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
	do {
		kept_for_the_other_direction(as_published);
		kept_for_another_length(as_published);
		two_users(as_published);
		as_published = !as_published;
	} while (as_published);
	vectors(argv[1]);
	room_from_a_slow_host();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
