// SPDX-License-Identifier: GPL-2.0-only
/*
 * The dma_map_ops. Memory is coherent, so the sync operations are not needed. A device address is a
 * page of the endpoint's address space plus the offset in the page.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include "hit.h"
#include "pviommu.h"

/* One request in the large slot. Longer mappings are possible. */
#define PVI_MAPPING_BYTES (4UL << 20)

static struct pvi_endpoint *pvi_endpoint_of(struct device *dev)
{
	return container_of(get_dma_ops(dev), struct pvi_endpoint, ops);
}

static u64 pvi_offset(u64 address)
{
	return address & (PVI_PAGE_BYTES - 1);
}

/* Returns 0 if size is 0 or exceeds 32 bits. */
static u32 pvi_pages_for(u64 address, size_t size)
{
	if (!size || size > U32_MAX)
		return 0;
	return (pvi_offset(address) + size + PVI_PAGE_BYTES - 1) >> PVI_PAGE_SHIFT;
}

static u64 pvi_limit(struct device *dev, u64 mask)
{
	return min_not_zero(mask, dev->bus_dma_limit);
}

static u64 pvi_streaming_limit(struct device *dev)
{
	return pvi_limit(dev, dma_get_mask(dev));
}

/*
 * Maps through the host. Returns the address of the first page, or DMA_MAPPING_ERROR. With reached,
 * the memory is allocated by this module and the mapping is not shared. On failure, *reached is
 * true if the host may still map it.
 */
static noinline dma_addr_t pvi_map_uncached(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
					    enum dma_data_direction direction, u64 limit,
					    unsigned long attrs, bool *reached)
{
	struct pvi_mapping *mapping;
	struct pvi_call call = {};
	bool undone = true;
	LIST_HEAD(fresh);
	u64 giova = 0;
	int err;

	mapping = pvi_mapping_new(endpoint, gpa, pages, direction, limit, !reached, &call);
	err = PTR_ERR_OR_ZERO(mapping);
	if (!err) {
		giova = mapping->giova;
		list_add(&mapping->list, &fresh);
		err = pvi_cache_add(endpoint, &fresh, &call, &undone);
	}
	if (reached)
		*reached = !undone;
	if (!err)
		return giova;
	pvi_failed(endpoint, "a map", err, attrs);
	return DMA_MAPPING_ERROR;
}

/* Returns the address of the first byte, or DMA_MAPPING_ERROR. */
static dma_addr_t pvi_map(struct pvi_endpoint *endpoint, u64 gpa, size_t size,
			  enum dma_data_direction direction, u64 limit, unsigned long attrs)
{
	u64 offset = pvi_offset(gpa);
	u32 pages = pvi_pages_for(gpa, size);
	struct pvi_mapping *mapping = NULL;
	unsigned long flags;
	u64 giova = 0;

