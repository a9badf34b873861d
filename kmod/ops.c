// SPDX-License-Identifier: GPL-2.0-only
/*
 * Maps and unmaps of drivers: the functions of the engine that core_ops.h needs. A device address
 * is a page of the endpoint's address space plus the offset in the page.
 */
#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include "hit.h"
#include "pviommu.h"

/* One request in the large slot. Longer mappings are possible. */
#define PVI_MAPPING_BYTES (4UL << 20)
/* IOVA_RANGE_CACHE_MAX_SIZE of drivers/iommu/iova.c is 6. */
#define PVI_CACHED_RANGE_BYTES (PVI_PAGE_BYTES << 5)
/* Addresses that a device should reach at least. */
#define PVI_WINDOW_BYTES 0x40000000ULL

static struct pvi_endpoint *pvi_endpoint_of(struct device *dev)
{
	return container_of(core_endpoint_of(dev), struct pvi_endpoint, core);
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
 * Maps through the host. Returns the address of the first page, or DMA_MAPPING_ERROR. With
 * @reached, the memory is allocated by this module and the mapping is not shared. On failure,
 * *@reached is true if the host may still map it.
 */
static noinline dma_addr_t pvi_map_uncached(struct pvi_endpoint *endpoint, u64 gpa,
					    struct page **frames, u32 pages,
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
		mapping->frames = frames;
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
static dma_addr_t pvi_map(struct device *dev, phys_addr_t gpa, size_t size,
			  enum dma_data_direction direction, unsigned long attrs)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);
	u64 limit = pvi_streaming_limit(dev);
	u64 offset = pvi_offset(gpa);
	u32 pages = pvi_pages_for(gpa, size);
	struct pvi_mapping *mapping;
	u64 giova;

	gpa -= offset;
	this_cpu_inc(endpoint->counts->maps);
	if (pvi_cache) {
		mapping = pvi_cache_hit(endpoint, gpa, pages, direction, limit);
		if (mapping)
			return mapping->giova + offset;
	}
	giova = pvi_map_uncached(endpoint, gpa, NULL, pages, direction, limit, attrs, NULL);
	return giova == DMA_MAPPING_ERROR ? giova : giova + offset;
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
static int pvi_unmap_at(struct pvi_endpoint *endpoint, dma_addr_t giova)
{
	struct pvi_mapping *put = pvi_cache_put(endpoint, giova);

	/* An unmap of a cached mapping needs no more than this. */
	return put ? pvi_unmap_uncached(endpoint, put) : 0;
}

static void pvi_unmap(struct device *dev, dma_addr_t address, size_t size,
		      enum dma_data_direction direction, unsigned long attrs)
{
	pvi_unmap_at(pvi_endpoint_of(dev), address);
}

static void pvi_unmap_list(struct device *dev, struct scatterlist *list, int nents,
			   enum dma_data_direction direction, unsigned long attrs)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);
	struct pvi_poll_timeout timeout = {};
	struct scatterlist *entry;
	LIST_HEAD(evicted);
	int err = 0;
	int i;

	for_each_sg(list, entry, nents, i) {
		struct pvi_mapping *put = pvi_cache_put(endpoint, sg_dma_address(entry));

		if (IS_ERR(put))
			err = err ?: PTR_ERR(put);
		else if (put)
			list_add_tail(&put->list, &evicted);
	}
	if (err)
		pvi_failed(endpoint, "an unmap of what is not mapped", err, 0);
	pvi_mappings_release(endpoint, &evicted, &timeout);
}

/*
 * Maps each entry separately, so that the cache can find it for another list. One request maps all
 * new entries. The length of an entry is 0 until its mapping exists.
 */
static int pvi_map_list(struct device *dev, struct scatterlist *list, int nents,
			enum dma_data_direction direction, unsigned long attrs)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);
	u64 limit = pvi_streaming_limit(dev);
	struct pvi_mapping *mapping;
	struct scatterlist *entry;
	struct pvi_call call = {};
	LIST_HEAD(fresh);
	LIST_HEAD(evicted);
	bool undone;
	int err = 0;
	int i;

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
		}
	}
	this_cpu_add(endpoint->counts->maps, nents);

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

	for_each_sg(list, entry, nents, i) {
		mapping = NULL;
		if (sg_dma_len(entry))
			mapping = pvi_cache_put(endpoint, sg_dma_address(entry));
		if (!IS_ERR_OR_NULL(mapping))
			list_add_tail(&mapping->list, &evicted);
	}
	pvi_mappings_release(endpoint, &evicted, &call.undoing);
	pvi_failed(endpoint, "a map of a list", err, attrs);
	switch (err) {
	case -ENOSPC:
		/* The worker makes room, so a retry may succeed. */
		return -ENOMEM;
	case -EINVAL:
	case -ENOMEM:
	case -EREMOTEIO:
		return err;
	default:
		return -EIO;
	}
}

/*
 * Coherent memory is not cached: freeing it unmaps it. On failure, *is_reached is true if the host
 * may still map the pages.
 */
static dma_addr_t pvi_map_memory(struct device *dev, phys_addr_t gpa, size_t size,
				 enum dma_data_direction direction, unsigned long attrs,
				 bool *is_reached)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);

	this_cpu_inc(endpoint->counts->maps);
	return pvi_map_uncached(endpoint, gpa, NULL, pvi_pages_for(gpa, size), direction,
				pvi_limit(dev, dev->coherent_dma_mask), attrs, is_reached);
}

/* The same for pages that are not contiguous. */
static dma_addr_t pvi_map_paged(struct device *dev, struct page **frames, unsigned int pages,
				unsigned long attrs, bool *is_reached)
{
	struct pvi_endpoint *endpoint = pvi_endpoint_of(dev);

	this_cpu_inc(endpoint->counts->maps);
	return pvi_map_uncached(endpoint, page_to_phys(frames[0]), frames, pages,
				DMA_BIDIRECTIONAL, pvi_limit(dev, dev->coherent_dma_mask), attrs,
				is_reached);
}

static bool pvi_unmap_memory(struct device *dev, dma_addr_t address)
{
	return !pvi_unmap_at(pvi_endpoint_of(dev), address);
}

/* The mask must allow at least one page. */
static int pvi_dma_supported(struct device *dev, u64 mask)
{
	u64 first = max(pvi_endpoint_of(dev)->pvi->giova_first, PVI_PAGE_BYTES);

	return mask >= first + PVI_PAGE_BYTES - 1;
}

/*
 * Device addresses are independent of memory addresses: 32 bits, unless the host's window begins
 * above or near their end.
 */
static u64 pvi_required_mask(struct device *dev)
{
	u64 first = pvi_endpoint_of(dev)->pvi->giova_first;

	return DMA_BIT_MASK(max(32, fls64(first + PVI_WINDOW_BYTES - 1)));
}

static size_t pvi_max_mapping_size(struct device *dev)
{
	return PVI_MAPPING_BYTES;
}

/* The allocator of addresses caches ranges up to this size. */
static size_t pvi_opt_mapping_size(void)
{
	return PVI_CACHED_RANGE_BYTES;
}

#define ENGINE(name) pvi_##name
#define ENGINE_MAPS_PAGES
#include "core_ops.h"
