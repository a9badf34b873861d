// SPDX-License-Identifier: GPL-2.0-only
/*
 * Shadows of small buffers whose pages a burst cannot hold: packets, tables of indirect descriptors
 * and statuses, which drivers allocate from slabs. The device uses a copy, which the module frees
 * after the invalidation. Their unmaps wait for the end of the burst like others.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "riommu_ring.h"

/*
 * Returns the address of a shadow for the slot, or that of the buffer: without memory for a shadow,
 * or if the driver refuses one. The unmap of such a slot invalidates at once.
 */
u64 rio_shadow_map(struct rio_ring *ring, u32 slot, u64 buffer, u32 bytes, unsigned long attrs)
{
	struct rio_state *state = &ring->states[slot];

	if (attrs & DMA_ATTR_REQUIRE_COHERENT)
		return buffer;
	state->shadow = kzalloc(bytes, GFP_ATOMIC | __GFP_NOWARN);
	if (!state->shadow)
		return buffer;
	/*
	 * Also for a device that writes: it may write less than the buffer, and the unmap copies
	 * all. Also with DMA_ATTR_SKIP_CPU_SYNC, which the unmap may lack. swiotlb does the same.
	 */
	memcpy(state->shadow, phys_to_virt(buffer), bytes);
	atomic64_inc(&ring->shadows_used);
	state->shadowed = buffer;
	state->shadow_bytes = bytes;
	return virt_to_phys(state->shadow);
}

/* Copies a written shadow to its buffer. The slot is cleared, and later writes are not copied. */
void rio_shadow_unmap(struct rio_ring *ring, u32 slot, unsigned long attrs)
{
	struct rio_state *state = &ring->states[slot];

	if (ring->direction & RIO_WRITE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		memcpy(phys_to_virt(state->shadowed), state->shadow, state->shadow_bytes);
	state->shadow_bytes = 0;
}

/* Call this after the invalidation of the slot. */
void rio_shadow_free(struct rio_state *state)
{
	kfree(state->shadow);
	state->shadow = NULL;
}

static void rio_shadow_sync(struct device *dev, dma_addr_t address, size_t size, bool is_for_cpu)
{
	struct rio_endpoint *endpoint = rio_endpoint_of(dev);
	struct rio_ring *ring = rio_ring_of(endpoint, address);
	u32 offset = rio_iova_offset(address);
	u32 slot = rio_iova_slot(address);
	struct rio_state *state;
	void *shadow, *buffer;

	if (!ring || slot >= ring->slots)
		return;
	state = &ring->states[slot];
	if (offset >= state->shadow_bytes)
		return;
	size = min_t(size_t, size, state->shadow_bytes - offset);
	shadow = state->shadow + offset;
	buffer = phys_to_virt(state->shadowed) + offset;
	if (!is_for_cpu)
		memcpy(shadow, buffer, size);
	else if (ring->direction & RIO_WRITE)
		memcpy(buffer, shadow, size);
}

void rio_sync_for_cpu(struct device *dev, dma_addr_t address, size_t size,
		      enum dma_data_direction direction)
{
	rio_shadow_sync(dev, address, size, true);
}

/* Copies nothing for DMA_FROM_DEVICE: the device may have written to the shadow meanwhile. */
void rio_sync_for_device(struct device *dev, dma_addr_t address, size_t size,
			 enum dma_data_direction direction)
{
	if (direction != DMA_FROM_DEVICE)
		rio_shadow_sync(dev, address, size, false);
}

void rio_sync_list_for_cpu(struct device *dev, struct scatterlist *list, int nents,
			   enum dma_data_direction direction)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		rio_shadow_sync(dev, sg_dma_address(entry), sg_dma_len(entry), true);
}

void rio_sync_list_for_device(struct device *dev, struct scatterlist *list, int nents,
			      enum dma_data_direction direction)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		rio_sync_for_device(dev, sg_dma_address(entry), sg_dma_len(entry), direction);
}
