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
 */
#include <linux/dma-mapping.h>
#include <linux/hash.h>
#include <linux/slab.h>

#include "pviommu.h"

static struct kmem_cache *pvi_mapping_slab;

/*
 * What literal=1 decides otherwise, and nothing else does: the document's cache, to show what its
 * defects do. Its key is the page alone, so whoever maps a page gets what is there, however many
 * pages that leads to and in whichever direction. Whether a mapping is in use is one bit, so the
 * first of two users puts it away; what the other one unmaps later is not looked for. It is asked
 * only where the repaired cache would say no, so that a hit and its unmap cost what they did.
 */
static bool pvi_serves(const struct pvi_mapping *mapping, u32 pages,
		       enum dma_data_direction direction)
{
	return (mapping->pages == pages && mapping->direction == direction) || pvi_literal;
}

static bool pvi_used_after_put(struct pvi_mapping *mapping)
{
	if (!--mapping->users)
		return false;
	if (!pvi_literal)
		return true;
	mapping->users = 0;
	return false;
}

static int pvi_put_of_unknown(void)
{
	return pvi_literal ? 0 : -ENOENT;
}

int pvi_mapping_slab_init(void)
{
	pvi_mapping_slab = KMEM_CACHE(pvi_mapping, 0);
	return pvi_mapping_slab ? 0 : -ENOMEM;
}

void pvi_mapping_slab_exit(void)
{
	kmem_cache_destroy(pvi_mapping_slab);
}

int pvi_cache_init(struct pvi_endpoint *endpoint)
{
	size_t buckets = 1 << PVI_TABLE_BITS;

	spin_lock_init(&endpoint->lock);
	INIT_LIST_HEAD(&endpoint->unused);
	endpoint->by_page = kvcalloc(buckets, sizeof(*endpoint->by_page), GFP_KERNEL);
	endpoint->by_giova = kvcalloc(buckets, sizeof(*endpoint->by_giova), GFP_KERNEL);
	if (endpoint->by_page && endpoint->by_giova)
		return 0;
	pvi_cache_free(endpoint);
	return -ENOMEM;
}

void pvi_cache_free(struct pvi_endpoint *endpoint)
{
	kvfree(endpoint->by_page);
	kvfree(endpoint->by_giova);
}

static struct hlist_head *pvi_bucket(struct hlist_head *table, u64 address)
{
	return &table[hash_64(address >> PVI_PAGE_SHIFT, PVI_TABLE_BITS)];
}

static struct pvi_mapping *pvi_find(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				    enum dma_data_direction direction, u64 limit)
{
	struct pvi_mapping *mapping;

	hlist_for_each_entry(mapping, pvi_bucket(endpoint->by_page, gpa), by_page) {
		if (mapping->gpa == gpa && pvi_serves(mapping, pages, direction) &&
		    mapping->giova + ((u64)pages << PVI_PAGE_SHIFT) - 1 <= limit)
			return mapping;
	}
	return NULL;
}

/*
 * With the lock: one more user of what is there for these pages, all of it at addresses up to
 * limit.
 */
struct pvi_mapping *pvi_cache_hit(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				  enum dma_data_direction direction, u64 limit)
{
	struct pvi_mapping *mapping = pvi_find(endpoint, gpa, pages, direction, limit);

	if (!mapping)
		return NULL;
	if (!mapping->users++) {
		list_del(&mapping->list);
		endpoint->kept--;
		endpoint->live++;
	}
	return mapping;
}

/*
 * A mapping that nobody knows of yet: its addresses are taken, nothing is mapped. An error without
 * pages, memory or addresses, or when the host is not asked any more.
 */
struct pvi_mapping *pvi_mapping_new(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				    enum dma_data_direction direction, u64 limit, bool shared)
{
	struct pvi_mapping *mapping;

	if (!pages)
		return ERR_PTR(-EINVAL);
	if (READ_ONCE(endpoint->pvi->queue.broken))
		return ERR_PTR(-EIO);
	mapping = kmem_cache_alloc(pvi_mapping_slab, GFP_ATOMIC | __GFP_NOWARN);
	if (!mapping)
		return ERR_PTR(-ENOMEM);
	mapping->giova = pvi_iova_alloc(endpoint, pages, limit);
	if (!mapping->giova) {
		/* What is only kept makes room. */
		pvi_cache_drop_unused(endpoint);
		mapping->giova = pvi_iova_alloc(endpoint, pages, limit);
	}
	if (!mapping->giova) {
		kmem_cache_free(pvi_mapping_slab, mapping);
		return ERR_PTR(-ENOMEM);
	}
	mapping->gpa = gpa;
	mapping->pages = pages;
	mapping->users = 1;
	mapping->direction = direction;
	mapping->shared = shared && pvi_cache;
	return mapping;
}

