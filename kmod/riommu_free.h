/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The free slots of a ring, first in, first out, without a lock. Drivers that unmap in order use
 * the slots in order, and the IOMMU's prefetch finds the next one.
 *
 * Position p is in cell p modulo their number. A cell holds the position and the slot, so one
 * compare-and-exchange fills it and no position is filled twice. A cell is not cleared when its
 * slot is taken: it is overwritten a lap later. There are at least as many cells as slots, and the
 * slot that is put is not in the queue, so the slot in the overwritten cell has been taken.
 */
#ifndef RIOMMU_FREE_H
#define RIOMMU_FREE_H

#include <linux/cache.h>
#include <linux/types.h>

#define RIO_NO_SLOT	U32_MAX

/* The free slots of a ring. */
struct rio_slot_queue {
	/* Low half of the position in bits 32 to 63, slot in bits 0 to 31. */
	u64 *cells;
	/* Number of cells, a power of two, minus 1. */
	u32 mask;
	/* Positions that were taken: each is a map. */
	u64 head ____cacheline_aligned_in_smp;
	/* Positions that were filled. It lags while a put is in progress. */
	u64 tail ____cacheline_aligned_in_smp;
};

static __always_inline u64 rio_cell(u64 position, u32 slot)
{
	return position << 32 | slot;
}

/* Fills the queue with all slots. There are mask + 1 cells. */
static inline void rio_slot_queue_fill(struct rio_slot_queue *queue, u32 slots)
{
	u64 i;

	for (i = 0; i <= queue->mask; i++)
		queue->cells[i] = i < slots ? rio_cell(i, i) : rio_cell(i - queue->mask - 1, 0);
	queue->head = 0;
	queue->tail = slots;
}

/* Returns false if no slot is free. */
static __always_inline bool rio_slot_queue_try_take(struct rio_slot_queue *queue, u32 *slot)
{
	u64 head = READ_ONCE(queue->head);

	for (;;) {
		u64 cell = READ_ONCE(queue->cells[head & queue->mask]);
		u64 now;

		if (likely(cell >> 32 == (u32)head)) {
			if (likely(try_cmpxchg(&queue->head, &head, head + 1))) {
				*slot = cell;
				return true;
			}
			continue;
		}
		/*
		 * Orders the read of the cell before the second read of head. Pairs with the
		 * try_cmpxchg() of head here and of the cell in rio_slot_queue_put(): a cell with a
		 * later position is visible only after the head that passed this one. So if head
		 * is unchanged, the cell had not been filled, and no slot was free.
		 */
		smp_rmb();
		now = READ_ONCE(queue->head);
		if (now == head)
			return false;
		head = now;
	}
}

/* Returns RIO_NO_SLOT if no slot is free. */
static __always_inline u32 rio_slot_queue_take(struct rio_slot_queue *queue)
{
	u32 slot;

	return rio_slot_queue_try_take(queue, &slot) ? slot : RIO_NO_SLOT;
}

static __always_inline void rio_slot_queue_put(struct rio_slot_queue *queue, u32 slot)
{
	u64 tail = READ_ONCE(queue->tail);

	for (;;) {
		u64 *cell = &queue->cells[tail & queue->mask];
		u64 old = READ_ONCE(*cell);

		if (likely(old >> 32 == (u32)(tail - queue->mask - 1)) &&
		    likely(try_cmpxchg(cell, &old, rio_cell(tail, slot)))) {
			cmpxchg(&queue->tail, tail, tail + 1);
			return;
		}
		/* Another put has filled this position, and may not have advanced the tail yet. */
		cmpxchg(&queue->tail, tail, tail + 1);
		tail = READ_ONCE(queue->tail);
	}
}

#endif