	gpa -= offset;
	spin_lock_irqsave(&endpoint->lock, flags);
	endpoint->maps++;
	if (pvi_cache) {
		mapping = pvi_cache_hit(endpoint, gpa, pages, direction, limit);
		if (mapping) {
			endpoint->hits++;
			/* Stays valid as long as the mapping has a user. */
			giova = mapping->giova;
		} else {
			endpoint->misses++;
		}
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (!mapping) {
		giova = pvi_map_uncached(endpoint, gpa, pages, direction, limit, attrs, NULL);
		if (giova == DMA_MAPPING_ERROR)
			return giova;
	}
	return giova + offset;
}

/* Maps whole pages that this module has allocated and that no other driver maps. */
static dma_addr_t pvi_map_allocated(struct pvi_endpoint *endpoint, u64 gpa, size_t size,
				    enum dma_data_direction direction, u64 limit,
				    unsigned long attrs, bool *reached)
{
	unsigned long flags;

	spin_lock_irqsave(&endpoint->lock, flags);
	endpoint->maps++;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	return pvi_map_uncached(endpoint, gpa, pvi_pages_for(gpa, size), direction, limit, attrs,
				reached);
}

/* Slow path of an unmap: unmaps an uncached mapping through the host, or reports an error. */
static noinline int pvi_unmap_uncached(struct pvi_endpoint *endpoint, struct pvi_mapping *put)
{
	struct pvi_poll_timeout timeout = {};
	LIST_HEAD(evicted);

	if (IS_ERR(put)) {
		pvi_failed(endpoint, "an unmap of what is not mapped", PTR_ERR(put), 0);
		return PTR_ERR(put);
	}
	list_add(&put->list, &evicted);
	return pvi_mappings_release(endpoint, &evicted, &timeout);
}

/* Returns 0 if the device can no longer access the pages, or after their expiry from the cache. */
static int pvi_unmap(struct pvi_endpoint *endpoint, dma_addr_t giova)
{
	struct pvi_mapping *put;
	unsigned long flags;

	spin_lock_irqsave(&endpoint->lock, flags);
	endpoint->unmaps++;
	put = pvi_cache_put(endpoint, giova);
	spin_unlock_irqrestore(&endpoint->lock, flags);
	/* An unmap of a cached mapping needs no more than this. */
	return put ? pvi_unmap_uncached(endpoint, put) : 0;
}

#ifdef PVI_HAVE_MAP_PHYS
static dma_addr_t pvi_map_phys(struct device *dev, phys_addr_t phys, size_t size,
			       enum dma_data_direction direction, unsigned long attrs)
{
	/* The host maps only memory. */
	if (attrs & DMA_ATTR_MMIO)
		return DMA_MAPPING_ERROR;
	return pvi_map(pvi_endpoint_of(dev), phys, size, direction, pvi_streaming_limit(dev),
		       attrs);
}

static void pvi_unmap_phys(struct device *dev, dma_addr_t address, size_t size,
			   enum dma_data_direction direction, unsigned long attrs)
{
	pvi_unmap(pvi_endpoint_of(dev), address);
}
#else
static dma_addr_t pvi_map_page(struct device *dev, struct page *page, unsigned long offset,
			       size_t size, enum dma_data_direction direction, unsigned long attrs)
{
	return pvi_map(pvi_endpoint_of(dev), page_to_phys(page) + offset, size, direction,
		       pvi_streaming_limit(dev), attrs);
}

static void pvi_unmap_page(struct device *dev, dma_addr_t address, size_t size,
			   enum dma_data_direction direction, unsigned long attrs)
{
	pvi_unmap(pvi_endpoint_of(dev), address);
}
#endif

static void pvi_unmap_sg(struct device *dev, struct scatterlist *list, int nents,
			 enum dma_data_direction direction, unsigned long attrs)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);
	struct pvi_poll_timeout timeout = {};
	struct scatterlist *entry;
	unsigned long flags;
	LIST_HEAD(evicted);
	int err = 0;
	int i;

	spin_lock_irqsave(&endpoint->lock, flags);
	for_each_sg(list, entry, nents, i) {
		struct pvi_mapping *put = pvi_cache_put(endpoint, sg_dma_address(entry));

		endpoint->unmaps++;
		if (IS_ERR(put))
			err = err ?: PTR_ERR(put);
		else if (put)
			list_add_tail(&put->list, &evicted);
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (err)
		pvi_failed(endpoint, "an unmap of what is not mapped", err, 0);
	pvi_mappings_release(endpoint, &evicted, &timeout);
}

/*
 * Maps each entry separately, so that the cache can find it for another list. One request maps all
 * new entries. The length of an entry is 0 until its mapping exists.
 */
static int pvi_map_sg(struct device *dev, struct scatterlist *list, int nents,
		      enum dma_data_direction direction, unsigned long attrs)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);
	u64 limit = pvi_streaming_limit(dev);
	struct pvi_mapping *mapping;
	struct scatterlist *entry;
	unsigned long flags;
	struct pvi_call call = {};
	LIST_HEAD(fresh);
	LIST_HEAD(evicted);
	bool undone;
	int err = 0;
	int i;

	spin_lock_irqsave(&endpoint->lock, flags);
	for_each_sg(list, entry, nents, i) {
		u64 gpa = sg_phys(entry);

		mapping = NULL;
		if (pvi_cache)
			mapping = pvi_cache_hit(endpoint, gpa - pvi_offset(gpa),
						pvi_pages_for(gpa, entry->length), direction,
						limit);
		sg_dma_len(entry) = 0;
		if (mapping) {
			sg_dma_address(entry) = mapping->giova + pvi_offset(gpa);
			sg_dma_len(entry) = entry->length;
			endpoint->hits++;
		} else if (pvi_cache) {
			endpoint->misses++;
		}
	}
	endpoint->maps += nents;
	spin_unlock_irqrestore(&endpoint->lock, flags);

	for_each_sg(list, entry, nents, i) {
		u64 gpa = sg_phys(entry);

		if (sg_dma_len(entry))
			continue;
		mapping = pvi_mapping_new(endpoint, gpa - pvi_offset(gpa),
					  pvi_pages_for(gpa, entry->length), direction, limit,
					  true, &call);
		if (IS_ERR(mapping)) {
			err = PTR_ERR(mapping);
			break;
		}
		sg_dma_address(entry) = mapping->giova + pvi_offset(gpa);
		list_add_tail(&mapping->list, &fresh);
	}
	if (!err && list_empty(&fresh))
		return nents;
	if (!err)
		err = pvi_cache_add(endpoint, &fresh, &call, &undone);
	else
		/* None of them was mapped. */
		pvi_mappings_free(endpoint, &fresh, false);
	if (!err) {
		for_each_sg(list, entry, nents, i)
			sg_dma_len(entry) = entry->length;
		return nents;
	}

	spin_lock_irqsave(&endpoint->lock, flags);
	for_each_sg(list, entry, nents, i) {
		mapping = NULL;
		if (sg_dma_len(entry))
			mapping = pvi_cache_put(endpoint, sg_dma_address(entry));
		if (!IS_ERR_OR_NULL(mapping))
			list_add_tail(&mapping->list, &evicted);
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	pvi_mappings_release(endpoint, &evicted, &call.undoing);
	pvi_failed(endpoint, "a map of a list", err, attrs);
	switch (err) {
	case -ENOSPC:
		/* The worker makes room, so a retry may succeed. */
		return -ENOMEM;
	case -ENOMEM:
	case -EREMOTEIO:
		return err;
	default:
		return -EIO;
	}
}

