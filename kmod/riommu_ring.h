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
 * Writes an invalidation and waits until no access that used an old entry is in progress. The read
 * is necessary: a write to the bus may be posted. Returns false if the IOMMU does not answer.
 */
static __always_inline bool rio_invalidate(struct rio *rio, u64 word)
{
	/* Entries in memory change before the IOMMU reads them again. */
	wmb();
	writeq(word, rio->regs + RIO_REG_INV);
	return readl(rio->regs + RIO_REG_STS) != U32_MAX;
}

static __always_inline bool rio_ring_invalidate(struct rio_endpoint *endpoint,
						struct rio_ring *ring)
{
	atomic64_inc(&ring->invalidations);
	return rio_invalidate(endpoint->rio, rio_inv_ring(endpoint->id, ring->number));
}

/* Returns the address of byte offset of the buffer, or DMA_MAPPING_ERROR if no slot is free. */
static __always_inline dma_addr_t rio_ring_map(struct rio_endpoint *endpoint,
					       struct rio_ring *ring, u64 buffer, u64 bytes,
					       u32 offset, unsigned long attrs)
{
	u32 slot = rio_free_take(&ring->free);
	struct rio_entry *entry;

	if (unlikely(slot == RIO_NO_SLOT)) {
		slot = rio_burst_take(endpoint, ring);
		if (slot == RIO_NO_SLOT) {
			atomic64_inc(&ring->full);
			return DMA_MAPPING_ERROR;
		}
	}
	if (rio_mode == RIO_BURST && bytes <= RIO_SHADOW_BYTES && !offset &&
	    !rio_burst_can_hold(buffer, bytes))
		buffer = rio_shadow_map(ring, slot, buffer, bytes, attrs);
	entry = &ring->table[slot];
	WRITE_ONCE(entry->first, cpu_to_le64(buffer));
	/* The word with `valid` is the last one. */
	smp_wmb();
	WRITE_ONCE(entry->second, cpu_to_le64(rio_rpte_second(bytes, ring->direction)));
	return rio_iova(ring->number, slot, offset);
}

/* The ring of an address, or NULL. Its slot may not exist. */
static __always_inline struct rio_ring *rio_ring_of(struct rio_endpoint *endpoint, dma_addr_t iova)
{
	u16 number = rio_iova_ring(iova);

	if (unlikely(number == RIO_RING_NONE || number >= RIO_RINGS))
		return NULL;
	return &endpoint->rings[number];
}

/* Of several unmaps of a slot, one finds its entry valid and gets its second word, not 0. */
static __always_inline u64 rio_slot_clear(struct rio_ring *ring, u32 slot)
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

/* Call this after the invalidation. A slot without a complete one is never used again. */
static __always_inline void rio_slot_free(struct rio_ring *ring, u32 slot, bool is_complete)
{
	if (likely(is_complete))
		rio_free_put(&ring->free, slot);
	else
		atomic64_inc(&ring->lost);
}

/* On true, the device can no longer access the buffer, in all modes. */
static __always_inline bool rio_ring_unmap(struct rio_endpoint *endpoint, dma_addr_t iova)
{
	struct rio_ring *ring = rio_ring_of(endpoint, iova);
	u32 slot = rio_iova_slot(iova);
	bool is_complete;

	if (unlikely(!ring))
		return false;
	if (unlikely(!rio_slot_clear(ring, slot)))
		return rio_ring_unmap_left(endpoint, ring, slot);
	is_complete = rio_ring_invalidate(endpoint, ring);
	rio_slot_free(ring, slot, is_complete);
	return is_complete;
}

#endif
