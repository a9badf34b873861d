// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs cache.c, evict.c, ops.c and queue.c in user space, with the environment of host.c, while
 * another CPU holds locks: callers on different shards do not wait for each other, and a caller
 * does not wait for the lock of the queue.
 */
#include "host.c"

/* Another CPU has the lock of the queue: it collects the answer of this caller. */
static void another_cpu_answers(void)
{
	struct pvi_slot *slot;
	unsigned int bytes;

	host_answers_all();
	slot = virtqueue_get_buf(NULL, &bytes);
	slot->sent->err = pvi_error(slot->status);
	slot->sent->slot = NULL;
	slot->sent = NULL;
	pvi_put_slot(&pvi.queue, slot);
}

/* It keeps the lock for some polls of this caller. */
static void another_cpu_takes_the_queue(void)
{
	pvi.queue.lock.held = true;
	if (test_refused_locks < 3)
		on_wait = another_cpu_takes_the_queue;
	else
		another_cpu_answers();
}

/* A caller whose answer another CPU collects does not take the lock, and does not wait for it. */
static void callers_poll_without_the_lock(void)
{
	dma_addr_t one;

	begin_with_queue("an answer that another CPU collects", false, 64);
	host.prompt = false;
	test_other_cpu = true;
	test_refused_locks = 0;
	on_wait = another_cpu_takes_the_queue;
	one = map(0, PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR && test_refused_locks == 3 && pvi.queue.lock.held);
	pvi.queue.lock.held = false;
	test_other_cpu = false;
	host.prompt = true;
	unmap(one);
	end();
}

/*
 * While another CPU holds the locks of all other shards, a map and its unmap complete. Without a
 * cache a map needs one lock of an endpoint, with it the two of a mapping.
 */
static void shards_are_independent(void)
{
	unsigned int cached, i, page, done = 0;
	u64 mine;

	test_cpus = 16;
	for (cached = 0; cached < 2; cached++) {
		begin_with_queue("shards", cached, 64);
		CHECK(endpoint->shard_count == 16);
		for (page = 0; page < 64; page++) {
			struct pvi_shard *giova_shard, *page_shard;
			dma_addr_t one = map(page * PAGE_SIZE, 8, DMA_FROM_DEVICE);

			/* A driver gets the same address again, so its shard is known. */
			unmap(one);
			mine = virt_to_phys(buffers) + page * PAGE_SIZE;
			giova_shard = pvi_shard_of(endpoint, pvi_giova_index(endpoint, one));
			page_shard = pvi_shard_of(endpoint, pvi_page_index(endpoint, mine, 1,
									   DMA_FROM_DEVICE));
			for (i = 0; i < endpoint->shard_count; i++) {
				struct pvi_shard *shard = &endpoint->shards[i];

				shard->giova_lock.held = shard != giova_shard;
				shard->page_lock.held = !cached || shard != page_shard;
			}
			/* A lock that is taken twice ends the program. */
			test_other_cpu = true;
			CHECK(map(page * PAGE_SIZE, 8, DMA_FROM_DEVICE) == one);
			unmap(one);
			test_other_cpu = false;
			for (i = 0; i < endpoint->shard_count; i++) {
				endpoint->shards[i].giova_lock.held = false;
				endpoint->shards[i].page_lock.held = false;
			}
			done++;
		}
		end();
	}
	CHECK(done == 128);
	test_cpus = 1;
}

/*
 * Maps and unmaps 512 pages, with 16 shards or one. Returns the chance, in thousandths, that
 * sections of two CPUs that do so at random times need the same lock of the endpoint.
 */
static unsigned int chance_to_meet(unsigned int shards, bool cached)
{
	u64 squares = 0, all = 0;
	unsigned int i;

	test_cpus = shards;
	begin_with_queue("chance to meet", cached, 64);
	for (i = 0; i < 512; i++)
		(void)map((u64)i * PAGE_SIZE, 8, DMA_FROM_DEVICE);
	for (i = 0; i < 512; i++)
		unmap(((u64)i + 1) << PAGE_SHIFT);
	for (i = 0; i < endpoint->shard_count; i++) {
		u64 giovas = endpoint->shards[i].giova_lock.taken;
		u64 pages = endpoint->shards[i].page_lock.taken;

		squares += giovas * giovas + pages * pages;
		all += giovas + pages;
	}
	CHECK(!COUNTS->live);
	end();
	test_cpus = 1;
	return squares * 1000 / (all * all);
}

/* Three times as many locks as with one lock for all, but two CPUs rarely need the same one. */
static void cpus_rarely_meet(void)
{
	CHECK(chance_to_meet(1, false) == 1000);
	fprintf(stderr, "of 1000 pairs of sections meet: %u with a cache, %u without\n",
		chance_to_meet(16, true), chance_to_meet(16, false));
	CHECK(chance_to_meet(16, true) < 50 && chance_to_meet(16, false) < 80);
}

/* Room and expiry with several shards: everything expires, and maps take turns with the shards. */
static void shards_make_room_and_expire(void)
{
	unsigned int i, emptied = 0;
	u64 kept;

	test_cpus = 4;
	begin_with_queue("room of shards", true, 64);
	for (i = 0; i < 1000; i++)
		unmap(map((u64)i * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE));
	CHECK(COUNTS->kept == 1000 && CACHED_PAGES == 1000);
	for (i = 0; i < 4; i++) {
		struct pvi_poll_timeout timeout = {};

		kept = COUNTS->kept;
		CHECK(pvi_make_room(endpoint, &timeout));
		CHECK(COUNTS->kept == kept - PVI_ROOM_PAGES);
	}
	for (i = 0; i < 4; i++)
		emptied += list_empty(&endpoint->shards[i].unused);
	CHECK(!emptied);
	pvi_cache_evict_share(endpoint);
	CHECK(!COUNTS->kept || COUNTS->forced > 4 * PVI_ROOM_PAGES);
	kept = COUNTS->kept;
	pvi.cycle = pvi_cycles + 1;
	pvi.queue.requests = 0;
	pvi_cache_expire(endpoint, pvi.cycle);
	CHECK(!COUNTS->kept && COUNTS->expired == kept && !host.mapped_count);
	CHECK(pvi.queue.requests <= 1 + kept / pvi.pages_max);
	end();
	test_cpus = 1;
}

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	if (!buffers)
		return 2;
	callers_poll_without_the_lock();
	shards_are_independent();
	cpus_rarely_meet();
	shards_make_room_and_expire();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
