// SPDX-License-Identifier: GPL-2.0-only
/*
 * The mappings of one endpoint, and the reverse translation cache: what has lost its last user
 * stays mapped for C to C + 1 cycles of T, and whoever maps the same pages in the same direction
 * meanwhile gets it back without asking the host (Tang et al., section 4.5).
 *
 * Other than there, the key is pages and direction, and users are counted: two buffers in a page
 * share its mapping, and it stays until both are gone. A mapping serves its own direction alone:
 * one for both would let a device write to what it may only read. Those without users stand in
 * the order in which they lost them; all of a cycle are removed by one request. The parameter
 * literal is for what the document has there.
 *
 * Mappings that can be found by their page, in use or kept, have at most pvi_cache_pages pages.
 * What finds no room is unmapped with its last user, and a worker (leave.c) removes the oldest
 * sixteenth.
 */
#include <linux/dma-mapping.h>
#include <linux/log2.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "hit.h"
#include "pviommu.h"

static struct kmem_cache *pvi_mapping_slab;

int pvi_mapping_slab_init(void)
{
	pvi_mapping_slab = KMEM_CACHE(pvi_mapping, 0);
	return pvi_mapping_slab ? 0 : -ENOMEM;
}

void pvi_mapping_slab_exit(void)
{
	kmem_cache_destroy(pvi_mapping_slab);
}

/* Two pages of the limit to a bucket. */
static unsigned int pvi_table_bits(void)
{
	return max(ilog2(pvi_cache_pages), PVI_TABLE_BITS_MIN + 1) - 1;
}

int pvi_cache_init(struct pvi_endpoint *endpoint)
{
	size_t buckets;

	endpoint->table_bits = pvi_table_bits();
	buckets = (size_t)1 << endpoint->table_bits;
	spin_lock_init(&endpoint->lock);
	INIT_LIST_HEAD(&endpoint->unused);
	INIT_WORK(&endpoint->trim, pvi_trim_work);
	endpoint->by_page = kvcalloc(buckets, sizeof(*endpoint->by_page), GFP_KERNEL);
	endpoint->by_giova = kvcalloc(buckets, sizeof(*endpoint->by_giova), GFP_KERNEL);
	if (endpoint->by_page && endpoint->by_giova)
		return 0;
	pvi_cache_free(endpoint);
	return -ENOMEM;
}

/* The worker is done with the endpoint, and the host with its addresses. */
void pvi_cache_free(struct pvi_endpoint *endpoint)
{
	struct pvi_mapping *mapping;
	struct hlist_node *next;
	size_t i;

	/* What drivers that are gone never unmapped. */
	for (i = 0; endpoint->orphans && i < (size_t)1 << endpoint->table_bits; i++) {
		hlist_for_each_entry_safe(mapping, next, &endpoint->by_giova[i], by_giova)
			kmem_cache_free(pvi_mapping_slab, mapping);
	}
	kvfree(endpoint->by_page);
	kvfree(endpoint->by_giova);
}

/* With the lock. */
void pvi_forget(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	if (mapping->shared) {
		hlist_del(&mapping->by_page);
		endpoint->cached_pages -= mapping->pages;
	}
	hlist_del(&mapping->by_giova);
}

/* Peers' memory is not the guest's, and the host does not map it. */
static bool pvi_is_memory(u64 gpa)
{
	unsigned long pfn = gpa >> PVI_PAGE_SHIFT;

	return !pfn_valid(pfn) || !is_pci_p2pdma_page(pfn_to_page(pfn));
}

/*
 * A mapping that nobody knows of yet: its addresses are taken, nothing is mapped. An error without
 * pages, memory or addresses, for memory of another device, or when the host is not asked any
 * more.
 */
struct pvi_mapping *pvi_mapping_new(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				    enum dma_data_direction direction, u64 limit, bool shared,
				    struct pvi_call *call)
{
	struct pvi_mapping *mapping;

	if (!pages)
		return ERR_PTR(-EINVAL);
	if (!pvi_is_memory(gpa))
		return ERR_PTR(-EREMOTEIO);
	if (READ_ONCE(endpoint->pvi->queue.broken))
		return ERR_PTR(-EIO);
	mapping = kmem_cache_alloc(pvi_mapping_slab, GFP_ATOMIC | __GFP_NOWARN);
	if (!mapping)
		return ERR_PTR(-ENOMEM);
	mapping->giova = pvi_iova_alloc(endpoint, pages, limit);
	if (!mapping->giova && !call->made_room) {
		call->made_room = true;
		if (pvi_make_room(endpoint, &call->patience))
			mapping->giova = pvi_iova_alloc(endpoint, pages, limit);
	}
	if (!mapping->giova) {
		kmem_cache_free(pvi_mapping_slab, mapping);
		return ERR_PTR(-ENOSPC);
	}
	mapping->gpa = gpa;
	mapping->pages = pages;
	mapping->users = 1;
	mapping->direction = direction;
	mapping->shared = shared && pvi_cache;
	mapping->orphan = PVI_OWNED;
	return mapping;
}

