// SPDX-License-Identifier: GPL-2.0-only
/*
 * The mappings of one endpoint and the reverse translation cache. A mapping without users stays
 * mapped for C to C + 1 cycles of T. A map of the same pages in the same direction reuses it
 * without a request to the host (PVIOMMU paper: Tang et al., section 4.5).
 *
 * Unlike in the paper, the key includes length and direction, and users are counted. Two buffers in
 * a page share its mapping, which stays until both are unmapped. A mapping serves only its own
 * direction: a bidirectional one would let a device write to read-only buffers. Unused mappings are
 * listed in the order in which they lost their last user; one request removes those of a whole
 * cycle. The parameter as_published selects the paper's behaviour.
 *
 * Cached mappings, in use or unused, have at most pvi_cache_pages pages. A mapping that does not
 * fit is unmapped with its last user, and a worker (evict.c) evicts the oldest sixteenth.
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

/* One bucket for two pages of the limit. */
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

/* The worker has finished with the endpoint, and the host no longer uses its addresses. */
void pvi_cache_free(struct pvi_endpoint *endpoint)
{
	struct pvi_mapping *mapping;
	struct hlist_node *next;
	size_t i;

	/* Mappings that unbound drivers never unmapped. */
	for (i = 0; endpoint->orphans && i < (size_t)1 << endpoint->table_bits; i++) {
		hlist_for_each_entry_safe(mapping, next, &endpoint->by_giova[i], by_giova)
			kmem_cache_free(pvi_mapping_slab, mapping);
	}
	kvfree(endpoint->by_page);
	kvfree(endpoint->by_giova);
}

/* Caller holds endpoint->lock. Removes the mapping from the tables. */
void pvi_unhash_mapping(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	if (mapping->shared) {
		hlist_del(&mapping->by_page);
		endpoint->cached_pages -= mapping->pages;
	}
	hlist_del(&mapping->by_giova);
}

/* Peer-to-peer memory does not belong to the guest, so the host does not map it. */
static bool pvi_is_memory(u64 gpa)
{
	unsigned long pfn = gpa >> PVI_PAGE_SHIFT;

	return !pfn_valid(pfn) || !is_pci_p2pdma_page(pfn_to_page(pfn));
}

/*
 * Allocates a mapping and its addresses, without mapping pages or adding it to the tables. Fails
 * without pages, memory or addresses, for another device's memory, or if the queue is broken.
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
		if (pvi_make_room(endpoint, &call->timeout))
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

/*
 * Frees the mappings and their addresses. If lost, keeps the addresses reserved, because the device
 * may still access the pages.
 */
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
 * Counts a failure and logs it, unless the driver passed DMA_ATTR_NO_WARN or the failure is a
 * consequence of a broken queue.
 */
void pvi_failed(struct pvi_endpoint *endpoint, const char *what, int err, unsigned long attrs)
{
	unsigned long flags;

	spin_lock_irqsave(&endpoint->lock, flags);
	endpoint->failures++;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (attrs & DMA_ATTR_NO_WARN || (err == -EIO && READ_ONCE(endpoint->pvi->queue.broken)))
		return;
	/* The PCI device may be gone, so log with the virtio device. */
	dev_err_ratelimited(&endpoint->pvi->vdev->dev, "%s: %s failed (%d)\n", endpoint->name,
			    what, err);
}

/* Caller holds endpoint->lock. A mapping that does not fit into the cache belongs to its user. */
static void pvi_hash_mapping(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	if (mapping->shared && mapping->pages > pvi_cache_pages - endpoint->cached_pages) {
		mapping->shared = false;
		endpoint->full++;
		pvi_request_room(endpoint);
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
 * Maps all these mappings, which have one direction, and adds them to the tables. On failure frees
 * them; *undone is true if the host has confirmed that none is mapped.
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
		if (pvi_make_room(endpoint, &call->timeout))
			err = pvi_queue_map(endpoint, fresh, direction, call, undone);
	}
	if (err) {
		pvi_mappings_free(endpoint, fresh, !*undone);
		return err;
	}
	spin_lock_irqsave(&endpoint->lock, flags);
	list_for_each_entry(mapping, fresh, list) {
		pvi_hash_mapping(endpoint, mapping);
		endpoint->live++;
	}
	spin_unlock_irqrestore(&endpoint->lock, flags);
	return 0;
}

/* Caller holds endpoint->lock. Frees an orphan, and its addresses unless they are lost. */
void pvi_orphan_free(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping, bool lost)
{
	pvi_unhash_mapping(endpoint, mapping);
	endpoint->orphans--;
	if (lost)
		endpoint->lost += mapping->pages;
	else
		pvi_iova_free(endpoint, mapping->giova, mapping->pages);
	kmem_cache_free(pvi_mapping_slab, mapping);
}

/*
 * Caller holds endpoint->lock. Removes a user of a mapping whose driver has unbound. The last one
 * frees its addresses if the host has unmapped it. While the host is unmapping it, returns
 * -EINPROGRESS.
 */
int pvi_put_orphan(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	bool unmapped = mapping->orphan == PVI_UNMAPPED;

	if (!--mapping->users && unmapped)
		pvi_orphan_free(endpoint, mapping, false);
	return unmapped ? 0 : -EINPROGRESS;
}
