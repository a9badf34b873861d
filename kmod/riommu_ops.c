// SPDX-License-Identifier: GPL-2.0-only
/*
 * Maps and unmaps of drivers: the functions of the engine that core_ops.h needs. A buffer has a
 * slot of its own, so a device reaches its bytes only, unless it needs low bits of their address.
 * Such a device is refused if it is untrusted.
 */
#include <linux/dma-mapping.h>
#include <linux/scatterlist.h>

#include "riommu_ring.h"

/* Ring 3 uses bits 48 and 49. */
#define RIO_ADDRESS_MASK	DMA_BIT_MASK(50)
/* Well below the largest buffer of a slot. */
#define RIO_MAPPING_BYTES	(512UL << 20)

/* For an untrusted device whose slots would begin before its buffers. */
static noinline dma_addr_t rio_map_refused(struct device *dev)
{
	dev_err_ratelimited(dev,
			    "riommu: map refused: untrusted device, bytes before the buffer\n");
	return DMA_MAPPING_ERROR;
}

/*
 * Slow path of a map: a mode with bursts, or a slot that begins before its buffer. noinline, so
 * that the strict map saves no callee-saved registers.
 */
static noinline dma_addr_t rio_map_slow(struct device *dev, struct rio_ring *ring, u64 buffer,
					u64 bytes, u32 offset, unsigned long attrs)
{
	u32 slot;

	if (unlikely(offset) && to_pci_dev(dev)->untrusted)
		return rio_map_refused(dev);
	slot = rio_slot_queue_take(&ring->free_slots);
	if (unlikely(slot == RIO_NO_SLOT)) {
		slot = rio_burst_take(ring);
		if (slot == RIO_NO_SLOT) {
			atomic64_inc(&ring->full);
			return DMA_MAPPING_ERROR;
		}
	}
	if (rio_mode == RIO_BURST && bytes <= RIO_SHADOW_BYTES && !offset &&
	    rio_burst_needs_shadow(buffer, bytes))
		buffer = rio_shadow_map(ring, slot, buffer, bytes, attrs);
	return rio_slot_set(ring, slot, buffer, bytes, offset);
}

/* Returns DMA_MAPPING_ERROR if no slot is free. */
static __always_inline dma_addr_t rio_map(struct device *dev, phys_addr_t phys, size_t size,
					  enum dma_data_direction direction, unsigned long attrs)
{
	struct rio_ring *ring = rio_ring_for(rio_endpoint_of(dev), direction);
	/* Some devices (NVMe) need these low bits of the address; the slot then begins earlier. */
	u32 offset = phys & core_min_align_mask(dev);
	u32 slot;

	if (unlikely(!size || size > RIO_MAPPING_BYTES))
		return DMA_MAPPING_ERROR;
	/* One branch for both: strict is 0. */
	if (rio_mode | offset)
		return rio_map_slow(dev, ring, phys - offset, size + offset, offset, attrs);
	if (unlikely(!rio_slot_queue_try_take(&ring->free_slots, &slot))) {
		atomic64_inc(&ring->full);
		return DMA_MAPPING_ERROR;
	}
	return rio_slot_set(ring, slot, phys, size, 0);
}

static noinline void rio_unmap_failed(struct device *dev, dma_addr_t address)
{
	dev_err_ratelimited(dev,
			    "riommu: unmap failed: %pad not mapped, or IOMMU does not answer\n",
			    &address);
}

/* An unmap in a mode with bursts. */
static noinline void rio_unmap_in_burst(struct device *dev, dma_addr_t address,
					unsigned long attrs)
{
	struct rio_endpoint *endpoint = rio_endpoint_of(dev);
	struct rio_ring *ring = rio_ring_of(endpoint, address);
	struct rio_chain chain = rio_chain();
	u32 slot = rio_iova_slot(address);
	u64 second = ring ? rio_slot_clear(ring, slot) : 0;
	bool is_complete;

	if (likely(second)) {
		rio_chain_add(ring, &chain, slot, second, attrs);
		is_complete = rio_burst_unmap(endpoint, ring, &chain);
	} else {
		is_complete = ring && rio_ring_unmap_orphan(ring, slot);
	}
	if (!is_complete)
		rio_unmap_failed(dev, address);
}

/*
 * Slow path of a strict unmap. The address belongs to another ring, or its slot is not valid: never
 * mapped, or left by a driver that has unbound.
 */
static noinline void rio_unmap_slow(struct device *dev, dma_addr_t address,
				    struct rio_ring *tried)
{
	struct rio_endpoint *endpoint = rio_endpoint_of(dev);
	bool is_complete;

