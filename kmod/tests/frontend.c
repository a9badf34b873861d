// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs queue.c, cache.c, evict.c and ops.c in user space (kernel.h, host.c). The host answers at
 * once, late, never, or with a refusal. Interrupts arrive during waits.
 */
#include "host.c"

static void maps_and_unmaps(void)
{
	struct scatterlist list[200];
	dma_addr_t one, two;
	unsigned int i;
	u64 asked;
	int cached;

	for (cached = 0; cached < 2; cached++) {
		begin_with_queue("maps and unmaps", cached, 64);
		one = map(0x10, 100, DMA_TO_DEVICE);
		two = map(0x20, 3 * PAGE_SIZE, DMA_FROM_DEVICE);
		CHECK(leads(one, virt_to_phys(buffers) + 0x10, 100, DMA_TO_DEVICE));
		CHECK(leads(two, virt_to_phys(buffers) + 0x20, 3 * PAGE_SIZE, DMA_FROM_DEVICE));
		CHECK(pvi.queue.requests == 2 && COUNTS->live == 2);
		unmap(one);
		unmap(two);
		CHECK(host.mapped_count == (cached ? 5 : 0) && !COUNTS->live);
		CHECK(map(0x30, 8, DMA_TO_DEVICE) == (one & ~(PAGE_SIZE - 1)) + 0x30);
		CHECK(COUNTS->hits == (cached ? 1 : 0));
		unmap(one);

		/* A list takes one request and one kick, and so does its unmap. */
		fill(list, 60, PAGE_SIZE);
		pvi.queue.requests = 0;
		pvi.queue.kicks = 0;
		CHECK(pvi_ops.map_sg(&pdev.dev, list, 60, DMA_FROM_DEVICE, 0) == 60);
		for (i = 0; i < 60; i++)
			CHECK(leads(sg_dma_address(&list[i]), sg_phys(&list[i]), PAGE_SIZE,
				    DMA_FROM_DEVICE) && sg_dma_len(&list[i]) == PAGE_SIZE);
		CHECK(pvi.queue.requests == 1 && pvi.queue.kicks == 1);
		pvi_ops.unmap_sg(&pdev.dev, list, 60, DMA_FROM_DEVICE, 0);
		CHECK(pvi.queue.requests == (cached ? 1 : 2));
		if (cached) {
			CHECK(pvi_ops.map_sg(&pdev.dev, list, 60, DMA_FROM_DEVICE, 0) == 60);
			pvi_ops.unmap_sg(&pdev.dev, list, 60, DMA_FROM_DEVICE, 0);
			CHECK(pvi.queue.requests == 1 && COUNTS->hits == 61);
		}
		/* Pages that exceed a request take several requests with one kick. */
		pvi_cache_evict_unused(endpoint);
		pvi.queue.requests = 0;
		pvi.queue.kicks = 0;
		fill(list, 200, 8 * PAGE_SIZE);
		CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == 200);
		CHECK(pvi.queue.requests > 3 && pvi.queue.kicks <= pvi.queue.requests / 4);
		CHECK(host.mapped_count == 1600);
		asked = pvi.queue.requests;
		pvi_ops.unmap_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0);
		CHECK(COUNTS->live == 0 && test_complaints == 0 && nobody_waits());
		/* The large slot is free again. */
		pvi_cache_evict_unused(endpoint);
		pvi.queue.requests = 0;
		CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == 200);
		CHECK(pvi.queue.requests == asked);
		end();
	}
}

