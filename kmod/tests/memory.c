// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the operations for coherent memory in user space, with the environment of host.c, where the
 * kernel has few contiguous pages.
 */
#include "host.c"

/* Returns true if each page is at its address. */
static bool leads_paged(dma_addr_t address, unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (!leads(address + i * PAGE_SIZE, (phys_addr_t)(uintptr_t)range.pages[i],
			   PAGE_SIZE, DMA_BIDIRECTIONAL))
			return false;
	return true;
}

/* Pages that are not contiguous have consecutive addresses, and are freed after their unmap. */
static void memory_of_single_pages(void)
{
	struct vm_area_struct vma = { .vm_start = 0x10000, .vm_pgoff = 1 };
	struct sg_table table;
	dma_addr_t address;
	void *memory;

	begin_with_queue("memory of single pages", true, 64);
	contiguous_bytes = PAGE_SIZE;
	memory = pvi_ops.alloc(&pdev.dev, 1000 * PAGE_SIZE - 8, &address, 0, 0);
	CHECK(memory && memory == range.memory && range.count == 1000 && pages_lent == 1000);
	CHECK(host.mapped_count == 1000 && leads_paged(address, 1000) && COUNTS->live == 1);
	CHECK(!pvi_ops.mmap(&pdev.dev, &vma, memory, address, 1000 * PAGE_SIZE, 0));
	CHECK(range.inserted == 2);
	vma.vm_pgoff = 999;
	CHECK(pvi_ops.mmap(&pdev.dev, &vma, memory, address, 1000 * PAGE_SIZE, 0) == -ENXIO);
	CHECK(!pvi_ops.get_sgtable(&pdev.dev, &table, memory, address, 1000 * PAGE_SIZE, 0));
	CHECK(range.in_table == 1000);
	pvi_ops.free(&pdev.dev, 1000 * PAGE_SIZE - 8, memory, address, 0);
	CHECK(!host.mapped_count && !pages_lent && !COUNTS->kept && !range.memory);

	/* The host has no room for the second request: the first one is undone. */
	host.room = 600;
	CHECK(!pvi_ops.alloc(&pdev.dev, 1000 * PAGE_SIZE, &address, 0, 0));
	CHECK(!host.mapped_count && !pages_lent && !range.memory);
	host.room = 0;
	/* The caller demands contiguous memory. */
	CHECK(!pvi_ops.alloc(&pdev.dev, 2 * PAGE_SIZE, &address, 0, DMA_ATTR_FORCE_CONTIGUOUS));
	CHECK(!host.mapped_count && !pages_lent && !range.memory);
	/* Where the caller must not sleep, only contiguous memory is possible. */
	test_atomic = true;
	CHECK(!pvi_ops.alloc(&pdev.dev, 2 * PAGE_SIZE, &address, 0, 0) && !pages_lent);
	memory = pvi_ops.alloc(&pdev.dev, PAGE_SIZE, &address, 0, 0);
	CHECK(memory && !range.memory);
	pvi_ops.free(&pdev.dev, PAGE_SIZE, memory, address, 0);
	test_atomic = false;
	/* The number of pages has 32 bits: 1 of the first size is left, 0 of the last. */
	CHECK(!pvi_ops.alloc(&pdev.dev, (1UL << 44) + PAGE_SIZE, &address, 0, 0) && !pages_lent);
	CHECK(!pvi_ops.alloc(&pdev.dev, ~0UL - 100, &address, 0, 0) && !pages_lent);
	/* More than the allocator of pages can give at once. */
	contiguous_bytes = ~0UL;
	memory = pvi_ops.alloc(&pdev.dev, 2048 * PAGE_SIZE, &address, 0, 0);
	CHECK(memory && range.count == 2048 && leads_paged(address, 2048));
	/* The host does not unmap it, so it is not freed. */
	host.refuse_after = 1;
	host.refuse_with = PVI_FAILED;
	pvi_ops.free(&pdev.dev, 2048 * PAGE_SIZE, memory, address, 0);
	CHECK(range.memory && pages_lent == 2048 && COUNTS->lost == 2048);
	kvfree(range.pages);
	free(range.memory);
	range.memory = NULL;
	end();
}

static void masks_and_sizes(void)
{
	begin_with_queue("masks and sizes", false, 64);
	CHECK(pvi_ops.get_required_mask(&pdev.dev) == DMA_BIT_MASK(32));
	pvi.giova_first = 0xf0000000;
	CHECK(pvi_ops.get_required_mask(&pdev.dev) == DMA_BIT_MASK(33));
	pvi.giova_first = 1ULL << 40;
	CHECK(pvi_ops.get_required_mask(&pdev.dev) == DMA_BIT_MASK(41));
	CHECK(!pvi_ops.dma_supported(&pdev.dev, DMA_BIT_MASK(40)));
	CHECK(pvi_ops.dma_supported(&pdev.dev, DMA_BIT_MASK(41)));
	CHECK(pvi_ops.opt_mapping_size() == 128 << 10);
	CHECK(pvi_ops.max_mapping_size(&pdev.dev) > pvi_ops.opt_mapping_size());
	end();
}

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	if (!buffers)
		return 2;
	memory_of_single_pages();
	masks_and_sizes();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
