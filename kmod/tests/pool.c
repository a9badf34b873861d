// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs pool_slots.c and pool_ops.c in user space (kernel.h): what a device can read through its
 * pool, what reaches the driver, and that no two mappings share a slot. tests/pool_host.h has the
 * CPUs and the memory.
 */
#include "pool_host.h"

/* The shadow of a device address: what the device reads and writes. */
static u8 *device(dma_addr_t address)
{
	struct pool_slot *slot = pool_find(&pool, address);

	return slot->shadow + (u32)address - slot->address;
}

static dma_addr_t map(void *buffer, size_t size, enum dma_data_direction direction,
		      unsigned long attrs)
{
	return pool_ops.map_phys(&dev, virt_to_phys(buffer), size, direction, attrs);
}

static void unmap(dma_addr_t address, size_t size, enum dma_data_direction direction,
		  unsigned long attrs)
{
	pool_ops.unmap_phys(&dev, address, size, direction, attrs);
}

static bool is_all(const u8 *at, size_t size, u8 value)
{
	while (size--) {
		if (at[size] != value)
			return false;
	}
	return true;
}

static u8 buffer[POOL_CHUNK_BYTES + 4096] __aligned(4096);

/* A slot that was full of a secret is reused for a buffer of each direction. */
static void contents_stay_apart(void)
{
	dma_addr_t address, before;

	memset(buffer, 's', 4096);
	before = map(buffer, 2048, DMA_TO_DEVICE, 0);
	CHECK(is_all(device(before), 2048, 's'));
	unmap(before, 2048, DMA_TO_DEVICE, 0);
	/* The device reads neither the driver's old bytes nor the secret, and writes 3 bytes. */
	memset(buffer, 'd', 4096);
	address = map(buffer, 2000, DMA_FROM_DEVICE, 0);
	CHECK(address == before && is_all(device(address), 2000, 0));
	memcpy(device(address), "new", 3);
	unmap(address, 2000, DMA_FROM_DEVICE, 0);
	CHECK(!memcmp(buffer, "new", 3) && is_all(buffer + 3, 1997, 0));
	CHECK(is_all(buffer + 2000, 2096, 'd'));
	/* Too late: the buffer does not change. */
	memset(device(address), 'x', 512);
	CHECK(!memcmp(buffer, "new", 3));

	/* With preserve=1 the unwritten bytes stay. */
	pool_preserve = true;
	memset(buffer, 'd', 4096);
	address = map(buffer, 2000, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	memcpy(device(address), "new", 3);
	unmap(address, 2000, DMA_FROM_DEVICE, 0);
	CHECK(!memcmp(buffer, "new", 3) && is_all(buffer + 3, 1997, 'd'));
	pool_preserve = false;

	/* A map copies, or zeroes, also if the driver asks to skip that. */
	memset(device(address), 's', 2048);
	memset(buffer, 0, 2048);
	address = map(buffer, 2048, DMA_BIDIRECTIONAL, DMA_ATTR_SKIP_CPU_SYNC);
	CHECK(is_all(device(address), 2048, 0));
	memset(device(address), 's', 2048);
	unmap(address, 2048, DMA_BIDIRECTIONAL, DMA_ATTR_SKIP_CPU_SYNC);
	memset(buffer, 'd', 2048);
	address = map(buffer, 2048, DMA_TO_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	CHECK(is_all(device(address), 2048, 'd'));
	memset(device(address), 's', 2048);
	unmap(address, 2048, DMA_TO_DEVICE, 0);
	CHECK(is_all(buffer, 2048, 'd'));
	address = map(buffer, 2048, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	CHECK(is_all(device(address), 2048, 0));
	unmap(address, 2048, DMA_FROM_DEVICE, 0);
	CHECK(is_all(buffer, 2048, 0));
	/* Without a copy at the unmap, the buffer stays. */
	address = map(buffer, 2048, DMA_FROM_DEVICE, 0);
	memset(device(address), 'x', 2048);
	unmap(address, 2048, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	CHECK(is_all(buffer, 2048, 0));
	address = map(buffer, 2048, DMA_TO_DEVICE, 0);
	memset(device(address), 'x', 2048);
	unmap(address, 2048, DMA_TO_DEVICE, 0);
	CHECK(is_all(buffer, 2048, 0));
}

static void parts_are_synchronised(void)
{
	dma_addr_t address;

	memset(buffer, 'd', 4096);
	address = map(buffer, 1500, DMA_FROM_DEVICE, 0);
	memset(device(address), 'w', 1500);
	pool_ops.sync_single_for_cpu(&dev, address + 100, 200, DMA_FROM_DEVICE);
	CHECK(is_all(buffer, 100, 'd') && is_all(buffer + 100, 200, 'w') && buffer[300] == 'd');
	/* A buffer that only the device writes is not copied to it. */
	pool_ops.sync_single_for_device(&dev, address, 1500, DMA_FROM_DEVICE);
	CHECK(is_all(device(address), 1500, 'w'));
	CHECK(!cpus[0].bad);
	pool_ops.sync_single_for_cpu(&dev, address + 1400, 101, DMA_FROM_DEVICE);
	pool_ops.sync_single_for_cpu(&dev, address + 1501, 0, DMA_FROM_DEVICE);
	CHECK(cpus[0].bad == 2 && buffer[1400] == 'd');
	unmap(address, 1500, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);

	address = map(buffer, 1500, DMA_BIDIRECTIONAL, 0);
	memset(buffer, 'n', 1500);
	pool_ops.sync_single_for_device(&dev, address + 1000, 10, DMA_BIDIRECTIONAL);
	CHECK(device(address)[999] != 'n' && is_all(device(address) + 1000, 10, 'n'));
	CHECK(device(address)[1010] != 'n');
	pool_ops.sync_single_for_cpu(&dev, address, 10, DMA_TO_DEVICE);
	CHECK(is_all(buffer, 10, 'n'));
	unmap(address, 1500, DMA_BIDIRECTIONAL, DMA_ATTR_SKIP_CPU_SYNC);
	pool_ops.sync_single_for_cpu(&dev, address, 10, DMA_BIDIRECTIONAL);
	CHECK(cpus[0].bad == 3);
	cpus[0].bad = 0;
}

/* Leaves earlier contents in a slot. */
static dma_addr_t map_and_unmap(void *at, size_t size)
{
	dma_addr_t address = map(at, size, DMA_TO_DEVICE, 0);

	memset(device(address), 'e', size);
	unmap(address, size, DMA_TO_DEVICE, 0);
	return address;
}

/* What is not mapped, or not at this address, is refused and changes nothing. */
static void misuse_is_refused(void)
{
	dma_addr_t earlier = map_and_unmap(buffer, 8000), coherent;
	void *memory = pool_ops.alloc(&dev, 5000, &coherent, 0, 0);
	dma_addr_t address = map(buffer + 1, 5000, DMA_TO_DEVICE, 0);
	dma_addr_t bad[] = {
		0, 1, address + 1, address + 4096, ~0ULL, 1ULL << 32 | address, LAST + 1,
	};
	u64 unmaps = pool_unmaps(&pool);
	struct vm_area_struct area = {};
	size_t i;

	CHECK(coherent == earlier);
	CHECK(memory == device(coherent) && is_all(memory, 8192, 0) && coherent % 8192 == 0);
	/* It has two pages, which user space may map, and none behind them. */
	CHECK(!pool_ops.mmap(&dev, &area, memory, coherent, 5000, 0));
	area.vm_pgoff = 1;
	CHECK(pool_ops.mmap(&dev, &area, memory, coherent, 5000, 0) == -ENXIO);
	for (i = 0; i < ARRAY_SIZE(bad); i++) {
		unmap(bad[i], 5000, DMA_BIDIRECTIONAL, 0);
		pool_ops.free(&dev, 5000, memory, bad[i], 0);
	}
	unmap(coherent, 5000, DMA_BIDIRECTIONAL, 0);
	pool_ops.free(&dev, 5000, memory, address, 0);
	CHECK(cpus[0].bad == 2 * ARRAY_SIZE(bad) + 2 && pool_unmaps(&pool) == unmaps);
	unmap(address, 5000, DMA_TO_DEVICE, 0);
	unmap(address, 5000, DMA_TO_DEVICE, 0);
	pool_ops.free(&dev, 5000, memory, coherent, 0);
	pool_ops.free(&dev, 5000, memory, coherent, 0);
	CHECK(cpus[0].bad == 2 * ARRAY_SIZE(bad) + 4 && pool_unmaps(&pool) == unmaps + 2);
	cpus[0].bad = 0;

	CHECK(map(buffer, 0, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	CHECK(map(buffer, POOL_CHUNK_BYTES + 1, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	CHECK(map(buffer, -100, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	CHECK(map(buffer, (1UL << 32) + 1, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	dev.dma_parms->min_align_mask = 511;
	CHECK(map(buffer + 200, -100, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	dev.dma_parms->min_align_mask = 0;
	CHECK(map(buffer, 1, DMA_TO_DEVICE, DMA_ATTR_MMIO) == DMA_MAPPING_ERROR);
	CHECK(map(buffer, 1, DMA_TO_DEVICE, DMA_ATTR_REQUIRE_COHERENT) == DMA_MAPPING_ERROR);
	CHECK(!pool_ops.alloc(&dev, POOL_CHUNK_BYTES + 1, &coherent, 0, 0));
	CHECK(!pool_ops.alloc(&dev, 0, &coherent, 0, 0));
	CHECK(pool_live(&pool) == 0);
}

/* Drivers synchronise what dma_alloc_pages() returns. The device uses the same memory. */
static void coherent_memory_needs_no_copy(void)
{
	dma_addr_t address = map_and_unmap(buffer, 4096);
	struct page *page;
	u8 *memory;

	memset(buffer, 'b', 4096);
	page = pool_ops.alloc_pages_op(&dev, 4096, &address, DMA_BIDIRECTIONAL, 0);
	memory = page_address(page);
	CHECK(memory == device(address) && is_all(memory, 4096, 0));
	memset(memory, 'c', 4096);
	pool_ops.sync_single_for_device(&dev, address, 4096, DMA_BIDIRECTIONAL);
	pool_ops.sync_single_for_cpu(&dev, address + 4000, 10, DMA_FROM_DEVICE);
	CHECK(is_all(memory, 4096, 'c') && is_all(buffer, 4096, 'b') && !cpus[0].bad);
	pool_ops.free_pages(&dev, 4096, page, address, DMA_BIDIRECTIONAL);
	pool_ops.sync_single_for_cpu(&dev, address, 10, DMA_BIDIRECTIONAL);
	CHECK(cpus[0].bad == 1);
	cpus[0].bad = 0;
}

/* The bits of the mask are those of the buffer. */
static void low_bits_are_kept(void)
{
	static const u32 masks[] = { 0, 511, 4095, 0xffff };
	size_t i, offset;

	for (i = 0; i < ARRAY_SIZE(masks); i++) {
		dev.dma_parms->min_align_mask = masks[i];
		for (offset = 1; offset < 4096; offset += 509) {
			dma_addr_t address = map(buffer + offset, 3000, DMA_TO_DEVICE, 0), other;

			CHECK(!((address ^ virt_to_phys(buffer + offset)) & masks[i]));
			memset(buffer + offset, 'a' + i, 3000);
			pool_ops.sync_single_for_device(&dev, address, 3000, DMA_TO_DEVICE);
			CHECK(is_all(device(address), 3000, 'a' + i));
			other = map(buffer + offset, 1, DMA_TO_DEVICE, 0);
			CHECK(!((other ^ virt_to_phys(buffer + offset)) & masks[i]));
			unmap(other, 1, DMA_TO_DEVICE, 0);
			unmap(address, 3000, DMA_TO_DEVICE, 0);
		}
		CHECK(pool_ops.max_mapping_size(&dev) + masks[i] <= POOL_CHUNK_BYTES + 511);
	}
	/* The last of these does not fit behind its offset. */
	CHECK(map(buffer + 4095, POOL_CHUNK_BYTES, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	dev.dma_parms->min_align_mask = POOL_CHUNK_BYTES;
	CHECK(map(buffer, 1, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR);
	dev.dma_parms->min_align_mask = 0;
	CHECK(!cpus[0].bad && pool_live(&pool) == 0);
}

/* A list is mapped whole or not at all. */
static void lists(void)
{
	struct scatterlist list[CHUNKS + 1] = {};
	int i;

	for (i = 0; i < CHUNKS + 1; i++)
		sg_init_one(&list[i], buffer + i, 100 * i + 1);
	memset(buffer, 'l', sizeof(buffer));
	CHECK(pool_ops.map_sg(&dev, list, 3, DMA_BIDIRECTIONAL, 0) == 3);
	for (i = 0; i < 3; i++) {
		CHECK(sg_dma_len(&list[i]) == list[i].length);
		CHECK(is_all(device(sg_dma_address(&list[i])), list[i].length, 'l'));
		memset(device(sg_dma_address(&list[i])), 'm', list[i].length);
	}
	pool_ops.sync_sg_for_cpu(&dev, list, 3, DMA_BIDIRECTIONAL);
	CHECK(is_all(buffer, 203, 'm') && buffer[203] == 'l');
	memset(buffer, 'n', 300);
	pool_ops.sync_sg_for_device(&dev, list, 3, DMA_BIDIRECTIONAL);
	CHECK(is_all(device(sg_dma_address(&list[2])), 201, 'n'));
	pool_ops.unmap_sg(&dev, list, 3, DMA_BIDIRECTIONAL, 0);

	/* A shadow is not the driver's memory. A retry would fail, too. */
	CHECK(pool_ops.map_sg(&dev, list, 3, DMA_TO_DEVICE, DMA_ATTR_REQUIRE_COHERENT) == -EINVAL);

	/* Slots that a CPU keeps would hold chunks. */
	pool_restart();
	/* A retry may succeed, but not for an entry or a list larger than the pool. */
	for (i = 0; i < CHUNKS + 1; i++)
		sg_init_one(&list[i], buffer, POOL_CHUNK_BYTES);
	CHECK(pool_ops.map_sg(&dev, list, CHUNKS + 1, DMA_TO_DEVICE, 0) == -EINVAL);
	CHECK(pool_ops.map_sg(&dev, list, CHUNKS, DMA_TO_DEVICE, 0) == CHUNKS);
	CHECK(pool_ops.map_sg(&dev, list + CHUNKS, 1, DMA_TO_DEVICE, 0) == -ENOMEM);
	pool_ops.unmap_sg(&dev, list, CHUNKS, DMA_TO_DEVICE, 0);
	memset(buffer, 'k', sizeof(buffer));
	list[CHUNKS - 1].length++;
	CHECK(pool_ops.map_sg(&dev, list, CHUNKS, DMA_FROM_DEVICE, 0) == -EINVAL);
	list[0].length = 0;
	CHECK(pool_ops.map_sg(&dev, list, 1, DMA_TO_DEVICE, 0) == -EINVAL);
	test_boundary = 0xffff;
	list[0].length = 0x10001;
	CHECK(pool_ops.map_sg(&dev, list, 1, DMA_TO_DEVICE, 0) == -EINVAL);
	list[0].length = 0x10000;
	CHECK(pool_ops.map_sg(&dev, list, 1, DMA_FROM_DEVICE, 0) == 1);
	CHECK((sg_dma_address(list) ^ (sg_dma_address(list) + 0xffff)) < 0x10000);
	pool_ops.unmap_sg(&dev, list, 1, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	test_boundary = U32_MAX;

	pool_restart();
	/* A list that fails in its middle returns nothing to the driver's buffers. */
	for (i = 0; i < CHUNKS; i++)
		list[i].length = POOL_CHUNK_BYTES;
	list[CHUNKS].dma_address = map(buffer, 1, DMA_TO_DEVICE, 0);
	CHECK(pool_ops.map_sg(&dev, list, CHUNKS, DMA_FROM_DEVICE, 0) == -ENOMEM);
	CHECK(is_all(buffer, POOL_CHUNK_BYTES, 'k'));
	unmap(list[CHUNKS].dma_address, 1, DMA_TO_DEVICE, 0);
	CHECK(!cpus[0].bad && pool_live(&pool) == 0);
}

#define LIVE 6000

/* Random maps and unmaps on several CPUs, against a list of the ranges in use. */
static void slots_are_never_shared(void)
{
	static struct { dma_addr_t address; size_t size; u8 mark; } live[LIVE];
	u32 count = 0, round, failed = 0, i;

	for (round = 0; round < 200000; round++) {
		int before;

		test_cpu = test_random() % TEST_CPUS;
		before = cached_slots(test_cpu);
		if (count < LIVE && test_random() % 16 < (round / 20000 % 2 ? 9 : 6)) {
			size_t size = 1 + test_random() % (1U << test_random() % 19);

			memset(buffer, round, size);
			live[count].address = map(buffer, size, DMA_TO_DEVICE, 0);
			if (live[count].address == DMA_MAPPING_ERROR) {
				failed++;
				continue;
			}
			CHECK(live[count].address + size - 1 <= LAST);
			live[count].size = size;
			live[count++].mark = round;
		} else if (count) {
			i = test_random() % count;
			/* Another mapping in the same slot would have changed these. */
			CHECK(is_all(device(live[i].address), live[i].size, live[i].mark));
			unmap(live[i].address, live[i].size, DMA_TO_DEVICE, 0);
			live[i] = live[--count];
		}
		/* Each call moves few slots. */
		CHECK(abs(cached_slots(test_cpu) - before) <= POOL_CACHE_SLOTS / 2);
	}
	CHECK(failed > 100 && pool_live(&pool) == count);
	while (count--)
		unmap(live[count].address, live[count].size, DMA_TO_DEVICE, 0);
	for (i = 0; i < TEST_CPUS; i++)
		CHECK(!cpus[i].bad);
	test_cpu = 0;
	CHECK(pool_live(&pool) == 0);
	CHECK(cacheable_bytes() <= CHUNKS * POOL_CHUNK_BYTES / 4 && cacheable_bytes() > 0);
}

/* An empty pool fails a map, and the next one after an unmap succeeds. */
static void empty_pool_fails(void)
{
	dma_addr_t all[CHUNKS], more;
	u64 full = cpus[0].full;
	int i;

	for (i = 0; i < CHUNKS; i++)
		CHECK((all[i] = map(buffer, POOL_CHUNK_BYTES, DMA_TO_DEVICE, 0)) != ~0ULL);
	CHECK(map(buffer, 1, DMA_TO_DEVICE, 0) == DMA_MAPPING_ERROR && cpus[0].full == full + 1);
	unmap(all[3], POOL_CHUNK_BYTES, DMA_TO_DEVICE, 0);
	more = map(buffer, 1, DMA_TO_DEVICE, 0);
	CHECK(more != DMA_MAPPING_ERROR);
	unmap(more, 1, DMA_TO_DEVICE, 0);
	for (i = 0; i < CHUNKS; i++) {
		if (i != 3)
			unmap(all[i], POOL_CHUNK_BYTES, DMA_TO_DEVICE, 0);
	}
}

/* A slot of a full chunk can be taken again, while its other one is in use. */
static void full_chunks_return(void)
{
	dma_addr_t halves[2 * CHUNKS];
	int i;

	for (i = 0; i < 2 * CHUNKS; i++)
		CHECK((halves[i] = map(buffer, POOL_CHUNK_BYTES / 2, DMA_TO_DEVICE, 0)) != ~0ULL);
	unmap(halves[5], POOL_CHUNK_BYTES / 2, DMA_TO_DEVICE, 0);
	CHECK(map(buffer, POOL_CHUNK_BYTES / 2, DMA_TO_DEVICE, 0) == halves[5]);
	for (i = 0; i < 2 * CHUNKS; i++)
		unmap(halves[i], POOL_CHUNK_BYTES / 2, DMA_TO_DEVICE, 0);
}

/* The last unmap after an unbind copies, and queues the work that frees the pool. */
static void orphans_queue_the_release(void)
{
	dma_addr_t address = map(buffer, 10, DMA_FROM_DEVICE, 0);

	CHECK(!pool.release_work.queued);
	pool_slots_set_orphans(&pool, true);
	memset(device(address), 'o', 10);
	unmap(address, 10, DMA_FROM_DEVICE, 0);
	CHECK(is_all(buffer, 10, 'o') && pool.release_work.queued);
	pool_slots_set_orphans(&pool, false);
}

int main(void)
{
	pool_start();
	CHECK(pool_ops.dma_supported(&dev, LAST) && !pool_ops.dma_supported(&dev, LAST - 1));
	contents_stay_apart();
	parts_are_synchronised();
	misuse_is_refused();
	coherent_memory_needs_no_copy();
	low_bits_are_kept();
	pool_restart();
	lists();
	pool_restart();
	empty_pool_fails();
	pool_restart();
	full_chunks_return();
	orphans_queue_the_release();
	pool_restart();
	slots_are_never_shared();
	pool_stop();
	puts("all as it should be");
	return 0;
}
