// SPDX-License-Identifier: GPL-2.0-only
/*
 * Accesses that the PVIOMMU paper's cache permits and ours does not (A28, A29): cache.c includes
 * this file with AS_PUBLISHED false, as_published.c with true.
 */

/* A buffer for device reads, in a page that the device has written before (A28). */
static void kept_for_the_other_direction(void)
{
	dma_addr_t one, two;

	begin_with_queue("kept for the other direction", true, 64);
	one = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	unmap(one);
	buffers[8] = 'a';
	two = map(8, 64, DMA_TO_DEVICE);
	CHECK(device_writes(two, 'b') == AS_PUBLISHED);
	CHECK(buffers[8] == (AS_PUBLISHED ? 'b' : 'a'));
	CHECK(leads(two, virt_to_phys(buffers) + 8, 64, DMA_TO_DEVICE) == !AS_PUBLISHED);
	CHECK((one + 8 == two) == AS_PUBLISHED && COUNTS->hits == AS_PUBLISHED);
	unmap(two);
	CHECK(!COUNTS->live && COUNTS->kept == (AS_PUBLISHED ? 1 : 2) && !test_complaints);
	end();
}

/* A buffer of two pages, one of which is mapped, followed by another buffer's page (A28). */
static void kept_for_another_length(void)
{
	dma_addr_t one, other, two;

	begin_with_queue("kept for another length", true, 64);
	one = map(0, PAGE_SIZE, DMA_FROM_DEVICE);
	other = map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(other == one + PAGE_SIZE);
	unmap(one);
	buffers[PAGE_SIZE] = 'a';
	buffers[4 * PAGE_SIZE] = 'a';
	two = map(0, 2 * PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK(device_writes(two + PAGE_SIZE, 'b'));
	CHECK(buffers[PAGE_SIZE] == (AS_PUBLISHED ? 'a' : 'b'));
	CHECK(buffers[4 * PAGE_SIZE] == (AS_PUBLISHED ? 'b' : 'a'));
	unmap(two);
	/*
	 * The longer mapping does not serve a shorter buffer either, because it would expose more.
	 */
	CHECK((map(0, PAGE_SIZE, DMA_FROM_DEVICE) == two) == AS_PUBLISHED);
	unmap(one);
	unmap(other);
	CHECK(!COUNTS->live && !test_complaints);
	end();
}

/* Two buffers in a page, one of which is unmapped (A29). */
static void two_users(void)
{
	dma_addr_t one, two, other;

	begin_with_queue("two users", true, 64);
	one = map(0, 64, DMA_FROM_DEVICE);
	two = map(64, 64, DMA_FROM_DEVICE);
	CHECK(two == one + 64 && COUNTS->live == 1);
	unmap(one);
	CHECK(COUNTS->live == !AS_PUBLISHED && COUNTS->kept == AS_PUBLISHED);
	pvi_cache_expire(endpoint, pvi_cycles + 1);
	/* The device loses access to a buffer in use. */
	CHECK(device_writes(two, 'a') == !AS_PUBLISHED);
	/*
	 * The device then reaches another buffer by its address, until the driver unmaps that as
	 * well.
	 */
	buffers[4 * PAGE_SIZE + 64] = 'a';
	other = map(4 * PAGE_SIZE, PAGE_SIZE, DMA_FROM_DEVICE);
	CHECK((other == one) == AS_PUBLISHED && device_writes(two, 'b'));
	CHECK(buffers[4 * PAGE_SIZE + 64] == (AS_PUBLISHED ? 'b' : 'a'));
	unmap(two);
	pvi_cache_evict_unused(endpoint);
	CHECK(device_writes(other, 'c') == !AS_PUBLISHED);
	/* An unmap without a mapping is ignored. */
	unmap(other);
	CHECK(!COUNTS->live && !COUNTS->failures && !test_complaints);
	end();
}

static void attacks(void)
{
	kept_for_the_other_direction();
	kept_for_another_length();
	two_users();
}