/*
 * Coherent memory. It is not cached: freeing it unmaps it. Pages that the host may still access are
 * not returned to the kernel.
 */
static void *pvi_alloc(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
		       unsigned long attrs)
{
	u64 limit = pvi_limit(dev, dev->coherent_dma_mask);
	bool reached;
	void *memory;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	memory = alloc_pages_exact(size, gfp | __GFP_ZERO);
	if (!memory)
		return NULL;
	*address = pvi_map_allocated(pvi_endpoint_of(dev), virt_to_phys(memory), size,
				     DMA_BIDIRECTIONAL, limit, attrs, &reached);
	if (*address != DMA_MAPPING_ERROR)
		return memory;
	if (!reached)
		free_pages_exact(memory, size);
	return NULL;
}

static void pvi_free(struct device *dev, size_t size, void *memory, dma_addr_t address,
		     unsigned long attrs)
{
	if (!pvi_unmap(pvi_endpoint_of(dev), address))
		free_pages_exact(memory, size);
}

static struct page *pvi_alloc_pages(struct device *dev, size_t size, dma_addr_t *address,
				    enum dma_data_direction direction, gfp_t gfp)
{
	u64 limit = pvi_limit(dev, dev->coherent_dma_mask);
	struct page *page = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, get_order(size));
	bool reached;

	if (!page)
		return NULL;
	*address = pvi_map_allocated(pvi_endpoint_of(dev), page_to_phys(page), size,
				     direction, limit, 0, &reached);
	if (*address != DMA_MAPPING_ERROR)
		return page;
	if (!reached)
		__free_pages(page, get_order(size));
	return NULL;
}

static void pvi_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t address,
			   enum dma_data_direction direction)
{
	if (!pvi_unmap(pvi_endpoint_of(dev), address))
		__free_pages(page, get_order(size));
}

static int pvi_mmap(struct device *dev, struct vm_area_struct *vma, void *memory,
		    dma_addr_t address, size_t size, unsigned long attrs)
{
	unsigned long pages = PAGE_ALIGN(size) >> PAGE_SHIFT;

	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -ENXIO;
	return remap_pfn_range(vma, vma->vm_start,
			       page_to_pfn(virt_to_page(memory)) + vma->vm_pgoff,
			       vma_pages(vma) << PAGE_SHIFT, vma->vm_page_prot);
}

static int pvi_get_sgtable(struct device *dev, struct sg_table *table, void *memory,
			   dma_addr_t address, size_t size, unsigned long attrs)
{
	int err = sg_alloc_table(table, 1, GFP_KERNEL);

	if (!err)
		sg_set_page(table->sgl, virt_to_page(memory), PAGE_ALIGN(size), 0);
	return err;
}

/* The mask must allow at least one page. */
static int pvi_dma_supported(struct device *dev, u64 mask)
{
	u64 first = max(pvi_endpoint_of(dev)->pvi->giova_first, PVI_PAGE_BYTES);

	return mask >= first + PVI_PAGE_BYTES - 1;
}

/* Device addresses are independent of memory addresses. */
static u64 pvi_get_required_mask(struct device *dev)
{
	return DMA_BIT_MASK(32);
}

static size_t pvi_max_mapping_size(struct device *dev)
{
	return PVI_MAPPING_BYTES;
}

const struct dma_map_ops pvi_ops = {
	.alloc = pvi_alloc,
	.free = pvi_free,
	.alloc_pages_op = pvi_alloc_pages,
	.free_pages = pvi_free_pages,
	.mmap = pvi_mmap,
	.get_sgtable = pvi_get_sgtable,
#ifdef PVI_HAVE_MAP_PHYS
	.map_phys = pvi_map_phys,
	.unmap_phys = pvi_unmap_phys,
#else
	.map_page = pvi_map_page,
	.unmap_page = pvi_unmap_page,
#endif
	.map_sg = pvi_map_sg,
	.unmap_sg = pvi_unmap_sg,
	.dma_supported = pvi_dma_supported,
	.get_required_mask = pvi_get_required_mask,
	.max_mapping_size = pvi_max_mapping_size,
};
