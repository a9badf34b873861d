/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Which mapping of the cache serves a map, and when it loses its last user. as_published.h has the
 * PVIOMMU paper's versions; only the module pviommu-as-published is compiled with them.
 */
#ifndef PVI_KEY_H
#define PVI_KEY_H

#include "pviommu.h"

/* The number that is hashed to find the bucket of a key: pages and direction. */
static __always_inline u64 pvi_hash_input(u64 gpa, u32 pages, enum dma_data_direction direction)
{
	return gpa + pages * 4ULL + direction;
}

/* Returns true if a mapping with the same first page has this key. */
static __always_inline bool pvi_matches(const struct pvi_mapping *mapping, u32 pages,
					enum dma_data_direction direction)
{
	return mapping->pages == pages && mapping->direction == direction;
}

/* Removes a user. Returns true if the mapping has another one. */
static __always_inline bool pvi_used_after_put(struct pvi_mapping *mapping)
{
	return --mapping->users;
}

/* Result of an unmap at an address without a mapping in use. */
static __always_inline int pvi_unmap_unknown(void)
{
	return -ENOENT;
}

/* The cache is off by default: devices reach kept mappings after their unmap. */
#define PVI_CACHE_DEFAULT false
static inline void pvi_warn_of_key(void)
{
}

#endif
