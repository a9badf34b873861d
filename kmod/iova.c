// SPDX-License-Identifier: GPL-2.0-only
/*
 * Allocation of an endpoint's I/O virtual addresses, with the kernel's IOVA allocator and its
 * per-CPU caches.
 */
#include "pviommu.h"

/* On x86, writes to these addresses are interrupts, regardless of mappings. */
#define PVI_DOORBELLS_FIRST	0xfee00000ULL
#define PVI_DOORBELLS_LAST	0xfeefffffULL

int pvi_iova_init(struct pvi_endpoint *endpoint)
{
	struct iova_domain *iovad = &endpoint->iovad;
	/* Never 0, which drivers use as an invalid address. */
	u64 first = max(endpoint->pvi->giova_first, PVI_PAGE_BYTES);
	int err;

	init_iova_domain(iovad, PVI_PAGE_BYTES, first >> PVI_PAGE_SHIFT);
	err = iova_domain_init_rcaches(iovad);
	if (err) {
		put_iova_domain(iovad);
		return err;
	}
	if (!reserve_iova(iovad, PVI_DOORBELLS_FIRST >> PVI_PAGE_SHIFT,
			  PVI_DOORBELLS_LAST >> PVI_PAGE_SHIFT)) {
		put_iova_domain(iovad);
		return -ENOMEM;
	}
	return 0;
}

/* Returns the first of @pages free pages, all at most @limit; 0 on failure. */
u64 pvi_iova_alloc(struct pvi_endpoint *endpoint, u32 pages, u64 limit)
{
	u64 last = min(endpoint->pvi->giova_last, limit);
	unsigned long last_pfn;

	/* The page that contains @limit is usable only if @limit is its last byte. */
	if (last < PVI_PAGE_BYTES - 1)
		return 0;
	last_pfn = ((last - (PVI_PAGE_BYTES - 1)) >> PVI_PAGE_SHIFT);
	return (u64)alloc_iova_fast(&endpoint->iovad, pages, last_pfn, true) << PVI_PAGE_SHIFT;
}

void pvi_iova_free(struct pvi_endpoint *endpoint, u64 giova, u32 pages)
{
	free_iova_fast(&endpoint->iovad, giova >> PVI_PAGE_SHIFT, pages);
}