static void pvi_mappings_free(struct pvi_endpoint *endpoint, struct list_head *mappings, bool lost)
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
	dev_err_ratelimited(&endpoint->pdev->dev, "pviommu: %s failed (%d)\n", what, err);
}

/* Forgets what was never mapped. */
void pvi_mappings_discard(struct pvi_endpoint *endpoint, struct list_head *fresh)
{
	pvi_mappings_free(endpoint, fresh, false);
}

static void pvi_know(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	if (mapping->shared)
		hlist_add_head(&mapping->by_page, pvi_bucket(endpoint->by_page, mapping->gpa));
	hlist_add_head(&mapping->by_giova, pvi_bucket(endpoint->by_giova, mapping->giova));
}

static void pvi_forget(struct pvi_mapping *mapping)
{
	if (mapping->shared)
		hlist_del(&mapping->by_page);
	hlist_del(&mapping->by_giova);
}

/*
 * Maps all these, which have one direction, and makes them known. If it fails there are none of
 * them any more, and undone says whether the host has confirmed that.
 */
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, bool *undone)
{
	enum dma_data_direction direction;
	struct pvi_mapping *mapping;
	unsigned long flags;
	int err;

	direction = list_first_entry(fresh, struct pvi_mapping, list)->direction;
	err = pvi_queue_map(endpoint, fresh, direction, undone);
	if (err == -ENOSPC && *undone) {
		/* The host has a limit; what is only kept makes room. */
		pvi_cache_drop_unused(endpoint);
		err = pvi_queue_map(endpoint, fresh, direction, undone);
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

/*
 * With the lock: one user less of the mapping at this address. If it was the last one, and the
 * mapping is not kept, it goes to the end of gone, and nobody knows of it any more.
 */
int pvi_cache_put(struct pvi_endpoint *endpoint, u64 giova, struct list_head *gone)
{
	struct pvi_mapping *mapping;

	giova &= ~(PVI_PAGE_BYTES - 1);
	hlist_for_each_entry(mapping, pvi_bucket(endpoint->by_giova, giova), by_giova) {
		if (mapping->giova != giova || !mapping->users)
			continue;
		if (pvi_used_after_put(mapping))
			return 0;
		endpoint->live--;
		if (mapping->shared) {
			mapping->cycle = READ_ONCE(endpoint->pvi->cycle);
			list_add_tail(&mapping->list, &endpoint->unused);
			endpoint->kept++;
		} else {
			pvi_forget(mapping);
			list_add_tail(&mapping->list, gone);
		}
		return 0;
	}
	return pvi_put_of_unknown();
}

/* Has the host unmap all these; their addresses are free if it says that it did. */
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *gone)
{
	int err;

	if (list_empty(gone))
		return 0;
	err = pvi_queue_unmap(endpoint, gone);
	if (err)
		pvi_failed(endpoint, "an unmap", err, 0);
	pvi_mappings_free(endpoint, gone, err);
	return err;
}

/* Removes what lost its last user in cycle last or before. */
static void pvi_drop_until(struct pvi_endpoint *endpoint, u64 last)
{
	struct pvi_mapping *mapping, *next;
	unsigned long flags;
	LIST_HEAD(gone);

	spin_lock_irqsave(&endpoint->lock, flags);
	list_for_each_entry_safe(mapping, next, &endpoint->unused, list) {
		if (mapping->cycle > last)
			break;
		pvi_forget(mapping);
		list_move_tail(&mapping->list, &gone);
		endpoint->kept--;
		endpoint->expired++;
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	pvi_mappings_release(endpoint, &gone);
}

/* Cycle number cycle begins: what was put away in C whole cycles before it goes. */
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle)
{
	if (cycle > pvi_cycles)
		pvi_drop_until(endpoint, cycle - pvi_cycles - 1);
}

void pvi_cache_drop_unused(struct pvi_endpoint *endpoint)
{
	pvi_drop_until(endpoint, U64_MAX);
}

/* The endpoint has no driver any more: what that has left mapped goes, too. */
void pvi_cache_drop_all(struct pvi_endpoint *endpoint)
{
	struct pvi_mapping *mapping;
	struct hlist_node *next;
	unsigned long flags;
	LIST_HEAD(gone);
	u64 left;
	int i;

	pvi_cache_drop_unused(endpoint);
	spin_lock_irqsave(&endpoint->lock, flags);
	left = endpoint->live;
	for (i = 0; i < 1 << PVI_TABLE_BITS; i++) {
		hlist_for_each_entry_safe(mapping, next, &endpoint->by_giova[i], by_giova) {
			pvi_forget(mapping);
			list_add_tail(&mapping->list, &gone);
		}
	}
	endpoint->live = 0;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (left)
		dev_warn(&endpoint->pdev->dev, "pviommu: %llu mappings were left by the driver\n",
			 left);
	pvi_mappings_release(endpoint, &gone);
}
