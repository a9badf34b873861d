// SPDX-License-Identifier: GPL-2.0-only
/*
 * Removal of mappings: at their last unmap, at expiry, to make room, or on driver unbind. The lock
 * is held for at most PVI_LOCKED_STEPS mappings, and never during a request to the host. A map
 * makes at most one request for room; the worker does the rest.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "pviommu.h"

/* Maximum number of mappings processed while holding the lock. */
#define PVI_LOCKED_STEPS	256
/* Pages that a map evicts to make room: one request of an ordinary slot. */
#define PVI_ROOM_PAGES		128
/* Share of the limit that the worker evicts when the cache is full. */
#define PVI_EVICT_SHARE		16

/*
 * Caller holds endpoint->lock. Moves the oldest unused mappings to evicted, if they lost their last
 * user in cycle last or before: up to this many pages, and at most PVI_LOCKED_STEPS mappings. If
 * one_at_least, moves the first one whatever its size. Returns the number of pages moved.
 */
static u64 pvi_collect_unused(struct pvi_endpoint *endpoint, u64 last, u64 pages, bool one_at_least,
			      u64 *counter, struct list_head *evicted)
{
	struct pvi_mapping *mapping, *next;
	unsigned int steps = 0;
	u64 taken = 0;

	list_for_each_entry_safe(mapping, next, &endpoint->unused, list) {
		if (mapping->cycle > last || steps++ == PVI_LOCKED_STEPS)
			break;
		if ((taken || !one_at_least) &&
		    (taken >= pages || mapping->pages > pages - taken))
			break;
		pvi_unhash_mapping(endpoint, mapping);
		list_move_tail(&mapping->list, evicted);
		taken += mapping->pages;
		endpoint->kept--;
		endpoint->kept_pages -= mapping->pages;
		(*counter)++;
	}
	return taken;
}

/* Unmaps these mappings. Frees their addresses if the host confirms. */
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *evicted,
			 struct pvi_poll_timeout *timeout)
{
	int err;

	if (list_empty(evicted))
		return 0;
	err = pvi_queue_unmap(endpoint, evicted, timeout);
	if (err)
		pvi_failed(endpoint, "an unmap", err, 0);
	pvi_mappings_free(endpoint, evicted, err);
	return err;
}

/* Caller holds endpoint->lock. Queues the worker to make room, if any mapping is unused. */
void pvi_request_room(struct pvi_endpoint *endpoint)
{
	if (!endpoint->kept)
		return;
	endpoint->room_requested = true;
	queue_work(pvi_workqueue, &endpoint->trim);
}

/*
 * Called if a map finds no addresses or the host has no room. Evicts the oldest unused mappings
 * with one request, which a caller that cannot sleep can wait for. The worker evicts more. Returns
 * true if a retry is worthwhile.
 */
bool pvi_make_room(struct pvi_endpoint *endpoint, struct pvi_poll_timeout *timeout)
{
	unsigned long flags;
	LIST_HEAD(evicted);
	u64 taken;

	spin_lock_irqsave(&endpoint->lock, flags);
	taken = pvi_collect_unused(endpoint, U64_MAX, PVI_ROOM_PAGES, true, &endpoint->forced,
				   &evicted);
	pvi_request_room(endpoint);
	spin_unlock_irqrestore(&endpoint->lock, flags);
	return taken && !pvi_mappings_release(endpoint, &evicted, timeout);
}

/*
 * Sleepable context only. Evicts mappings that lost their last user in cycle last or before, oldest
 * first, up to this many pages but at least one mapping. Each request is as large as possible.
 */
static void pvi_evict(struct pvi_endpoint *endpoint, u64 last, u64 pages, u64 *counter)
{
	bool one_at_least = true;
	unsigned long flags;
	u64 taken, batch;

	do {
		struct pvi_poll_timeout timeout = { .may_sleep = true };
		LIST_HEAD(evicted);

		batch = 0;
		do {
			spin_lock_irqsave(&endpoint->lock, flags);
			taken = pvi_collect_unused(endpoint, last, pages, one_at_least, counter,
						   &evicted);
			spin_unlock_irqrestore(&endpoint->lock, flags);
			one_at_least = false;
			batch += taken;
			pages -= min(pages, taken);
			cond_resched();
		} while (taken && pages && batch < endpoint->pvi->pages_max);
		pvi_mappings_release(endpoint, &evicted, &timeout);
	} while (batch && pages);
}

/*
 * Called when cycle number cycle has begun. Removes mappings that have been unused for C whole
 * cycles.
 */
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle)
{
	if (cycle > pvi_cycles)
		pvi_evict(endpoint, cycle - pvi_cycles - 1, U64_MAX, &endpoint->expired);
}

