// SPDX-License-Identifier: GPL-2.0-only
/*
 * Mappings leave: at their last unmap, at the end of their cycles, to make room, or with their
 * driver. The lock is held for at most PVI_LOCKED_STEPS of them, and never while the host is asked.
 * Whoever maps makes one request for room at most; the worker does the rest.
 */
#include <linux/sched.h>
#include <linux/slab.h>

#include "pviommu.h"

/* Mappings that are looked at without letting go of the lock. */
#define PVI_LOCKED_STEPS	256
/* Pages that a map removes from the cache to make room: one request of an ordinary slot. */
#define PVI_ROOM_PAGES		128
/* What the worker removes when the cache is full: this part of the limit. */
#define PVI_SHED_SHARE		16

/*
 * With the lock: moves the oldest of those without users to gone, if they lost their last user in
 * cycle last or before. They have at most so many pages; one_at_least says that the first one goes
 * even so. There are at most PVI_LOCKED_STEPS. How many pages.
 */
static u64 pvi_take_unused(struct pvi_endpoint *endpoint, u64 last, u64 pages, bool one_at_least,
			   u64 *left_by, struct list_head *gone)
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
		pvi_forget(endpoint, mapping);
		list_move_tail(&mapping->list, gone);
		taken += mapping->pages;
		endpoint->kept--;
		endpoint->kept_pages -= mapping->pages;
		(*left_by)++;
	}
	return taken;
}

/* Has the host unmap all these; their addresses are free if it says that it did. */
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *gone,
			 struct pvi_patience *patience)
{
	int err;

	if (list_empty(gone))
		return 0;
	err = pvi_queue_unmap(endpoint, gone, patience);
	if (err)
		pvi_failed(endpoint, "an unmap", err, 0);
	pvi_mappings_free(endpoint, gone, err);
	return err;
}

/* With the lock: the worker makes room, if anything is kept. */
void pvi_want_room(struct pvi_endpoint *endpoint)
{
	if (!endpoint->kept)
		return;
	endpoint->room_wanted = true;
	queue_work(pvi_workqueue, &endpoint->trim);
}

/*
 * A map finds no addresses, or the host has no room: the oldest of what is kept goes with one
 * request, which is what a caller that may not sleep can wait for. The worker removes more.
 * Whether it is worth to try again.
 */
bool pvi_make_room(struct pvi_endpoint *endpoint, struct pvi_patience *patience)
{
	unsigned long flags;
	LIST_HEAD(gone);
	u64 taken;

	spin_lock_irqsave(&endpoint->lock, flags);
	taken = pvi_take_unused(endpoint, U64_MAX, PVI_ROOM_PAGES, true, &endpoint->forced,
				&gone);
	pvi_want_room(endpoint);
	spin_unlock_irqrestore(&endpoint->lock, flags);
	return taken && !pvi_mappings_release(endpoint, &gone, patience);
}

/*
 * Where one may sleep: removes what lost its last user in cycle last or before, the oldest first,
 * up to so many pages, or the first one. The host is asked for as much at once as a request holds.
 */
static void pvi_drop(struct pvi_endpoint *endpoint, u64 last, u64 pages, u64 *left_by)
{
	bool one_at_least = true;
	unsigned long flags;
	u64 taken, batch;

	do {
		struct pvi_patience patience = { .may_sleep = true };
		LIST_HEAD(gone);

		batch = 0;
		do {
			spin_lock_irqsave(&endpoint->lock, flags);
			taken = pvi_take_unused(endpoint, last, pages, one_at_least, left_by,
						&gone);
			spin_unlock_irqrestore(&endpoint->lock, flags);
			one_at_least = false;
			batch += taken;
			pages -= min(pages, taken);
			cond_resched();
		} while (taken && pages && batch < endpoint->pvi->pages_max);
		pvi_mappings_release(endpoint, &gone, &patience);
	} while (batch && pages);
}

/* Cycle number cycle has begun: what was put away in C whole cycles before it goes. */
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle)
{
	if (cycle > pvi_cycles)
		pvi_drop(endpoint, cycle - pvi_cycles - 1, U64_MAX, &endpoint->expired);
}

/* A sixteenth of the limit goes before its time. */
void pvi_cache_shed(struct pvi_endpoint *endpoint)
{
	u64 pages = DIV_ROUND_UP(pvi_cache_pages, PVI_SHED_SHARE);

	pvi_drop(endpoint, U64_MAX, pages, &endpoint->forced);
}

void pvi_cache_drop_unused(struct pvi_endpoint *endpoint)
{
	pvi_drop(endpoint, U64_MAX, U64_MAX, &endpoint->forced);
}

/* What whoever maps in an interrupt cannot wait for. */
void pvi_trim_work(struct work_struct *work)
{
	struct pvi_endpoint *endpoint = container_of(work, struct pvi_endpoint, trim);
	unsigned long flags;
	bool wanted;

	pvi_cache_expire(endpoint, READ_ONCE(endpoint->pvi->cycle));
	spin_lock_irqsave(&endpoint->lock, flags);
	wanted = endpoint->room_wanted;
	endpoint->room_wanted = false;
	spin_unlock_irqrestore(&endpoint->lock, flags);
	if (wanted)
		pvi_cache_shed(endpoint);
}

/*
 * With the lock: those in a bucket that a driver left go to left, to be unmapped. How many pages.
 * Those without users are kept, and not the driver's.
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
 * Has the host unmap these. Their addresses stay taken until the driver that is gone unmaps them;
 * where the host has not confirmed, for good.
 */
static void pvi_orphans_unmap(struct pvi_endpoint *endpoint, struct list_head *left)
{
	struct pvi_patience patience = { .may_sleep = true };
	struct pvi_mapping *mapping, *next;
	unsigned long flags;
	int err;

	if (list_empty(left))
		return;
	err = pvi_queue_unmap(endpoint, left, &patience);
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
 * The endpoint has no driver any more. What is kept goes. What the driver has left mapped is
 * unmapped, too, for nobody owns the device's accesses now; but its addresses stay taken, for it
 * may be unmapped later (page_pool does so), and must not be a later driver's then.
 */
void pvi_cache_abandon(struct pvi_endpoint *endpoint)
{
	size_t buckets = (size_t)1 << endpoint->table_bits;
	unsigned long flags;
	LIST_HEAD(left);
	u64 pages = 0;
	u64 count;
	size_t i;

	pvi_cache_drop_unused(endpoint);
	count = READ_ONCE(endpoint->live);
	if (!count)
		return;
	dev_warn(&endpoint->pvi->vdev->dev,
		 "%s: %llu mappings were left by the driver: they are unmapped, their addresses stay out of use\n",
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
	/* What was put away meanwhile. */
	pvi_cache_drop_unused(endpoint);
}
