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

/* A module can be compiled with another key. */
#ifndef PVI_KEY_HEADER
#define PVI_KEY_HEADER "key.h"
#endif
#include PVI_KEY_HEADER

/* Indices of the buckets in the two tables. */
static __always_inline u32 pvi_giova_index(struct pvi_endpoint *endpoint, u64 giova)
{
	return hash_64(giova, endpoint->table_bits);
}

static __always_inline u32 pvi_page_index(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
					  enum dma_data_direction direction)
{
	return hash_64(pvi_hash_input(gpa, pages, direction), endpoint->table_bits);
}

static __always_inline struct pvi_shard *pvi_shard_of(struct pvi_endpoint *endpoint, u32 index)
{
	return &endpoint->shards[index >> endpoint->shard_shift];
}

/* The shard of a cached mapping's bucket in by_page. */
static __always_inline struct pvi_shard *pvi_page_shard(struct pvi_endpoint *endpoint,
							const struct pvi_mapping *mapping)
{
	return pvi_shard_of(endpoint, pvi_page_index(endpoint, mapping->gpa, mapping->pages,
						     mapping->direction));
}

/* Caller holds the bucket's page_lock. */
static __always_inline struct pvi_mapping *pvi_find_page(struct hlist_head *bucket, u64 gpa,
							 u32 pages,
							 enum dma_data_direction direction,
							 u64 limit)
{
	struct pvi_mapping *mapping;

	hlist_for_each_entry(mapping, bucket, by_page) {
		if (mapping->gpa == gpa && pvi_matches(mapping, pages, direction) &&
		    mapping->users != U32_MAX &&
		    mapping->giova + ((u64)pages << PVI_PAGE_SHIFT) - 1 <= limit)
			return mapping;
	}
	return NULL;
}

/* Caller holds the bucket's giova_lock. */
static __always_inline struct pvi_mapping *pvi_find_giova(struct hlist_head *bucket, u64 giova)
{
	struct pvi_mapping *mapping;

	hlist_for_each_entry(mapping, bucket, by_giova) {
		if (mapping->giova == giova)
			return mapping;
	}
	return NULL;
}

/*
 * Adds a user to the mapping of these pages, if all its addresses are at most @limit. The mapping
 * stays valid as long as it has a user.
 */
static __always_inline struct pvi_mapping *pvi_cache_hit(struct pvi_endpoint *endpoint, u64 gpa,
							 u32 pages,
							 enum dma_data_direction direction,
							 u64 limit)
{
	u32 index = pvi_page_index(endpoint, gpa, pages, direction);
	struct pvi_shard *shard = pvi_shard_of(endpoint, index);
	struct pvi_mapping *mapping;
	unsigned long flags;

	spin_lock_irqsave(&shard->page_lock, flags);
	mapping = pvi_find_page(&endpoint->by_page[index], gpa, pages, direction, limit);
	if (mapping && !mapping->users++) {
		list_del(&mapping->list);
		this_cpu_dec(endpoint->counts->kept);
		this_cpu_sub(endpoint->counts->kept_pages, mapping->pages);
		this_cpu_inc(endpoint->counts->live);
	}
	spin_unlock_irqrestore(&shard->page_lock, flags);
	if (mapping)
		this_cpu_inc(endpoint->counts->hits);
	else
		this_cpu_inc(endpoint->counts->misses);
	return mapping;
}

/* Caller holds the mapping's giova_lock. Removes a user of a cached mapping. */
static __always_inline int pvi_put_cached(struct pvi_endpoint *endpoint,
					  struct pvi_mapping *mapping)
{
	struct pvi_shard *shard = pvi_page_shard(endpoint, mapping);
	int err = 0;

	spin_lock(&shard->page_lock);
	if (!mapping->users) {
		err = pvi_unmap_unknown();
	} else if (!pvi_used_after_put(mapping)) {
		mapping->cycle = READ_ONCE(endpoint->pvi->cycle);
		list_add_tail(&mapping->list, &shard->unused);
		this_cpu_dec(endpoint->counts->live);
		this_cpu_inc(endpoint->counts->kept);
		this_cpu_add(endpoint->counts->kept_pages, mapping->pages);
	}
	spin_unlock(&shard->page_lock);
	return err;
}

/*
 * Removes a user of the mapping at this address. Returns the mapping if it is not cached; it is
 * then out of the tables, and the caller must release it. Otherwise returns NULL, or an error
 * pointer.
 */
static __always_inline struct pvi_mapping *pvi_cache_put(struct pvi_endpoint *endpoint, u64 giova)
{
	struct pvi_mapping *mapping;
	struct pvi_shard *shard;
	unsigned long flags;
	int err = 0;
	u32 index;

	giova &= ~(PVI_PAGE_BYTES - 1);
	index = pvi_giova_index(endpoint, giova);
	shard = pvi_shard_of(endpoint, index);
	spin_lock_irqsave(&shard->giova_lock, flags);
	mapping = pvi_find_giova(&endpoint->by_giova[index], giova);
	if (!mapping) {
		err = pvi_unmap_unknown();
	} else if (mapping->orphan != PVI_OWNED) {
		err = pvi_put_orphan(endpoint, mapping);
		mapping = NULL;
	} else if (mapping->shared) {
		err = pvi_put_cached(endpoint, mapping);
		mapping = NULL;
	} else {
		hlist_del(&mapping->by_giova);
		this_cpu_dec(endpoint->counts->live);
	}
	spin_unlock_irqrestore(&shard->giova_lock, flags);
	this_cpu_inc(endpoint->counts->unmaps);
	return err ? ERR_PTR(err) : mapping;
}

#endif
