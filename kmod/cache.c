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
 * cycle.
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

/* As many shards as CPUs, so that few CPUs wait for each other. */
static int pvi_shards_init(struct pvi_endpoint *endpoint)
{
	unsigned int count = min_t(unsigned int, roundup_pow_of_two(num_possible_cpus()),
				   PVI_SHARDS_MAX);
	unsigned int i;

	endpoint->shards = kcalloc(count, sizeof(*endpoint->shards), GFP_KERNEL);
	if (!endpoint->shards)
		return -ENOMEM;
	for (i = 0; i < count; i++) {
		spin_lock_init(&endpoint->shards[i].giova_lock);
		spin_lock_init(&endpoint->shards[i].page_lock);
		INIT_LIST_HEAD(&endpoint->shards[i].unused);
	}
	endpoint->shard_count = count;
	endpoint->shard_shift = endpoint->table_bits - ilog2(count);
	return 0;
}

int pvi_cache_init(struct pvi_endpoint *endpoint)
{
	size_t buckets;

	endpoint->table_bits = pvi_table_bits();
	buckets = (size_t)1 << endpoint->table_bits;
	INIT_WORK(&endpoint->trim, pvi_trim_work);
	endpoint->by_page = kvcalloc(buckets, sizeof(*endpoint->by_page), GFP_KERNEL);
	endpoint->by_giova = kvcalloc(buckets, sizeof(*endpoint->by_giova), GFP_KERNEL);
	endpoint->counts = alloc_percpu(struct pvi_counts);
	if (endpoint->by_page && endpoint->by_giova && endpoint->counts &&
	    !pvi_shards_init(endpoint))
		return 0;
	pvi_cache_free(endpoint);
	return -ENOMEM;
}

/* The worker has finished with the endpoint, and the host no longer uses its addresses. */
void pvi_cache_free(struct pvi_endpoint *endpoint)
{
	size_t buckets = atomic_long_read(&endpoint->orphans) ? (size_t)1 << endpoint->table_bits :
								 0;
	struct pvi_mapping *mapping;
	struct hlist_node *next;
	size_t i;

	/* Mappings that unbound drivers never unmapped. */
	for (i = 0; i < buckets; i++) {
		hlist_for_each_entry_safe(mapping, next, &endpoint->by_giova[i], by_giova)
			kmem_cache_free(pvi_mapping_slab, mapping);
	}
	kvfree(endpoint->by_page);
	kvfree(endpoint->by_giova);
	kfree(endpoint->shards);
	free_percpu(endpoint->counts);
}

/* Returns the sum of a counter over all CPUs. */
u64 pvi_count(const u64 __percpu *counter)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(*per_cpu_ptr(counter, cpu));
	return sum;
}

/* Removes evicted mappings from by_giova. Until then, an unmap finds them without a user. */
void pvi_unhash_giovas(struct pvi_endpoint *endpoint, struct list_head *mappings)
{
	struct pvi_mapping *mapping;
	unsigned long flags;

	list_for_each_entry(mapping, mappings, list) {
		u32 index = pvi_giova_index(endpoint, mapping->giova);
		struct pvi_shard *shard = pvi_shard_of(endpoint, index);

		spin_lock_irqsave(&shard->giova_lock, flags);
		hlist_del(&mapping->by_giova);
		spin_unlock_irqrestore(&shard->giova_lock, flags);
	}
}

/* Returns true for memory of another device (peer-to-peer), which the host does not map. */
static bool pvi_is_peer(u64 gpa)
{
	unsigned long pfn = gpa >> PVI_PAGE_SHIFT;

	return pfn_valid(pfn) && is_pci_p2pdma_page(pfn_to_page(pfn));
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
	if (pvi_is_peer(gpa))
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
	mapping->frames = NULL;
	mapping->pages = pages;
	mapping->users = 1;
	mapping->direction = direction;
	mapping->shared = shared && pvi_cache;
	mapping->orphan = PVI_OWNED;
	return mapping;
}

