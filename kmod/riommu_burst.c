// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bursts (rIOMMU, section 4: the driver invalidates at the end of a burst of unmaps). An unmap
 * clears its slot. One invalidation at the end of the burst makes all its slots free. Until then,
 * the IOMMU may still have a copy of a cleared entry.
 *
 * A burst ends when it has burst_slots slots, when a map finds no free slot, with any invalidation
 * of its ring, and after rio_burst_us.
 *
 * With RIO_BURST_PAPER (riommu-as-published.c), it also ends when the present softirq ends, with
 * NAPI polls and completions of blocks, by a tasklet; for a caller that has disabled softirqs, when
 * it enables them. Nothing marks an end in process context with softirqs enabled: its unmaps
 * invalidate at once.
 *
 * With RIO_BURST, no page of a buffer goes to another user before the invalidation: the burst holds
 * a reference, so it need not end with the softirq. Memory whose lifetime is not a count of
 * references (slab, reserved, coherent memory, parts of allocations without compound pages) is
 * invalidated at once, or has a shadow.
 */
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/preempt.h>

#include "riommu_ring.h"

/*
 * Most bytes of a buffer whose pages a burst holds, unless one compound page has all of them. It
 * limits the walk over single pages; slots limit how many compound pages a burst holds.
 */
#define RIO_HELD_BYTES	(64UL << 10)

/*
 * Calls a function for the pages of a buffer, compound pages once. Returns false, and the address
 * where it ended, if the function does. Inlined, so that the function is too.
 */
static __always_inline bool rio_for_pages(u64 from, u64 *end, bool (*function)(struct folio *folio))
{
	u64 at = from & PAGE_MASK;

	while (at < *end) {
		struct folio *folio = page_folio(pfn_to_page(at >> PAGE_SHIFT));
		/* Read the size before the call, which may drop the last reference. */
		u64 next = PFN_PHYS(folio_pfn(folio)) + folio_size(folio);

		if (!function(folio)) {
			*end = at;
			return false;
		}
		at = next;
	}
	return true;
}

static bool rio_can_hold(struct folio *folio)
{
	return !folio_test_reserved(folio) && !page_has_type(&folio->page) &&
	       !folio_is_zone_device(folio) && folio_ref_count(folio);
}

static bool rio_hold(struct folio *folio)
{
	return rio_can_hold(folio) && folio_try_get(folio);
}

static bool rio_drop(struct folio *folio)
{
	folio_put(folio);
	return true;
}

static bool rio_has_pages(u64 buffer, u64 bytes)
{
	u64 first = PHYS_PFN(buffer), last = PHYS_PFN(buffer + bytes - 1);

	if (!pfn_valid(first) || (first != last && !pfn_valid(last)))
		return false;
	return bytes <= RIO_HELD_BYTES ||
	       page_folio(pfn_to_page(first)) == page_folio(pfn_to_page(last));
}

/*
 * Returns true if a burst cannot hold the buffer's pages. False for memory without a struct page:
 * there is nothing to copy, and its unmap is not deferred.
 */
bool rio_burst_needs_shadow(u64 buffer, u32 bytes)
{
	u64 end = buffer + bytes;

	return rio_has_pages(buffer, bytes) && !rio_for_pages(buffer, &end, rio_can_hold);
}

/* Holds the pages of a cleared slot, whose entry had this second word. */
static bool rio_burst_hold(struct rio_ring *ring, u32 slot, u64 second)
{
	u64 from = le64_to_cpu(ring->table[slot].first);
	u64 bytes = rio_rpte_bytes(second);
	u64 end = from + bytes;

	if (!rio_has_pages(from, bytes))
		return false;
	if (!rio_for_pages(from, &end, rio_hold)) {
		rio_for_pages(from, &end, rio_drop);
		return false;
	}
	ring->states[slot].held = from;
	ring->states[slot].held_bytes = bytes;
	atomic64_inc(&ring->held);
	return true;
}

/* Returns true if the unmap of this cleared slot can wait for the end of a burst. */
bool rio_burst_defers(struct rio_ring *ring, u32 slot, u64 second, unsigned long attrs)
{
	bool is_shadow = ring->states[slot].shadow_bytes;

	if (is_shadow)
		rio_shadow_unmap(ring, slot, attrs);
	if (rio_is_as_published())
		return in_interrupt();
	return rio_mode == RIO_BURST && (is_shadow || rio_burst_hold(ring, slot, second));
}

