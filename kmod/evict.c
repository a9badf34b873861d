// SPDX-License-Identifier: GPL-2.0-only
/*
 * Removal of mappings: at their last unmap, at expiry, to make room, or on driver unbind. A lock is
 * held for at most PVI_LOCKED_STEPS mappings, and never during a request to the host. A map
 * makes at most one request for room; the worker does the rest.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "hit.h"
#include "pviommu.h"

/* Maximum number of mappings processed while holding the lock. */
#define PVI_LOCKED_STEPS	256
/* Pages that a map evicts to make room: one request of an ordinary slot. */
#define PVI_ROOM_PAGES		128
/* Share of the limit that the worker evicts when the cache is full. */
#define PVI_EVICT_SHARE		16

/*
 * Moves the oldest unused mappings of a shard to @evicted, if they lost their last user in cycle
 * @max_cycle or earlier: up to @pages pages, and at most PVI_LOCKED_STEPS mappings. If
 * @one_at_least, moves the first one whatever its size. Returns the number of pages moved.
 */
static u64 pvi_collect_unused(struct pvi_endpoint *endpoint, struct pvi_shard *shard,
			      u64 max_cycle, u64 pages, bool one_at_least,
			      u64 __percpu *counter, struct list_head *evicted)
{
	struct pvi_mapping *mapping, *next;
	unsigned int steps = 0;
	LIST_HEAD(collected);
	unsigned long flags;
	u64 count = 0;
	u64 taken = 0;

	spin_lock_irqsave(&shard->page_lock, flags);
	list_for_each_entry_safe(mapping, next, &shard->unused, list) {
		if (mapping->cycle > max_cycle || steps++ == PVI_LOCKED_STEPS)
			break;
		if ((taken || !one_at_least) &&
		    (taken >= pages || mapping->pages > pages - taken))
			break;
		hlist_del(&mapping->by_page);
		list_move_tail(&mapping->list, &collected);
		taken += mapping->pages;
		count++;
	}
	spin_unlock_irqrestore(&shard->page_lock, flags);
	if (!taken)
		return 0;
	pvi_unhash_giovas(endpoint, &collected);
	list_splice_tail(&collected, evicted);
	atomic_long_sub(taken, &endpoint->cached_pages);
	this_cpu_sub(endpoint->counts->kept, count);
	this_cpu_sub(endpoint->counts->kept_pages, taken);
	this_cpu_add(*counter, count);
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

/* Queues the worker to make room, if any mapping is unused. */
void pvi_request_room(struct pvi_endpoint *endpoint)
{
	if (!pvi_count(&endpoint->counts->kept))
		return;
	WRITE_ONCE(endpoint->room_requested, true);
	queue_work(pvi_workqueue, &endpoint->trim);
}

/*
 * Called if a map finds no addresses or the host has no room. Evicts the oldest unused mappings
 * with one request, which a caller that cannot sleep can wait for. Each call starts with the next
 * shard. The worker evicts more. Returns true if a retry is worthwhile.
 */
bool pvi_make_room(struct pvi_endpoint *endpoint, struct pvi_poll_timeout *timeout)
{
	unsigned int first = READ_ONCE(endpoint->next_shard);
	u64 left = PVI_ROOM_PAGES;
	LIST_HEAD(evicted);
	unsigned int i;

	WRITE_ONCE(endpoint->next_shard, first + 1);
	for (i = 0; i < endpoint->shard_count && left; i++) {
		unsigned int at = (first + i) & (endpoint->shard_count - 1);
		u64 taken = pvi_collect_unused(endpoint, &endpoint->shards[at], U64_MAX, left,
					       list_empty(&evicted), &endpoint->counts->forced,
					       &evicted);

		left -= min(left, taken);
	}
	pvi_request_room(endpoint);
	return !list_empty(&evicted) && !pvi_mappings_release(endpoint, &evicted, timeout);
}

/* Sleepable context only. */
static void pvi_release_sleeping(struct pvi_endpoint *endpoint, struct list_head *evicted)
{
	struct pvi_poll_timeout timeout = { .may_sleep = true };

	pvi_mappings_release(endpoint, evicted, &timeout);
}

/*
 * Sleepable context only. Evicts mappings that lost their last user in cycle @max_cycle or earlier,
 * the oldest of each shard first, up to @pages pages of each but at least one mapping. Each request
 * is as large as possible.
 */
static void pvi_evict(struct pvi_endpoint *endpoint, u64 max_cycle, u64 pages,
		      u64 __percpu *counter)
{
	LIST_HEAD(evicted);
	u64 batch = 0;
	unsigned int i;

	for (i = 0; i < endpoint->shard_count; i++) {
		bool one_at_least = true;
		u64 left = pages;
		u64 taken;

		do {
			taken = pvi_collect_unused(endpoint, &endpoint->shards[i], max_cycle, left,
						   one_at_least, counter, &evicted);
			one_at_least = false;
			batch += taken;
			left -= min(left, taken);
			if (batch >= endpoint->pvi->pages_max) {
				pvi_release_sleeping(endpoint, &evicted);
				batch = 0;
			}
			cond_resched();
		} while (taken && left);
	}
	pvi_release_sleeping(endpoint, &evicted);
}

/* Called when cycle @cycle has begun. Removes mappings that have been unused for C whole cycles. */
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle)
{
	if (cycle > pvi_cycles)
		pvi_evict(endpoint, cycle - pvi_cycles - 1, U64_MAX, &endpoint->counts->expired);
}

