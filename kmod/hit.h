/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The path of a hit: a map that the cache serves, and its unmap. All of it is inline in what
 * drivers call, for it runs at each map and each unmap.
 */
#ifndef PVI_HIT_H
#define PVI_HIT_H

#include <linux/err.h>
#include <linux/hash.h>

#include "pviommu.h"

/*
 * What literal=1 decides otherwise, and nothing else does: the document's cache, to show what its
 * defects do. Its key is the page alone, so whoever maps a page gets what is there, however many
 * pages that leads to and in whichever direction. Whether a mapping is in use is one bit, so the
 * first of two users puts it away; what the other one unmaps later is not looked for. It is asked
 * only where the repaired cache would say no, so that a hit and its unmap cost what they did.
 */
static __always_inline bool pvi_serves(const struct pvi_mapping *mapping, u32 pages,
				       enum dma_data_direction direction)
{
	return (mapping->pages == pages && mapping->direction == direction) || pvi_literal;
}

static __always_inline bool pvi_used_after_put(struct pvi_mapping *mapping)
{
	if (!--mapping->users)
		return false;
	if (!pvi_literal)
		return true;
	mapping->users = 0;
	return false;
}

static __always_inline int pvi_put_of_unknown(void)
{
	return pvi_literal ? 0 : -ENOENT;
}

static __always_inline struct hlist_head *pvi_giova_bucket(struct pvi_endpoint *endpoint, u64 giova)
{
	return &endpoint->by_giova[hash_64(giova, endpoint->table_bits)];
}

/*
 * All of the key, so that many lengths of one page do not share a bucket. The document's cache
 * looks for the page alone.
 */
static __always_inline struct hlist_head *pvi_page_bucket(struct pvi_endpoint *endpoint, u64 gpa,
							  u32 pages,
							  enum dma_data_direction direction)
{
	u64 key = gpa;

	if (!pvi_literal)
		key += pages * 4ULL + direction;
	return &endpoint->by_page[hash_64(key, endpoint->table_bits)];
}

static __always_inline struct pvi_mapping *pvi_find(struct pvi_endpoint *endpoint, u64 gpa,
						    u32 pages, enum dma_data_direction direction,
						    u64 limit)
{
	struct pvi_mapping *mapping;

	hlist_for_each_entry(mapping, pvi_page_bucket(endpoint, gpa, pages, direction), by_page) {
		if (mapping->gpa == gpa && pvi_serves(mapping, pages, direction) &&
		    mapping->users != U32_MAX &&
		    mapping->giova + ((u64)pages << PVI_PAGE_SHIFT) - 1 <= limit)
			return mapping;
	}
	return NULL;
}

/*
 * With the lock: one more user of what is there for these pages, all of it at addresses up to
 * limit.
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
 * With the lock: one user less of the mapping at this address. If it was the last one, and the
 * mapping is not kept, nobody knows of it any more: it is the caller's to release. NULL if there
 * is nothing to release, or an error.
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
			pvi_forget(endpoint, mapping);
			return mapping;
		}
		mapping->cycle = READ_ONCE(endpoint->pvi->cycle);
		list_add_tail(&mapping->list, &endpoint->unused);
		endpoint->kept++;
		endpoint->kept_pages += mapping->pages;
		return NULL;
	}
	return ERR_PTR(pvi_put_of_unknown());
}

#endif
