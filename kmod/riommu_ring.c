// SPDX-License-Identifier: GPL-2.0-only
/*
 * A ring: a map writes two words, an unmap clears one and invalidates the ring. Slots become free
 * in any order. They are used again in the order in which they became free, so drivers that unmap
 * in order use them in order, and the IOMMU's prefetch finds the next one.
 */
#include <linux/slab.h>

#include "riommu.h"

int rio_ring_init(struct rio_ring *ring, u16 number, u32 slots)
{
	u32 slot;

	spin_lock_init(&ring->lock);
	ring->number = number;
	ring->direction = (number != RIO_RING_WRITE ? RIO_READ : 0) |
			  (number != RIO_RING_READ ? RIO_WRITE : 0);
	ring->slots = slots;
	ring->table = alloc_pages_exact(slots * sizeof(*ring->table), GFP_KERNEL | __GFP_ZERO);
	ring->free = kvmalloc_array(slots, sizeof(*ring->free), GFP_KERNEL);
	if (!ring->table || !ring->free)
		return -ENOMEM;
	for (slot = 0; slot < slots; slot++)
		ring->free[slot] = slot;
	ring->free_count = slots;
	return 0;
}

void rio_ring_free(struct rio_ring *ring)
{
	if (ring->table)
		free_pages_exact(ring->table, ring->slots * sizeof(*ring->table));
	kvfree(ring->free);
}

/*
 * Writes an invalidation and waits until no access that used an old entry is in progress. The read
 * is necessary: a write to the bus may be posted. Returns false if the IOMMU does not answer.
 */
bool rio_invalidate(struct rio *rio, u64 word)
{
	/* Entries in memory change before the IOMMU reads them again. */
	wmb();
	writeq(word, rio->regs + RIO_REG_INV);
	return readl(rio->regs + RIO_REG_STS) != U32_MAX;
}

/* Returns the address of byte offset of the buffer, or DMA_MAPPING_ERROR if no slot is free. */
dma_addr_t rio_ring_map(struct rio_ring *ring, u64 buffer, u64 bytes, u32 offset)
{
	struct rio_entry *entry;
	unsigned long flags;
	u32 slot;

	spin_lock_irqsave(&ring->lock, flags);
	if (!ring->free_count) {
		ring->full++;
		spin_unlock_irqrestore(&ring->lock, flags);
		return DMA_MAPPING_ERROR;
	}
	slot = ring->free[ring->free_first];
	if (++ring->free_first == ring->slots)
		ring->free_first = 0;
	ring->free_count--;
	ring->maps++;
	entry = &ring->table[slot];
	WRITE_ONCE(entry->first, cpu_to_le64(buffer));
	/* The word with `valid` is the last one. */
	smp_wmb();
	WRITE_ONCE(entry->second, cpu_to_le64(rio_rpte_second(bytes, ring->direction)));
	spin_unlock_irqrestore(&ring->lock, flags);
	return rio_iova(ring->number, slot, offset);
}

static void rio_slot_free(struct rio_ring *ring, u32 slot)
{
	u32 last = ring->free_first + ring->free_count;

	if (last >= ring->slots)
		last -= ring->slots;
	ring->free[last] = slot;
	ring->free_count++;
}

/* On true, the device can no longer access the buffer. */
bool rio_ring_unmap(struct rio_endpoint *endpoint, dma_addr_t iova)
{
	u16 number = rio_iova_ring(iova);
	u32 slot = rio_iova_slot(iova);
	struct rio_ring *ring;
	unsigned long flags;
	bool is_complete;

	if (number == RIO_RING_NONE || number >= RIO_RINGS)
		return false;
	ring = &endpoint->rings[number];
	/* Of several unmaps of a slot, one finds its entry valid. It needs no lock for that. */
	if (slot >= ring->slots || !xchg(&ring->table[slot].second, 0)) {
		spin_lock_irqsave(&ring->lock, flags);
		ring->bad++;
		spin_unlock_irqrestore(&ring->lock, flags);
		return false;
	}
	is_complete = rio_invalidate(endpoint->rio, rio_inv_ring(endpoint->id, number));

	/* A slot is used again only after the invalidation. */
	spin_lock_irqsave(&ring->lock, flags);
	ring->unmaps++;
	ring->invalidations++;
	if (is_complete)
		rio_slot_free(ring, slot);
	else
		ring->lost++;
	spin_unlock_irqrestore(&ring->lock, flags);
	return is_complete;
}
