/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Coherent memory; core_ops.h includes this file. Pages that the device may still reach are not
 * returned to the kernel.
 *
 * Memory is contiguous if the kernel has as many contiguous pages. Otherwise an engine that maps
 * pages (ENGINE_MAPS_PAGES) gets single pages, which are consecutive for the device and, through
 * vmap(), for the driver. An engine with shadows allocates coherent memory itself, in contiguous
 * pages.
 */
#ifndef CORE_MEMORY_H
#define CORE_MEMORY_H

#include <linux/slab.h>
#include <linux/vmalloc.h>

#ifndef ENGINE_HAS_SHADOWS
/* Allocates pages on the device's node. free_pages_exact() frees them. */
static void *core_alloc_exact(struct device *dev, size_t size, gfp_t gfp)
{
	unsigned int order = get_order(size);
	unsigned long first, used, end;
	struct page *page;

	if (order > MAX_PAGE_ORDER)
		return NULL;
	page = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, order);
	if (!page)
		return NULL;
	split_page(page, order);
	first = (unsigned long)page_address(page);
	end = first + (PAGE_SIZE << order);
	for (used = first + PAGE_ALIGN(size); used < end; used += PAGE_SIZE)
		free_page(used);
	return (void *)first;
}

/* Maps contiguous memory, or frees it. */
static void *core_map_exact(struct device *dev, void *memory, size_t size, dma_addr_t *address,
			    unsigned long attrs)
{
	bool is_reached = false;

	*address = ENGINE(map_memory)(dev, virt_to_phys(memory), size, DMA_BIDIRECTIONAL, attrs,
				      &is_reached);
	if (*address != DMA_MAPPING_ERROR)
		return memory;
	if (!is_reached)
		free_pages_exact(memory, size);
	return NULL;
}

#ifdef ENGINE_MAPS_PAGES
/*
 * Fails where the caller must not sleep, and for sizes above 32 bits, as maps do. vfree() frees the
 * pages too.
 */
static void *core_alloc_paged(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
			      unsigned long attrs)
{
	unsigned int count = PAGE_ALIGN(size) >> PAGE_SHIFT;
	bool is_reached = false;
	struct page **pages;
	void *memory = NULL;
	unsigned int i;

	if (size > U32_MAX || !gfpflags_allow_blocking(gfp))
		return NULL;
	pages = kvcalloc(count, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return NULL;
	for (i = 0; i < count; i++) {
		pages[i] = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, 0);
		if (!pages[i])
			break;
	}
	if (i == count)
		memory = vmap(pages, count, VM_MAP | VM_MAP_PUT_PAGES, PAGE_KERNEL);
	if (!memory) {
		while (i--)
			__free_pages(pages[i], 0);
		kvfree(pages);
		return NULL;
	}
	*address = ENGINE(map_paged)(dev, pages, count, attrs, &is_reached);
	if (*address != DMA_MAPPING_ERROR)
		return memory;
	if (!is_reached)
		vfree(memory);
	return NULL;
}

static void *core_alloc_coherent(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
				 unsigned long attrs)
{
	bool is_exact = size <= PAGE_SIZE || attrs & DMA_ATTR_FORCE_CONTIGUOUS;
	void *memory;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	/* Single pages cost less than compaction of memory. */
	memory = core_alloc_exact(dev, size, is_exact ? gfp : gfp | __GFP_NORETRY | __GFP_NOWARN);
	if (memory)
		return core_map_exact(dev, memory, size, address, attrs);
	if (attrs & DMA_ATTR_FORCE_CONTIGUOUS)
		return NULL;
	return core_alloc_paged(dev, size, address, gfp, attrs);
}
#else
static void *core_alloc_coherent(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
				 unsigned long attrs)
{
	void *memory;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	memory = core_alloc_exact(dev, size, gfp);
	return memory ? core_map_exact(dev, memory, size, address, attrs) : NULL;
}
#endif

static void core_free_coherent(struct device *dev, size_t size, void *memory, dma_addr_t address,
			       unsigned long attrs)
{
	if (!ENGINE(unmap_memory)(dev, address))
		return;
	if (is_vmalloc_addr(memory))
		vfree(memory);
	else
		free_pages_exact(memory, size);
}

static struct page *core_alloc_pages(struct device *dev, size_t size, dma_addr_t *address,
				     enum dma_data_direction direction, gfp_t gfp)
{
	struct page *page = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, get_order(size));
	bool is_reached = false;

	if (!page)
		return NULL;
	*address = ENGINE(map_memory)(dev, page_to_phys(page), size, direction, 0, &is_reached);
	if (*address != DMA_MAPPING_ERROR)
		return page;
	if (!is_reached)
		__free_pages(page, get_order(size));
	return NULL;
}

static void core_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t address,
			    enum dma_data_direction direction)
{
	if (ENGINE(unmap_memory)(dev, address))
		__free_pages(page, get_order(size));
}

#endif

static struct page *core_page_of(void *memory, unsigned long index)
{
	void *at = memory + (index << PAGE_SHIFT);

	return is_vmalloc_addr(memory) ? vmalloc_to_page(at) : virt_to_page(at);
}

static int core_mmap(struct device *dev, struct vm_area_struct *vma, void *memory,
		     dma_addr_t address, size_t size, unsigned long attrs)
{
	unsigned long pages = PAGE_ALIGN(size) >> PAGE_SHIFT;
	unsigned long i;
	int err = 0;

	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -ENXIO;
	if (!is_vmalloc_addr(memory))
		return remap_pfn_range(vma, vma->vm_start,
				       page_to_pfn(virt_to_page(memory)) + vma->vm_pgoff,
				       vma_pages(vma) << PAGE_SHIFT, vma->vm_page_prot);
	for (i = 0; i < vma_pages(vma) && !err; i++)
		err = vm_insert_page(vma, vma->vm_start + (i << PAGE_SHIFT),
				     core_page_of(memory, vma->vm_pgoff + i));
	return err;
}

/* Contiguous pages become one entry of the table. */
static int core_get_sgtable(struct device *dev, struct sg_table *table, void *memory,
			    dma_addr_t address, size_t size, unsigned long attrs)
{
	unsigned int count = PAGE_ALIGN(size) >> PAGE_SHIFT;
	struct page **pages = kvcalloc(count, sizeof(*pages), GFP_KERNEL);
	unsigned int i;
	int err;

	if (!pages)
		return -ENOMEM;
	for (i = 0; i < count; i++)
		pages[i] = core_page_of(memory, i);
	err = sg_alloc_table_from_pages(table, pages, count, 0, PAGE_ALIGN(size), GFP_KERNEL);
	kvfree(pages);
	return err;
}

#endif