/*
 * Frees the mappings and their addresses. If @lost, keeps the addresses reserved, because the
 * device may still access the pages.
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
	if (lost)
		this_cpu_add(endpoint->counts->lost, pages);
}

/*
 * Counts a failure and logs it, unless the driver passed DMA_ATTR_NO_WARN or the failure is a
 * consequence of a broken queue.
 */
void pvi_failed(struct pvi_endpoint *endpoint, const char *what, int err, unsigned long attrs)
{
	this_cpu_inc(endpoint->counts->failures);
	if (attrs & DMA_ATTR_NO_WARN || (err == -EIO && READ_ONCE(endpoint->pvi->queue.broken)))
		return;
	/* The PCI device may be gone, so log with the virtio device. */
	dev_err_ratelimited(&endpoint->pvi->vdev->dev, "%s: %s failed (%d)\n", endpoint->core.name,
			    what, err);
}

/* Returns false if the cache would exceed its limit. */
static bool pvi_reserve(struct pvi_endpoint *endpoint, u32 pages)
{
	if (atomic_long_add_return(pages, &endpoint->cached_pages) <= pvi_cache_pages)
		return true;
	atomic_long_sub(pages, &endpoint->cached_pages);
	return false;
}

/* Adds the mapping to the tables. If it does not fit into the cache, it belongs to its user. */
static void pvi_hash_mapping(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	u32 page = pvi_page_index(endpoint, mapping->gpa, mapping->pages, mapping->direction);
	u32 giova = pvi_giova_index(endpoint, mapping->giova);
	struct pvi_shard *giova_shard = pvi_shard_of(endpoint, giova);
	struct pvi_shard *page_shard = pvi_shard_of(endpoint, page);
	unsigned long flags;

	if (mapping->shared && !pvi_reserve(endpoint, mapping->pages)) {
		mapping->shared = false;
		this_cpu_inc(endpoint->counts->full);
		pvi_request_room(endpoint);
	}
	/* A hit can be unmapped at once, so both tables have the mapping or none. */
	spin_lock_irqsave(&giova_shard->giova_lock, flags);
	hlist_add_head(&mapping->by_giova, &endpoint->by_giova[giova]);
	if (mapping->shared) {
		spin_lock(&page_shard->page_lock);
		hlist_add_head(&mapping->by_page, &endpoint->by_page[page]);
		spin_unlock(&page_shard->page_lock);
	}
	spin_unlock_irqrestore(&giova_shard->giova_lock, flags);
	this_cpu_inc(endpoint->counts->live);
}

/*
 * Maps all these mappings, which have one direction, and adds them to the tables. On failure frees
 * them; *@undone is true if the host has confirmed that none is mapped.
 */
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, struct pvi_call *call,
		  bool *undone)
{
	enum dma_data_direction direction;
	struct pvi_mapping *mapping, *next;
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
	list_for_each_entry_safe(mapping, next, fresh, list)
		pvi_hash_mapping(endpoint, mapping);
	return 0;
}

/* Caller holds its giova_lock. Frees an orphan, and its addresses unless @lost. */
void pvi_orphan_free(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping, bool lost)
{
	hlist_del(&mapping->by_giova);
	atomic_long_dec(&endpoint->orphans);
	if (lost)
		this_cpu_add(endpoint->counts->lost, mapping->pages);
	else
		pvi_iova_free(endpoint, mapping->giova, mapping->pages);
	kmem_cache_free(pvi_mapping_slab, mapping);
}

/*
 * Caller holds its giova_lock. Removes a user of a mapping whose driver has unbound. The last one
 * frees its addresses if the host has unmapped it. While the host is unmapping it, returns
 * -EINPROGRESS.
 */
int pvi_put_orphan(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	bool unmapped = mapping->orphan == PVI_UNMAPPED;

	if (!mapping->users)
		return pvi_unmap_unknown();
	if (!--mapping->users && unmapped)
		pvi_orphan_free(endpoint, mapping, false);
	return unmapped ? 0 : -EINPROGRESS;
}