/* Puts the slots of a chain after their invalidation, in the order of their unmaps. */
static int rio_chain_put(struct rio_ring *ring, u32 slot, bool is_complete)
{
	u32 first = RIO_NO_SLOT;
	int count = 0;

	while (slot != RIO_NO_SLOT) {
		u32 next = ring->states[slot].next;

		ring->states[slot].next = first;
		first = slot;
		slot = next;
	}
	for (; first != RIO_NO_SLOT; count++) {
		struct rio_state *state = &ring->states[first];
		u64 end = state->held + state->held_bytes;
		u32 next = state->next;

		/* Without an answer, the device may still reach the pages: they are kept. */
		if (is_complete && state->held_bytes)
			rio_for_pages(state->held, &end, rio_drop);
		if (is_complete && state->shadow)
			rio_shadow_free(state);
		state->held_bytes = 0;
		rio_slot_put(ring, first, is_complete);
		first = next;
	}
	return count;
}

/*
 * Ends the ring's burst, and puts the slots of chain with it. The invalidation covers all slots
 * that the exchange took. Returns false if the IOMMU does not answer.
 */
static bool rio_burst_end(struct rio_ring *ring, u32 chain)
{
	u32 pending = xchg(&ring->pending, RIO_NO_SLOT);
	bool is_complete;

	if (pending == RIO_NO_SLOT && chain == RIO_NO_SLOT)
		return true;
	is_complete = rio_ring_invalidate(ring);
	atomic_sub(rio_chain_put(ring, pending, is_complete), &ring->pending_count);
	rio_chain_put(ring, chain, is_complete);
	return is_complete;
}

void rio_burst_end_all(struct rio_endpoint *endpoint)
{
	int i;

	for (i = RIO_RING_READ; i < RIO_RINGS; i++)
		rio_burst_end(&endpoint->rings[i], RIO_NO_SLOT);
}

/* Arms the timer that ends the burst, unless it is armed. */
static void rio_burst_arm_timer(struct rio_endpoint *endpoint)
{
	ktime_t delay = ns_to_ktime((u64)rio_burst_us * NSEC_PER_USEC);

	if (!READ_ONCE(endpoint->is_timer_armed) && !xchg(&endpoint->is_timer_armed, true))
		hrtimer_start(&endpoint->burst_timer, delay, HRTIMER_MODE_REL_HARD);
}

/* Unmaps the cleared slots of a chain. If all of them can wait, they wait for the burst's end. */
bool rio_burst_unmap(struct rio_endpoint *endpoint, struct rio_ring *ring,
		     const struct rio_chain *chain)
{
	u32 old = READ_ONCE(ring->pending);

	if (!chain->is_deferred)
		return rio_burst_end(ring, chain->last);
	do {
		ring->states[chain->first].next = old;
	} while (!try_cmpxchg(&ring->pending, &old, chain->last));
	atomic64_add(chain->count, &ring->deferred);
	if (atomic_add_return(chain->count, &ring->pending_count) >= ring->burst_slots)
		return rio_burst_end(ring, RIO_NO_SLOT);
	rio_burst_arm_timer(endpoint);
	if (rio_is_as_published())
		tasklet_schedule(&endpoint->burst_tasklet);
	return true;
}

/* Called by a map that finds no free slot. Ends the burst, and takes one of its slots. */
u32 rio_burst_take(struct rio_ring *ring)
{
	if (READ_ONCE(ring->pending) == RIO_NO_SLOT)
		return RIO_NO_SLOT;
	rio_burst_end(ring, RIO_NO_SLOT);
	return rio_slot_queue_take(&ring->free_slots);
}

static void rio_burst_tasklet(struct tasklet_struct *tasklet)
{
	rio_burst_end_all(container_of(tasklet, struct rio_endpoint, burst_tasklet));
}

static enum hrtimer_restart rio_burst_timer(struct hrtimer *timer)
{
	struct rio_endpoint *endpoint = container_of(timer, struct rio_endpoint, burst_timer);

	WRITE_ONCE(endpoint->is_timer_armed, false);
	/*
	 * Pairs with the try_cmpxchg() in rio_burst_unmap(): either that unmap then reads
	 * is_timer_armed as false and arms the timer, or rio_burst_end() takes its slots.
	 */
	smp_mb();
	rio_burst_end_all(endpoint);
	return HRTIMER_NORESTART;
}

void rio_burst_init(struct rio_endpoint *endpoint)
{
	tasklet_setup(&endpoint->burst_tasklet, rio_burst_tasklet);
#ifdef RIO_HAVE_HRTIMER_SETUP
	hrtimer_setup(&endpoint->burst_timer, rio_burst_timer, CLOCK_MONOTONIC,
		      HRTIMER_MODE_REL_HARD);
#else
	hrtimer_init(&endpoint->burst_timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_HARD);
	endpoint->burst_timer.function = rio_burst_timer;
#endif
}

/* Call this when no driver unmaps any more. */
void rio_burst_stop(struct rio_endpoint *endpoint)
{
	hrtimer_cancel(&endpoint->burst_timer);
	tasklet_kill(&endpoint->burst_tasklet);
	rio_burst_end_all(endpoint);
}