/* Evicts a sixteenth of the limit before expiry, the same part of it from each shard. */
void pvi_cache_evict_share(struct pvi_endpoint *endpoint)
{
	u64 pages = DIV_ROUND_UP(pvi_cache_pages, PVI_EVICT_SHARE * endpoint->shard_count);

	pvi_evict(endpoint, U64_MAX, pages, &endpoint->counts->forced);
}

void pvi_cache_evict_unused(struct pvi_endpoint *endpoint)
{
	pvi_evict(endpoint, U64_MAX, U64_MAX, &endpoint->counts->forced);
}

/* Work that a map in interrupt context cannot wait for. */
void pvi_trim_work(struct work_struct *work)
{
	struct pvi_endpoint *endpoint = container_of(work, struct pvi_endpoint, trim);

	pvi_cache_expire(endpoint, READ_ONCE(endpoint->pvi->cycle));
	if (xchg(&endpoint->room_requested, false))
		pvi_cache_evict_share(endpoint);
}

/*
 * Caller holds its giova_lock. Removes a driver's mapping from the cache. Returns false if it is
 * unused, so that the cache owns it.
 */
static bool pvi_uncache(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping)
{
	struct pvi_shard *shard = pvi_page_shard(endpoint, mapping);
	bool is_used;

	spin_lock(&shard->page_lock);
	is_used = mapping->users;
	if (is_used)
		hlist_del(&mapping->by_page);
	spin_unlock(&shard->page_lock);
	if (!is_used)
		return false;
	atomic_long_sub(mapping->pages, &endpoint->cached_pages);
	mapping->shared = false;
	return true;
}

/*
 * Caller holds the bucket's giova_lock. Moves the driver's mappings in it to @orphans, to be
 * unmapped. Returns the number of pages.
 */
static u64 pvi_orphan_bucket(struct pvi_endpoint *endpoint, struct hlist_head *bucket,
			     struct list_head *orphans)
{
	struct pvi_mapping *mapping;
	u64 pages = 0;

	hlist_for_each_entry(mapping, bucket, by_giova) {
		if (mapping->orphan != PVI_OWNED ||
		    (mapping->shared && !pvi_uncache(endpoint, mapping)))
			continue;
		mapping->orphan = PVI_BEING_UNMAPPED;
		list_add_tail(&mapping->list, orphans);
		pages += mapping->pages;
		this_cpu_dec(endpoint->counts->live);
		atomic_long_inc(&endpoint->orphans);
	}
	return pages;
}

/*
 * Unmaps these mappings. Their addresses stay reserved until the unbound driver unmaps them, or
 * forever if the host has not confirmed.
 */
static void pvi_orphans_unmap(struct pvi_endpoint *endpoint, struct list_head *orphans)
{
	struct pvi_poll_timeout timeout = { .may_sleep = true };
	struct pvi_mapping *mapping, *next;
	unsigned long flags;
	int err;

	if (list_empty(orphans))
		return;
	err = pvi_queue_unmap(endpoint, orphans, &timeout);
	if (err)
		pvi_failed(endpoint, "an unmap of orphaned mappings", err, 0);
	list_for_each_entry_safe(mapping, next, orphans, list) {
		struct pvi_shard *shard =
			pvi_shard_of(endpoint, pvi_giova_index(endpoint, mapping->giova));

		spin_lock_irqsave(&shard->giova_lock, flags);
		list_del(&mapping->list);
		mapping->orphan = PVI_UNMAPPED;
		if (err || !mapping->users)
			pvi_orphan_free(endpoint, mapping, err);
		spin_unlock_irqrestore(&shard->giova_lock, flags);
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
	LIST_HEAD(orphans);
	u64 pages = 0;
	u64 count;
	size_t i;

	pvi_cache_evict_unused(endpoint);
	count = pvi_count(&endpoint->counts->live);
	if (!count)
		return;
	dev_warn(&endpoint->pvi->vdev->dev,
		 "%s: the driver left %llu mappings, now unmapped; their addresses stay reserved\n",
		 endpoint->core.name, count);
	for (i = 0; i < buckets; i++) {
		struct pvi_shard *shard = pvi_shard_of(endpoint, i);

		spin_lock_irqsave(&shard->giova_lock, flags);
		pages += pvi_orphan_bucket(endpoint, &endpoint->by_giova[i], &orphans);
		spin_unlock_irqrestore(&shard->giova_lock, flags);
		cond_resched();
		if (pages < endpoint->pvi->pages_max)
			continue;
		pvi_orphans_unmap(endpoint, &orphans);
		pages = 0;
	}
	pvi_orphans_unmap(endpoint, &orphans);
	/* Mappings that became unused in the meantime. */
	pvi_cache_evict_unused(endpoint);
}
