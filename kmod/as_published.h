/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The key of the PVIOMMU paper's cache and its single in-use bit (Tang et al., section 4.5), in
 * place of key.h. They have two defects.
 *
 * The paper's key is the page alone: a map gets the existing mapping of its page, with any length
 * and direction. One bit marks a mapping as in use, so the first of two users releases it, and the
 * unmap of the other one is ignored.
 */
#ifndef PVI_AS_PUBLISHED_H
#define PVI_AS_PUBLISHED_H

#include <linux/printk.h>

#include "pviommu.h"

static __always_inline u64 pvi_hash_input(u64 gpa, u32 pages, enum dma_data_direction direction)
{
	return gpa;
}

static __always_inline bool pvi_matches(const struct pvi_mapping *mapping, u32 pages,
					enum dma_data_direction direction)
{
	return true;
}

static __always_inline bool pvi_used_after_put(struct pvi_mapping *mapping)
{
	mapping->users = 0;
	return false;
}

static __always_inline int pvi_unmap_unknown(void)
{
	return 0;
}

#define PVI_CACHE_DEFAULT true
static inline void pvi_warn_of_key(void)
{
	pr_warn("pviommu-as-published: the paper's key and one bit: access rights can be wrong\n");
}

#endif