static void memory_that_is_shared(void)
{
	dma_addr_t address, other;
	struct page *page;
	char *memory;

	begin_with_queue("memory that is shared", true, 64);
	memory = pvi_ops.alloc(&pdev.dev, 5000, &address, 0, 0);
	CHECK(memory && leads(address, virt_to_phys(memory), 5000, DMA_BIDIRECTIONAL));
	pvi_ops.free(&pdev.dev, 5000, memory, address, 0);
	CHECK(!host.mapped_count && !pages_lent && !COUNTS->kept);
	/* The host has not unmapped it, so the memory is not freed. */
	memory = pvi_ops.alloc(&pdev.dev, 5000, &address, 0, 0);
	host.refuse_after = 1;
	host.refuse_with = PVI_FAILED;
	pvi_ops.free(&pdev.dev, 5000, memory, address, 0);
	CHECK(pages_lent == 1 && COUNTS->lost == 2);
	/* The memory is not freed either if the map was not answered. */
	host.prompt = false;
	CHECK(!pvi_ops.alloc(&pdev.dev, 5000, &address, 0, 0) && pages_lent == 2);
	CHECK(test_complaints == 3);
	host.broken = false;
	host_answers_all();
	CHECK(host.mapped_count == 4);
	end();

	begin_with_queue("memory that is shared, by pages", true, 64);
	host.prompt = false;
	CHECK(!pvi_ops.alloc_pages_op(&pdev.dev, PAGE_SIZE, &address, DMA_FROM_DEVICE, 0));
	CHECK(pages_lent == 1 && COUNTS->lost == 1);
	end();

	begin_with_queue("memory that is not unmapped, by pages", true, 64);
	page = pvi_ops.alloc_pages_op(&pdev.dev, PAGE_SIZE, &address, DMA_FROM_DEVICE, 0);
	CHECK(page);
	host.refuse_after = 1;
	host.refuse_with = PVI_FAILED;
	pvi_ops.free_pages(&pdev.dev, PAGE_SIZE, page, address, DMA_FROM_DEVICE);
	CHECK(pages_lent == 1 && COUNTS->lost == 1);
	end();

	begin_with_queue("memory within the mask", true, 64);
	pdev.dev.coherent_dma_mask = 0x1fff;
	memory = pvi_ops.alloc(&pdev.dev, PAGE_SIZE, &address, 0, 0);
	CHECK(memory && address == PAGE_SIZE);
	CHECK(!pvi_ops.alloc(&pdev.dev, PAGE_SIZE, &other, 0, 0) && pages_lent == 1);
	pvi_ops.free(&pdev.dev, PAGE_SIZE, memory, address, 0);
	end();

	begin_with_queue("memory that is refused", true, 64);
	host.refuse_after = 1;
	host.refuse_with = PVI_FAILED;
	CHECK(!pvi_ops.alloc(&pdev.dev, PAGE_SIZE, &address, 0, 0) && !pages_lent);
	end();
}