/* Their addresses are free, unless they are lost: the host may still reach what they led to. */
void pvi_mappings_free(struct pvi_endpoint *endpoint, struct list_head *mappings, bool lost)
{
	struct pvi_mapping *mapping, *next;
	u64 pages = 0;

	list_for_each_entry_safe(mapping, next, mappings, list) {
		if (!lost)
			pvi_iova_free(endpoint, mapping->giova, mapping->pages);
		pages += mapping->pages;
		kmem_cache_free(pvi_mapping_slab, mapping);
	}
	INIT_LIST_HEAD(mappings);
	if (lost) {
		unsigned long flags;

		spin_lock_irqsave(&endpoint->lock, flags);
		endpoint->lost += pages;
		spin_unlock_irqrestore(&endpoint->lock, flags);
	}
}

/*
 * Counts a failure and tells of it, unless the driver does not want to hear of it or it is one of
 * those that follow when the host is not asked any more.
 */
void pvi_failed(struct pvi_endpoint *endpoint, const char *what, int err, unsigned long attrs)
{
	unsigned long flags;

	spin_lock_irqsave(&endpoint->lock, flags);
	endpoint->failures++;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (attrs & DMA_ATTR_NO_WARN || (err == -EIO && READ_ONCE(endpoint->pvi->queue.broken)))
		return;
	/* The device itself may be gone. */
	dev_err_ratelimited(&endpoint->pvi->vdev->dev, "%s: %s failed (%d)\n", endpoint->name,
			    what, err);
}

/* With the lock. What finds no room in the cache stays its user's. */
static void pvi_know(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	if (mapping->shared && mapping->pages > pvi_cache_pages - endpoint->cached_pages) {
		mapping->shared = false;
		endpoint->full++;
		pvi_want_room(endpoint);
	}
	if (mapping->shared) {
		endpoint->cached_pages += mapping->pages;
		hlist_add_head(&mapping->by_page,
			       pvi_page_bucket(endpoint, mapping->gpa, mapping->pages,
					       mapping->direction));
	}
	hlist_add_head(&mapping->by_giova, pvi_giova_bucket(endpoint, mapping->giova));
}

/*
 * Maps all these, which have one direction, and makes them known. If it fails there are none of
 * them any more, and undone says whether the host has confirmed that.
 */
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, struct pvi_call *call,
		  bool *undone)
{
	enum dma_data_direction direction;
	struct pvi_mapping *mapping;
	unsigned long flags;
	int err;

	direction = list_first_entry(fresh, struct pvi_mapping, list)->direction;
	err = pvi_queue_map(endpoint, fresh, direction, call, undone);
	if (err == -ENOSPC && *undone && !call->made_room) {
		call->made_room = true;
		if (pvi_make_room(endpoint, &call->patience))
			err = pvi_queue_map(endpoint, fresh, direction, call, undone);
	}
	if (err) {
		pvi_mappings_free(endpoint, fresh, !*undone);
		return err;
	}
	spin_lock_irqsave(&endpoint->lock, flags);
	list_for_each_entry(mapping, fresh, list) {
		pvi_know(endpoint, mapping);
		endpoint->live++;
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	return 0;
}

/* With the lock: an orphan is forgotten; its addresses are free unless they are lost. */
void pvi_orphan_free(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping, bool lost)
{
	pvi_forget(endpoint, mapping);
	endpoint->orphans--;
	if (lost)
		endpoint->lost += mapping->pages;
	else
		pvi_iova_free(endpoint, mapping->giova, mapping->pages);
	kmem_cache_free(pvi_mapping_slab, mapping);
}

/*
 * With the lock: one user less of a mapping whose driver is gone. With the last one its addresses
 * are free, for the host has unmapped it; while that is being asked for, nothing is certain.
 */
int pvi_put_orphan(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	bool unmapped = mapping->orphan == PVI_UNMAPPED;

	if (!--mapping->users && unmapped)
		pvi_orphan_free(endpoint, mapping, false);
	return unmapped ? 0 : -EINPROGRESS;
}
