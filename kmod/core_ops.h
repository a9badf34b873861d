/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The dma_map_ops that drivers call. Memory is coherent, so an engine needs the sync operations
 * only if devices access other memory than the driver's (ENGINE_HAS_SHADOWS).
 *
 * Include this in one file of a module, after the functions of its engine and `#define
 * ENGINE(name)`, which gives their names. Most are inlined, because drivers map for each packet.
 *
 *   map            maps a buffer; returns the address of its first byte, or DMA_MAPPING_ERROR
 *   unmap          on return the device no longer reaches the buffer, or as the mode permits
 *   map_list       maps the entries of a list; returns their number, or an error as
 *                  dma_map_sgtable() defines them
 *   unmap_list     the reverse, also for the first entries of a list
 *   map_memory     maps whole pages of coherent memory; if that fails, sets *@is_reached if the
 *                  device may reach them all the same
 *   map_paged      with ENGINE_MAPS_PAGES: the same for pages that are not contiguous
 *   unmap_memory   returns true if the device no longer reaches the pages
 *   alloc, free, sync_for_cpu, sync_for_device
 *                  with ENGINE_HAS_SHADOWS: coherent memory of the engine itself, in place of
 *                  map_memory and unmap_memory; copies of parts of a buffer
 *   dma_supported, required_mask, max_mapping_size
 *   opt_mapping_size
 *                  with ENGINE_MAPS_PAGES or ENGINE_HAS_SHADOWS
 *
 * ENGINE_REFUSES has the attributes of maps, besides DMA_ATTR_MMIO, that `map` does not see because
 * such a map fails.
 */
#ifndef CORE_OPS_H
#define CORE_OPS_H

#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include "core.h"

#ifndef ENGINE_REFUSES
#define ENGINE_REFUSES 0UL
#endif

#ifdef CORE_HAVE_MAP_PHYS
static dma_addr_t core_map_phys(struct device *dev, phys_addr_t phys, size_t size,
				enum dma_data_direction direction, unsigned long attrs)
{
	/* The IOMMU reaches only memory. Without the attribute, the address has a page. */
	if (attrs & (DMA_ATTR_MMIO | ENGINE_REFUSES) ||
	    core_is_peer(pfn_to_page(phys >> PAGE_SHIFT)))
		return DMA_MAPPING_ERROR;
	return ENGINE(map)(dev, phys, size, direction, attrs);
}

static void core_unmap_phys(struct device *dev, dma_addr_t address, size_t size,
			    enum dma_data_direction direction, unsigned long attrs)
{
	ENGINE(unmap)(dev, address, size, direction, attrs);
}
#else
static dma_addr_t core_map_page(struct device *dev, struct page *page, unsigned long offset,
				size_t size, enum dma_data_direction direction,
				unsigned long attrs)
{
	if (core_is_peer(page))
		return DMA_MAPPING_ERROR;
	return ENGINE(map)(dev, page_to_phys(page) + offset, size, direction, attrs);
}

static void core_unmap_page(struct device *dev, dma_addr_t address, size_t size,
			    enum dma_data_direction direction, unsigned long attrs)
{
	ENGINE(unmap)(dev, address, size, direction, attrs);
}
#endif

static int core_map_sg(struct device *dev, struct scatterlist *list, int nents,
		       enum dma_data_direction direction, unsigned long attrs)
{
	return ENGINE(map_list)(dev, list, nents, direction, attrs);
}

static void core_unmap_sg(struct device *dev, struct scatterlist *list, int nents,
			  enum dma_data_direction direction, unsigned long attrs)
{
	ENGINE(unmap_list)(dev, list, nents, direction, attrs);
}

#ifdef ENGINE_HAS_SHADOWS
#define core_alloc_coherent	ENGINE(alloc)
#define core_free_coherent	ENGINE(free)

static struct page *core_alloc_pages(struct device *dev, size_t size, dma_addr_t *address,
				     enum dma_data_direction direction, gfp_t gfp)
{
	void *memory = ENGINE(alloc)(dev, size, address, gfp, 0);

	return memory ? virt_to_page(memory) : NULL;
}

static void core_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t address,
			    enum dma_data_direction direction)
{
	ENGINE(free)(dev, size, page_address(page), address, 0);
}

static void core_sync_sg_for_cpu(struct device *dev, struct scatterlist *list, int nents,
				 enum dma_data_direction direction)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		ENGINE(sync_for_cpu)(dev, sg_dma_address(entry), sg_dma_len(entry), direction);
}

static void core_sync_sg_for_device(struct device *dev, struct scatterlist *list, int nents,
				    enum dma_data_direction direction)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		ENGINE(sync_for_device)(dev, sg_dma_address(entry), sg_dma_len(entry), direction);
}
#endif
#include "core_memory.h"

#ifdef CORE_HAVE_MAP_PHYS
#define CORE_MAP_OPERATIONS .map_phys = core_map_phys, .unmap_phys = core_unmap_phys
#else
#define CORE_MAP_OPERATIONS .map_page = core_map_page, .unmap_page = core_unmap_page
#endif

/* The members of the operations, to which an engine may add others. */
#define CORE_OPERATIONS							\
	.alloc = core_alloc_coherent,					\
	.free = core_free_coherent,					\
	.alloc_pages_op = core_alloc_pages,				\
	.free_pages = core_free_pages,					\
	.mmap = core_mmap,						\
	.get_sgtable = core_get_sgtable,				\
	CORE_MAP_OPERATIONS,						\
	.map_sg = core_map_sg,						\
	.unmap_sg = core_unmap_sg,					\
	.dma_supported = ENGINE(dma_supported),				\
	.get_required_mask = ENGINE(required_mask),			\
	.max_mapping_size = ENGINE(max_mapping_size)

const struct dma_map_ops ENGINE(ops) = {
	CORE_OPERATIONS,
#if defined(ENGINE_MAPS_PAGES) || defined(ENGINE_HAS_SHADOWS)
	.opt_mapping_size = ENGINE(opt_mapping_size),
#endif
#ifdef ENGINE_HAS_SHADOWS
	.sync_single_for_cpu = ENGINE(sync_for_cpu),
	.sync_single_for_device = ENGINE(sync_for_device),
	.sync_sg_for_cpu = core_sync_sg_for_cpu,
	.sync_sg_for_device = core_sync_sg_for_device,
#endif
};

#endif