/* Evicts a sixteenth of the limit before expiry. */
void pvi_cache_evict_share(struct pvi_endpoint *endpoint)
{
	u64 pages = DIV_ROUND_UP(pvi_cache_pages, PVI_EVICT_SHARE);

	pvi_evict(endpoint, U64_MAX, pages, &endpoint->forced);
}

void pvi_cache_evict_unused(struct pvi_endpoint *endpoint)
{
	pvi_evict(endpoint, U64_MAX, U64_MAX, &endpoint->forced);
}

/* Work that a map in interrupt context cannot wait for. */
void pvi_trim_work(struct work_struct *work)
{
	struct pvi_endpoint *endpoint = container_of(work, struct pvi_endpoint, trim);
	unsigned long flags;
	bool wanted;

	pvi_cache_expire(endpoint, READ_ONCE(endpoint->pvi->cycle));
	spin_lock_irqsave(&endpoint->lock, flags);
	wanted = endpoint->room_requested;
	endpoint->room_requested = false;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (wanted)
		pvi_cache_evict_share(endpoint);
}

/*
 * Caller holds endpoint->lock. Moves the driver's mappings in a bucket to left, to be unmapped.
 * Skips unused ones, which the cache owns. Returns the number of pages.
 */
static u64 pvi_orphan_bucket(struct pvi_endpoint *endpoint, struct hlist_head *bucket,
			     struct list_head *left)
{
	struct pvi_mapping *mapping;
	u64 pages = 0;

	hlist_for_each_entry(mapping, bucket, by_giova) {
		if (mapping->orphan != PVI_OWNED || !mapping->users)
			continue;
		if (mapping->shared) {
			hlist_del(&mapping->by_page);
			endpoint->cached_pages -= mapping->pages;
			mapping->shared = false;
		}
		mapping->orphan = PVI_BEING_UNMAPPED;
		list_add_tail(&mapping->list, left);
		pages += mapping->pages;
		endpoint->live--;
		endpoint->orphans++;
	}
	return pages;
}

/*
 * Unmaps these mappings. Their addresses stay reserved until the unbound driver unmaps them, or
 * forever if the host has not confirmed.
 */
static void pvi_orphans_unmap(struct pvi_endpoint *endpoint, struct list_head *left)
{
	struct pvi_poll_timeout timeout = { .may_sleep = true };
	struct pvi_mapping *mapping, *next;
	unsigned long flags;
	int err;

	if (list_empty(left))
		return;
	err = pvi_queue_unmap(endpoint, left, &timeout);
	if (err)
		pvi_failed(endpoint, "an unmap of what a driver left", err, 0);
	list_for_each_entry_safe(mapping, next, left, list) {
		spin_lock_irqsave(&endpoint->lock, flags);
		list_del(&mapping->list);
		mapping->orphan = PVI_UNMAPPED;
		if (err || !mapping->users)
			pvi_orphan_free(endpoint, mapping, err);
		spin_unlock_irqrestore(&endpoint->lock, flags);
	}
}

/*
 * Called when the endpoint's driver has unbound. Evicts all unused mappings. Unmaps the driver's
 * remaining mappings too, because no driver controls the device's accesses any more. Their
 * addresses stay reserved: a later unmap (page_pool does this) must not affect another driver's
 * mapping.
 */
void pvi_cache_unbind(struct pvi_endpoint *endpoint)
{
	size_t buckets = (size_t)1 << endpoint->table_bits;
	unsigned long flags;
	LIST_HEAD(left);
	u64 pages = 0;
	u64 count;
	size_t i;

	pvi_cache_evict_unused(endpoint);
	count = READ_ONCE(endpoint->live);
	if (!count)
		return;
	dev_warn(&endpoint->pvi->vdev->dev,
		 "%s: the driver left %llu mappings: they are unmapped, and their addresses stay reserved\n",
		 endpoint->name, count);
	for (i = 0; i < buckets; i++) {
		spin_lock_irqsave(&endpoint->lock, flags);
		pages += pvi_orphan_bucket(endpoint, &endpoint->by_giova[i], &left);
		spin_unlock_irqrestore(&endpoint->lock, flags);
		cond_resched();
		if (pages < endpoint->pvi->pages_max)
			continue;
		pvi_orphans_unmap(endpoint, &left);
		pages = 0;
	}
	pvi_orphans_unmap(endpoint, &left);
	/* Mappings that became unused in the meantime. */
	pvi_cache_evict_unused(endpoint);
}