static void late_answers(void)
{
	struct scatterlist list[200];
	u64 begun = test_now_us;
	unsigned int asked;

	begin_with_queue("late answers", false, 64);
	host.prompt = false;
	CHECK(map(0, PAGE_SIZE, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	CHECK(test_now_us - begun >= 10000000 && test_now_us - begun < 10100000);
	CHECK(test_complaints == 2 && COUNTS->lost == 1 && host.asked_count == 1);
	CHECK(nobody_waits());
	/* No further request is sent, and maps fail at once without a log message. */
	begun = test_now_us;
	CHECK(map(0, PAGE_SIZE, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	CHECK(host.asked_count == 1 && test_now_us == begun && test_complaints == 2);
	/* The host answers later: no caller waits, and the slot's memory was not reused. */
	host.broken = false;
	host_answers();
	pvi_collect(&pvi.queue);
	CHECK(host.mapped_count == 1);
	end();

	begin_with_queue("late answers to several", false, 64);
	host.prompt = false;
	fill(list, 200, 8 * PAGE_SIZE);
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == -EIO);
	asked = host.asked_count;
	CHECK(asked > 3 && COUNTS->lost == 1600 && test_complaints == 2 && nobody_waits());
	host.broken = false;
	host_answers_all();
	pvi_collect(&pvi.queue);
	end();
}

static dma_addr_t of_interrupt;

static void host_answers_and_interrupt_maps(void)
{
	host_answers_all();
	host.prompt = true;
	of_interrupt = map(1 << 20, 40 * PAGE_SIZE, DMA_FROM_DEVICE);
}

/* An interrupted caller owns both slots, and the interrupt handler needs a slot. */
static void interrupted_while_all_slots_are_taken(void)
{
	struct scatterlist list[20];
	u64 begun = test_now_us;

	begin_with_queue("interrupted while all slots are taken", false, 2);
	host.prompt = false;
	on_wait = host_answers_and_interrupt_maps;
	fill(list, 20, 8 * PAGE_SIZE);
	pvi.pages_max = 64;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 20, DMA_TO_DEVICE, 0) == 20);
	CHECK(of_interrupt && of_interrupt != DMA_MAPPING_ERROR);
	CHECK(test_complaints == 0 && test_now_us - begun < 1000);
	CHECK(host.mapped_count == 200);
	pvi_ops.unmap_sg(&pdev.dev, list, 20, DMA_TO_DEVICE, 0);
	unmap(of_interrupt);
	CHECK(!host.mapped_count);
	end();
}

static void small_rings_and_little_memory(void)
{
	unsigned int chains, left;

	for (chains = 0; chains < 2; chains++) {
		begin("small rings", false, chains);
		CHECK(pvi_queue_init(&pvi, NULL) == -EINVAL);
		end();
	}
	for (left = 0; left < 10; left++) {
		begin("little memory", false, 8);
		allocations_left = left;
		if (pvi_queue_init(&pvi, NULL))
			CHECK(left < 9);
		allocations_left = ~0u;
		end();
	}
}

static void refusals(void)
{
	struct scatterlist list[200];
	dma_addr_t kept, other;

	begin_with_queue("refusals", false, 64);
	fill(list, 200, 8 * PAGE_SIZE);
	/* The host refuses the third of several requests: the others are undone. */
	host.refuse_after = 3;
	host.refuse_with = PVI_BAD_GPA;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == -EIO);
	CHECK(!host.mapped_count && !COUNTS->lost && COUNTS->failures == 1);
	CHECK(test_complaints == 1);
	/* The host refuses a request of the second group. */
	pvi.pages_max = 64;
	host.refuse_after = 12;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == -EIO);
	CHECK(!host.mapped_count && !COUNTS->lost);
	/* The host refuses the first of several unmaps: none of the addresses is reused. */
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == 200);
	host.refuse_after = 1;
	pvi_ops.unmap_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0);
	CHECK(COUNTS->lost == 1600 && host.mapped_count == 64);
	COUNTS->failures = 1;
	test_complaints = 1;
	/* DMA_ATTR_NO_WARN suppresses the log message. */
	host.refuse_after = 1;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 1, DMA_TO_DEVICE, DMA_ATTR_NO_WARN) == -EIO);
	CHECK(COUNTS->failures == 2 && test_complaints == 1);
	end();

	begin_with_queue("no status", false, 64);
	host.silent = true;
	CHECK(map(0, PAGE_SIZE, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	end();

	begin_with_queue("devices' memory", false, 64);
	CHECK(pvi_ops.map_phys(&pdev.dev, 0xfd000000, 8, DMA_TO_DEVICE, DMA_ATTR_MMIO) ==
	      DMA_MAPPING_ERROR);
	end();

	begin_with_queue("few addresses", true, 64);
	pdev.dev.mask = 0xffffff;
	pdev.dev.bus_dma_limit = 0x3fff;
	kept = map(0, 2 * PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(kept == PAGE_SIZE);
	unmap(kept);
	/* Evicting unused mappings makes room. */
	other = map(2 * PAGE_SIZE, 3 * PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(other == PAGE_SIZE && !COUNTS->kept);
	CHECK(map(8 * PAGE_SIZE, PAGE_SIZE, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	unmap(other);
	/* A mapping serves a device only if its limit covers the whole mapping. */
	pdev.dev.bus_dma_limit = 0x2fff;
	CHECK(map(2 * PAGE_SIZE, 3 * PAGE_SIZE, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	pdev.dev.mask = ~0ULL;
	pdev.dev.bus_dma_limit = 0;
	end();

	begin_with_queue("no room", true, 64);
	kept = map(0, PAGE_SIZE, DMA_TO_DEVICE);
	unmap(kept);
	host.refuse_after = 1;
	host.refuse_with = PVI_NO_ROOM;
	other = map(PAGE_SIZE, PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(other != DMA_MAPPING_ERROR && host.mapped_count == 1 && !COUNTS->kept);
	CHECK(!test_complaints);
	unmap(other);
	end();

	begin_with_queue("nothing to map", true, 64);
	CHECK(map(0, 0, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	kept = map(PAGE_SIZE + 8, 8, DMA_TO_DEVICE);
	fill(list, 2, 8);
	list[0].memory = buffers + PAGE_SIZE + 8;
	list[1].memory = buffers + PAGE_SIZE + 8;
	list[1].length = 0;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 2, DMA_TO_DEVICE, 0) < 0);
	unmap(kept);
	CHECK(!COUNTS->live && COUNTS->kept == 1);
	/* An unmap without a mapping, or a second unmap, has no effect. */
	unmap(0x123000);
	unmap(kept);
	CHECK(map(PAGE_SIZE + 8, 8, DMA_TO_DEVICE) == kept && COUNTS->live == 1);
	unmap(kept);
	CHECK(COUNTS->kept == 1 && host.mapped_count == 1);
	end();
}

/* A driver unmaps an entry of a list alone, and then the list: all other entries are unmapped. */
static void lists_with_an_entry_that_is_not_mapped(void)
{
	struct scatterlist list[4];
	unsigned int stray, i;
	int cached;

	for (cached = 0; cached < 2; cached++) {
		for (stray = 0; stray < 4; stray++) {
			begin_with_queue("a list with a stray entry", cached, 64);
			fill(list, 4, PAGE_SIZE);
			CHECK(pvi_ops.map_sg(&pdev.dev, list, 4, DMA_FROM_DEVICE, 0) == 4);
			unmap(sg_dma_address(&list[stray]));
			pvi_ops.unmap_sg(&pdev.dev, list, 4, DMA_FROM_DEVICE, 0);
			CHECK(!COUNTS->live && COUNTS->unmaps == 5);
			CHECK(COUNTS->failures == 1 && test_complaints == 1);
			pvi_cache_evict_unused(endpoint);
			for (i = 0; i < 4; i++)
				CHECK(!device_writes(sg_dma_address(&list[i]), 'a'));
			end();
		}
	}
}

static u64 interrupt_took;

static void interrupt_maps(void)
{
	u64 begun = test_now_us;

	of_interrupt = map(1 << 20, PAGE_SIZE, DMA_FROM_DEVICE);
	interrupt_took = test_now_us - begun;
}

/*
 * Another caller owns all slots, and the host answers each request at the last moment. Waiting for
 * a slot and for an answer takes ten seconds in total.
 */
static void waits_for_slots(void)
{
	struct scatterlist list[200];

	begin_with_queue("a slot from a host that is nearly late", false, 8);
	host.prompt = false;
	host.delay_us = 4000000;
	pvi.pages_max = 64;
	fill(list, 200, 8 * PAGE_SIZE);
	on_wait = interrupt_maps;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == -EIO);
	CHECK(of_interrupt == DMA_MAPPING_ERROR && READ_ONCE(pvi.queue.broken));
	CHECK(interrupt_took < 10100000);
	host.delay_us = 0;
	end();
}

/*
 * Callers in sleepable context sleep, others reschedule if they can. A call waits at most ten
 * seconds for the host.
 */
static void waits(void)
{
	struct scatterlist list[200];
	dma_addr_t one;
	u64 begun;

	begin_with_queue("a slow host", true, 64);
	host.prompt = false;
	host.delay_us = 100000;
	test_naps = 0;
	test_yields = 0;
	one = map(0, PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR && test_yields > 1000 && !test_naps);
	unmap(one);
	test_yields = 0;
	pvi_cache_evict_unused(endpoint);
	CHECK(!host.mapped_count && test_naps > 100 && test_yields < 10);
	test_atomic = true;
	one = map(0, PAGE_SIZE, DMA_TO_DEVICE);
	CHECK(one != DMA_MAPPING_ERROR);
	test_atomic = false;
	unmap(one);
	end();

	/* Each answer arrives at the last moment. */
	begin_with_queue("a host that is always nearly late", false, 64);
	host.prompt = false;
	host.delay_us = 9000000;
	pvi.pages_max = 64;
	fill(list, 200, 8 * PAGE_SIZE);
	begun = test_now_us;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 200, DMA_TO_DEVICE, 0) == -EIO);
	CHECK(test_now_us - begun < 10100000 && READ_ONCE(pvi.queue.broken));
	host.delay_us = 0;
	end();
}

/* Memory of another device is refused by every map operation. */
static void peers(void)
{
	struct scatterlist list[2];

	begin_with_queue("memory of another device", true, 64);
	test_peer = virt_to_phys(buffers) + PAGE_SIZE;
	CHECK(map(PAGE_SIZE + 8, 8, DMA_TO_DEVICE) == DMA_MAPPING_ERROR);
	fill(list, 2, 8);
	list[1].memory = buffers + PAGE_SIZE;
	CHECK(pvi_ops.map_sg(&pdev.dev, list, 2, DMA_TO_DEVICE, 0) == -EREMOTEIO);
	CHECK(!pvi.queue.requests && !host.mapped_count && !COUNTS->live);
	end();
}

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	if (!buffers)
		return 2;
	maps_and_unmaps();
	memory_that_is_shared();
	late_answers();
	interrupted_while_all_slots_are_taken();
	small_rings_and_little_memory();
	refusals();
	lists_with_an_entry_that_is_not_mapped();
	waits();
	waits_for_slots();
	peers();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
