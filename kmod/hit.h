/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Fast path of a cache hit: a map that the cache serves, and its unmap. Inlined into the
 * dma_map_ops, because it runs at each map and unmap.
 */
#ifndef PVI_HIT_H
#define PVI_HIT_H

#include <linux/err.h>
#include <linux/hash.h>

#include "pviommu.h"

/*
 * With as_published=1, these functions behave like the PVIOMMU paper's cache, to demonstrate its
 * defects. Nothing else depends on the parameter.
 *
 * The paper's key is the page alone: a map gets the existing mapping of its page, with any length
 * and direction. One bit marks a mapping as in use, so the first of two users releases it, and the
 * unmap of the other one is ignored.
 *
 * pvi_as_published is tested only where the fixed cache would fail, so it costs nothing on a hit.
 */
static __always_inline bool pvi_covers(const struct pvi_mapping *mapping, u32 pages,
				       enum dma_data_direction direction)
{
	return (mapping->pages == pages && mapping->direction == direction) || pvi_as_published;
}

static __always_inline bool pvi_used_after_put(struct pvi_mapping *mapping)
{
	if (!--mapping->users)
		return false;
	if (!pvi_as_published)
		return true;
	mapping->users = 0;
	return false;
}

static __always_inline int pvi_unmap_unknown(void)
{
	return pvi_as_published ? 0 : -ENOENT;
}

static __always_inline struct hlist_head *pvi_giova_bucket(struct pvi_endpoint *endpoint, u64 giova)
{
	return &endpoint->by_giova[hash_64(giova, endpoint->table_bits)];
}

/*
 * Hashes the whole key, so that mappings of one page with different lengths do not share a bucket.
 * The paper's cache hashes the page alone.
 */
static __always_inline struct hlist_head *pvi_page_bucket(struct pvi_endpoint *endpoint, u64 gpa,
							  u32 pages,
							  enum dma_data_direction direction)
{
	u64 key = gpa;

	if (!pvi_as_published)
		key += pages * 4ULL + direction;
	return &endpoint->by_page[hash_64(key, endpoint->table_bits)];
}

static __always_inline struct pvi_mapping *pvi_find(struct pvi_endpoint *endpoint, u64 gpa,
						    u32 pages, enum dma_data_direction direction,
						    u64 limit)
{
	struct pvi_mapping *mapping;

	hlist_for_each_entry(mapping, pvi_page_bucket(endpoint, gpa, pages, direction), by_page) {
		if (mapping->gpa == gpa && pvi_covers(mapping, pages, direction) &&
		    mapping->users != U32_MAX &&
		    mapping->giova + ((u64)pages << PVI_PAGE_SHIFT) - 1 <= limit)
			return mapping;
	}
	return NULL;
}

/*
 * Caller holds endpoint->lock. Adds a user to the mapping of these pages, if all its addresses are
 * at most limit.
 */
static __always_inline struct pvi_mapping *pvi_cache_hit(struct pvi_endpoint *endpoint, u64 gpa,
							 u32 pages,
							 enum dma_data_direction direction,
							 u64 limit)
{
	struct pvi_mapping *mapping = pvi_find(endpoint, gpa, pages, direction, limit);

	if (!mapping)
		return NULL;
	if (!mapping->users++) {
		list_del(&mapping->list);
		endpoint->kept--;
		endpoint->kept_pages -= mapping->pages;
		endpoint->live++;
	}
	return mapping;
}

/*
 * Caller holds endpoint->lock. Removes a user of the mapping at this address. Returns the mapping
 * if it was the last user and the mapping is not cached; it is then out of the tables, and the
 * caller must release it. Otherwise returns NULL, or an error pointer.
 */
static __always_inline struct pvi_mapping *pvi_cache_put(struct pvi_endpoint *endpoint, u64 giova)
{
	struct pvi_mapping *mapping;

	giova &= ~(PVI_PAGE_BYTES - 1);
	hlist_for_each_entry(mapping, pvi_giova_bucket(endpoint, giova), by_giova) {
		if (mapping->giova != giova || !mapping->users)
			continue;
		if (mapping->orphan != PVI_OWNED)
			return ERR_PTR(pvi_put_orphan(endpoint, mapping));
		if (pvi_used_after_put(mapping))
			return NULL;
		endpoint->live--;
		if (!mapping->shared) {
			pvi_unhash_mapping(endpoint, mapping);
			return mapping;
		}
		mapping->cycle = READ_ONCE(endpoint->pvi->cycle);
		list_add_tail(&mapping->list, &endpoint->unused);
		endpoint->kept++;
		endpoint->kept_pages += mapping->pages;
		return NULL;
	}
	return ERR_PTR(pvi_unmap_unknown());
}

#endif
