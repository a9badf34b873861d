// SPDX-License-Identifier: GPL-2.0-only
/*
 * A ring: a map writes two words, an unmap clears one and invalidates the ring. Slots become free
 * in any order, and only after the invalidation.
 */
#include <linux/log2.h>
#include <linux/slab.h>

#include "riommu_ring.h"

int rio_ring_init(struct rio_endpoint *endpoint, u16 number, u32 slots)
{
	static const enum dma_data_direction directions[RIO_RINGS] = {
		[RIO_RING_READ] = DMA_TO_DEVICE,
		[RIO_RING_WRITE] = DMA_FROM_DEVICE,
		[RIO_RING_BOTH] = DMA_BIDIRECTIONAL,
	};
	struct rio_ring *ring = &endpoint->rings[number];
	u32 cells = roundup_pow_of_two(slots);

	endpoint->by_direction[directions[number]] = ring;
	if (number == RIO_RING_BOTH)
		endpoint->by_direction[DMA_NONE] = ring;
	ring->direction = (number != RIO_RING_WRITE ? RIO_READ : 0) |
			  (number != RIO_RING_READ ? RIO_WRITE : 0);
	ring->iova_base = rio_iova(number, 0, 0);
	ring->rpte_flags = rio_rpte_second(0, ring->direction);
	ring->inv_word = rio_inv_ring(endpoint->id, number);
	ring->regs = endpoint->rio->regs;
	ring->slots = slots;
	ring->pending = RIO_NO_SLOT;
	/* The paper's bursts have about 200 unmaps. */
	ring->burst_slots = clamp(slots / 4, 1, 256);
	ring->table = alloc_pages_exact(slots * sizeof(*ring->table), GFP_KERNEL | __GFP_ZERO);
	ring->states = kvcalloc(slots, sizeof(*ring->states), GFP_KERNEL);
	ring->free_slots.cells = kvcalloc(cells, sizeof(*ring->free_slots.cells), GFP_KERNEL);
	if (!ring->table || !ring->states || !ring->free_slots.cells)
		return -ENOMEM;
	ring->free_slots.mask = cells - 1;
	rio_slot_queue_fill(&ring->free_slots, slots);
	return 0;
}

void rio_ring_free(struct rio_ring *ring)
{
	u32 slot;

	if (ring->table)
		free_pages_exact(ring->table, ring->slots * sizeof(*ring->table));
	for (slot = 0; ring->states && slot < ring->slots; slot++)
		rio_shadow_free(&ring->states[slot]);
	kvfree(ring->states);
	kvfree(ring->free_slots.cells);
}

/*
 * Unmaps a slot whose entry is not valid. Returns true if an earlier driver left the slot and its
 * invalidation completed; the slot is then free.
 */
bool rio_ring_unmap_orphan(struct rio_ring *ring, u32 slot)
{
	if (slot < ring->slots && xchg(&ring->states[slot].is_orphan, false)) {
		bool is_complete = rio_ring_invalidate(ring);

		if (is_complete)
			rio_shadow_free(&ring->states[slot]);
		rio_slot_put(ring, slot, is_complete);
		atomic64_dec(&ring->orphans);
		return is_complete;
	}
	atomic64_inc(&ring->bad);
	return false;
}

/*
 * The endpoint's driver has unbound: unmaps its slots. They stay out of use until they are unmapped
 * by their owners. Returns their number.
 */
u64 rio_ring_unbind(struct rio_ring *ring)
{
	u64 left = 0;
	u32 slot;

	for (slot = 0; slot < ring->slots; slot++) {
		struct rio_state *state = &ring->states[slot];

		if (!READ_ONCE(ring->table[slot].second))
			continue;
		/* An unmap that finds the entry cleared finds the mark. */
		WRITE_ONCE(state->is_orphan, true);
		atomic64_inc(&ring->orphans);
		if (xchg(&ring->table[slot].second, 0)) {
			state->shadow_bytes = 0;
			left++;
		} else if (xchg(&state->is_orphan, false)) {
			atomic64_dec(&ring->orphans);
		}
	}
	if (left)
		rio_ring_invalidate(ring);
	return left;
}
