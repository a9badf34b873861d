/* SPDX-License-Identifier: GPL-2.0-only */
/* The part of a ring that each map and unmap runs. */
#ifndef RIOMMU_RING_H
#define RIOMMU_RING_H

#include "riommu.h"

static __always_inline struct rio_endpoint *rio_endpoint_of(struct device *dev)
{
	return container_of(core_endpoint_of(dev), struct rio_endpoint, core);
}

/*
 * Writes an invalidation and waits until no access that used an old entry is in progress. MMIO
 * writes are posted: the read waits for completion. Returns false if the IOMMU does not answer.
 */
static __always_inline bool rio_invalidate(void __iomem *regs, u64 word)
{
	/* Orders the stores to the tables before the write of INV. */
	wmb();
	writeq(word, regs + RIO_REG_INV);
	return readl(regs + RIO_REG_STS) != U32_MAX;
}

static __always_inline bool rio_ring_invalidate(struct rio_ring *ring)
{
	atomic64_inc(&ring->invalidations);
	return rio_invalidate(ring->regs, ring->inv_word);
}

static __always_inline struct rio_ring *rio_ring_for(struct rio_endpoint *endpoint,
						     enum dma_data_direction direction)
{
	/* The enum has four values. The mask replaces a check of the array's bounds. */
	return endpoint->by_direction[direction & DMA_NONE];
}

/* Makes a slot's entry valid. Returns the address of byte offset of the buffer. */
static __always_inline dma_addr_t rio_slot_set(struct rio_ring *ring, u32 slot, u64 buffer,
					       u64 bytes, u32 offset)
{
	struct rio_entry *entry = &ring->table[slot];

	WRITE_ONCE(entry->first, cpu_to_le64(buffer));
	/* Orders the address before the word with the valid bit. */
	smp_wmb();
	WRITE_ONCE(entry->second, cpu_to_le64(ring->rpte_flags | bytes));
	return ring->iova_base | rio_iova(0, slot, offset);
}

/* The ring of an address, or NULL. Its slot may not exist. */
static __always_inline struct rio_ring *rio_ring_of(struct rio_endpoint *endpoint, dma_addr_t iova)
{
	u16 number = rio_iova_ring(iova);

	if (unlikely(number == RIO_RING_NONE || number >= RIO_RINGS))
		return NULL;
	return &endpoint->rings[number];
}

/* The slot of an address. For an address of another ring, a number that is not below slots. */
static __always_inline u64 rio_ring_slot(struct rio_ring *ring, dma_addr_t iova)
{
	return (iova - ring->iova_base) >> RIO_IOVA_SLOT_SHIFT;
}

/*
 * Clears the slot's entry. Returns its second word, or 0 if it was not valid. If several callers
 * clear a slot, one of them gets the word.
 */
static __always_inline u64 rio_slot_clear(struct rio_ring *ring, u64 slot)
{
	return likely(slot < ring->slots) ? le64_to_cpu(xchg(&ring->table[slot].second, 0)) : 0;
}

static __always_inline struct rio_chain rio_chain(void)
{
	return (struct rio_chain){ .last = RIO_NO_SLOT, .is_deferred = true };
}

/* Adds a cleared slot, whose entry had this second word. */
static __always_inline void rio_chain_add(struct rio_ring *ring, struct rio_chain *chain, u32 slot,
					  u64 second, unsigned long attrs)
{
	if (!chain->count++)
		chain->first = slot;
	ring->states[slot].next = chain->last;
	chain->last = slot;
	if (!rio_burst_defers(ring, slot, second, attrs))
		chain->is_deferred = false;
}

/* Call this after the invalidation. If it did not complete, the slot is never used again. */
static __always_inline void rio_slot_put(struct rio_ring *ring, u32 slot, bool is_complete)
{
	if (likely(is_complete))
		rio_slot_queue_put(&ring->free_slots, slot);
	else
		atomic64_inc(&ring->lost);
}

/* Invalidates a cleared slot. On true, the device can no longer access the buffer. */
static __always_inline bool rio_slot_release(struct rio_ring *ring, u32 slot)
{
	bool is_complete = rio_ring_invalidate(ring);

	rio_slot_put(ring, slot, is_complete);
	return is_complete;
}

/* On true, the device can no longer access the buffer, in all modes. */
static __always_inline bool rio_ring_unmap(struct rio_endpoint *endpoint, dma_addr_t iova)
{
	struct rio_ring *ring = rio_ring_of(endpoint, iova);
	u32 slot = rio_iova_slot(iova);

	if (unlikely(!ring))
		return false;
	if (unlikely(!rio_slot_clear(ring, slot)))
		return rio_ring_unmap_orphan(ring, slot);
	return rio_slot_release(ring, slot);
}

#endif