	if (rio_ring_of(endpoint, address) == tried)
		is_complete = rio_ring_unmap_orphan(tried, rio_iova_slot(address));
	else
		is_complete = rio_ring_unmap(endpoint, address);
	if (!is_complete)
		rio_unmap_failed(dev, address);
}

static __always_inline void rio_unmap(struct device *dev, dma_addr_t address, size_t size,
				      enum dma_data_direction direction, unsigned long attrs)
{
	struct rio_ring *ring = rio_ring_for(rio_endpoint_of(dev), direction);
	u64 slot = rio_ring_slot(ring, address);

	if (rio_mode != RIO_STRICT)
		rio_unmap_in_burst(dev, address, attrs);
	else if (unlikely(!rio_slot_clear(ring, slot)))
		rio_unmap_slow(dev, address, ring);
	else if (unlikely(!rio_slot_release(ring, slot)))
		rio_unmap_failed(dev, address);
}

/* Without a burst, invalidates the ring once, after all entries are cleared. */
static void rio_unmap_list(struct device *dev, struct scatterlist *list, int nents,
			   enum dma_data_direction direction, unsigned long attrs)
{
	struct rio_endpoint *endpoint = rio_endpoint_of(dev);
	struct rio_ring *ring = rio_ring_for(endpoint, direction);
	struct rio_chain chain = rio_chain();
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i) {
		dma_addr_t address = sg_dma_address(entry);
		u32 slot = rio_iova_slot(address);
		u64 second = 0;

		if (likely(rio_ring_of(endpoint, address) == ring))
			second = rio_slot_clear(ring, slot);
		if (likely(second))
			rio_chain_add(ring, &chain, slot, second, attrs);
		else
			rio_unmap(dev, address, 0, direction, attrs);
	}
	if (chain.count && !rio_burst_unmap(endpoint, ring, &chain))
		rio_unmap_failed(dev, sg_dma_address(list));
}

static int rio_map_list(struct device *dev, struct scatterlist *list, int nents,
			enum dma_data_direction direction, unsigned long attrs)
{
	/* A retry cannot succeed. */
	if ((u32)nents > rio_ring_for(rio_endpoint_of(dev), direction)->slots)
		return -EINVAL;
	return core_map_each(dev, list, nents, direction, attrs, RIO_MAPPING_BYTES, rio_map,
			     rio_unmap_list);
}

/* The mask of a driver that sets none has 32 bits, and cuts the addresses of rings. */
static noinline dma_addr_t rio_mask_refused(struct device *dev, u64 mask)
{
	dev_err_ratelimited(dev,
			    "riommu: coherent memory refused: DMA mask %#llx is below %#llx\n",
			    mask, RIO_ADDRESS_MASK);
	return DMA_MAPPING_ERROR;
}

static dma_addr_t rio_map_memory(struct device *dev, phys_addr_t phys, size_t size,
				 enum dma_data_direction direction, unsigned long attrs,
				 bool *is_reached)
{
	u64 mask = min_not_zero(dev->coherent_dma_mask, dev->bus_dma_limit);

	if (mask < RIO_ADDRESS_MASK)
		return rio_mask_refused(dev, mask);
	/*
	 * Coherent memory has no offset. Fail nevertheless, so that probe fails: each streaming map
	 * of this device would be refused unless its buffer is aligned.
	 */
	if (core_min_align_mask(dev) && to_pci_dev(dev)->untrusted)
		return rio_map_refused(dev);
	return rio_map(dev, phys, size, direction, attrs);
}

static bool rio_unmap_memory(struct device *dev, dma_addr_t address)
{
	if (rio_ring_unmap(rio_endpoint_of(dev), address))
		return true;
	rio_unmap_failed(dev, address);
	return false;
}

static int rio_dma_supported(struct device *dev, u64 mask)
{
	return mask >= RIO_ADDRESS_MASK;
}

static u64 rio_required_mask(struct device *dev)
{
	return RIO_ADDRESS_MASK;
}

static size_t rio_max_mapping_size(struct device *dev)
{
	return RIO_MAPPING_BYTES;
}

#define ENGINE(name) rio_##name
#include "core_ops.h"

/* Only burst has shadows to sync. In the other modes, the DMA core skips dma_sync_*(). */
const struct dma_map_ops rio_burst_ops = {
	CORE_OPERATIONS,
	.sync_single_for_cpu = rio_sync_for_cpu,
	.sync_single_for_device = rio_sync_for_device,
	.sync_sg_for_cpu = rio_sync_list_for_cpu,
	.sync_sg_for_device = rio_sync_list_for_device,
};
