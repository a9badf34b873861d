// SPDX-License-Identifier: GPL-2.0-only
/*
 * What drivers call. A buffer's device address is that of its shadow. An unmap invalidates nothing,
 * because the pool stays mapped.
 */
#include <linux/dma-mapping.h>
#include <linux/scatterlist.h>

#include "core.h"
#include "pool_copy.h"

static struct pool *pool_of(struct device *dev)
{
	/* Not get_dma_ops(): these functions are called for devices with operations only. */
	return container_of(dev->dma_ops, struct pool, ops);
}

static noinline void pool_report_bad(struct device *dev, const char *what, dma_addr_t address)
{
	pool_count_bad(pool_of(dev));
	dev_err_ratelimited(dev, "pooldma: %s of %pad, which is not mapped\n", what, &address);
}

/* Interrupts are off, and are restored. A map for which the CPU keeps no slot. */
static noinline __noclone dma_addr_t pool_map_slowly(struct device *dev, phys_addr_t phys,
						     size_t size,
						     enum dma_data_direction direction,
						     unsigned long flags)
{
	u32 mask = core_min_align_mask(dev);
	u32 first = phys & mask;
	struct pool_slot *slot = pool_take_slowly(pool_of(dev), pool_class(first, size, mask));

	local_irq_restore(flags);
	return slot ? pool_fill(slot, phys, first, size, direction) : DMA_MAPPING_ERROR;
}

/* The address has the same bits as phys where the device's mask has ones. */
static __always_inline dma_addr_t pool_map(struct device *dev, phys_addr_t phys, size_t size,
					   enum dma_data_direction direction, unsigned long attrs)
{
	u32 mask = core_min_align_mask(dev);
	u32 first = phys & mask;
	unsigned long class = pool_class(first, size, mask);
	struct pool_slot *slot;
	unsigned long flags;

	if (unlikely(class >= POOL_CLASSES))
		return DMA_MAPPING_ERROR;
	local_irq_save(flags);
	if (unlikely(!pool_take(pool_of(dev), class, &slot)))
		return pool_map_slowly(dev, phys, size, direction, flags);
	local_irq_restore(flags);
	return pool_fill(slot, phys, first, size, direction);
}

/* Frees a claimed slot, after a copy to the driver's buffer of this size. */
static __always_inline void pool_return(struct pool *pool, struct pool_slot *slot, u32 bytes,
					size_t size, enum dma_data_direction direction,
					unsigned long attrs)
{
	if (direction != DMA_TO_DEVICE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		pool_put_copied(pool, slot, size, bytes);
	else
		pool_put(pool, slot);
}

/* The buffer does not begin with its slot, or is not mapped. */
static noinline __noclone void pool_unmap_slowly(struct device *dev, dma_addr_t address,
						 size_t size, enum dma_data_direction direction,
						 unsigned long attrs)
{
	struct pool *pool = pool_of(dev);
	struct pool_slot *slot = pool_find(pool, address);
	u32 bytes = 0;

	if (slot && slot->buffer == (u32)address)
		bytes = pool_claim(slot);
	if (bytes)
		pool_return(pool, slot, bytes, size, direction, attrs);
	else
		pool_report_bad(dev, "unmap", address);
}

static __always_inline void pool_unmap(struct device *dev, dma_addr_t address, size_t size,
				       enum dma_data_direction direction, unsigned long attrs)
{
	struct pool *pool = pool_of(dev);
	struct pool_slot *slot;
	u32 bytes = pool_claim_at(pool, address, &slot);

	if (unlikely(!bytes))
		pool_unmap_slowly(dev, address, size, direction, attrs);
	else
		pool_return(pool, slot, bytes, size, direction, attrs);
}

static void pool_unmap_list(struct device *dev, struct scatterlist *list, int nents,
			    enum dma_data_direction direction, unsigned long attrs)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		pool_unmap(dev, sg_dma_address(entry), entry->length, direction, attrs);
}

/* The driver's buffers stay as they are. */
static void pool_undo_list(struct device *dev, struct scatterlist *list, int nents,
			   enum dma_data_direction direction, unsigned long attrs)
{
	pool_unmap_list(dev, list, nents, direction, attrs | DMA_ATTR_SKIP_CPU_SYNC);
}

/* Returns the bytes of the slot that an entry needs, or 0 if no pool can hold it. */
static size_t pool_bytes_for(struct device *dev, struct scatterlist *entry)
{
	u32 mask = core_min_align_mask(dev);
	u32 first = sg_phys(entry) & mask;
	size_t end = (size_t)first + entry->length;

	if (!entry->length || end > POOL_CHUNK_BYTES)
		return 0;
	/* A slot is aligned to its size, so a buffer crosses a boundary only if its slot does. */
	if (end - 1 > dma_get_seg_boundary(dev))
		return 0;
	return (size_t)1 << (pool_class(first, entry->length, mask) + POOL_SLOT_SHIFT);
}

static int pool_map_list(struct device *dev, struct scatterlist *list, int nents,
			 enum dma_data_direction direction, unsigned long attrs)
{
	u64 left = (u64)pool_of(dev)->chunk_count << POOL_CHUNK_SHIFT;
	struct scatterlist *entry;
	int i;

	if (attrs & DMA_ATTR_REQUIRE_COHERENT)
		return -EINVAL;
	for_each_sg(list, entry, nents, i) {
		size_t bytes = pool_bytes_for(dev, entry);

		/* No retry would succeed. */
		if (!bytes || bytes > left)
			return -EINVAL;
		left -= bytes;
	}
	return core_map_each(dev, list, nents, direction, attrs, POOL_CHUNK_BYTES, pool_map,
			     pool_undo_list);
}

static void pool_sync_for_cpu(struct device *dev, dma_addr_t address, size_t size,
			      enum dma_data_direction direction)
{
	if (direction != DMA_TO_DEVICE && !pool_sync_copy(pool_of(dev), address, size, true))
		pool_report_bad(dev, "sync", address);
}

/* The shadow of a buffer that only the device writes already has what the device wrote. */
static void pool_sync_for_device(struct device *dev, dma_addr_t address, size_t size,
				 enum dma_data_direction direction)
{
	if (direction != DMA_FROM_DEVICE && !pool_sync_copy(pool_of(dev), address, size, false))
		pool_report_bad(dev, "sync", address);
}

/* Coherent memory is memory of the pool itself, in pages of its own. */
static void *pool_alloc(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
			unsigned long attrs)
{
	struct pool_slot *slot;
	unsigned long flags;

	if (!size || size > POOL_CHUNK_BYTES)
		return NULL;
	size = PAGE_ALIGN(size);
	local_irq_save(flags);
	slot = pool_take_slowly(pool_of(dev), pool_class(0, size, 0));
	local_irq_restore(flags);
	if (!slot)
		return NULL;
	slot->buffer = slot->address + POOL_COHERENT;
	WRITE_ONCE(slot->bytes, size);
	*address = slot->address;
	return memset(slot->shadow, 0, size);
}

static void pool_free(struct device *dev, size_t size, void *memory, dma_addr_t address,
		      unsigned long attrs)
{
	struct pool_slot *slot = pool_find(pool_of(dev), address);

	if (slot && slot->address == address && pool_first(slot) == POOL_COHERENT &&
	    pool_claim(slot))
		pool_put(pool_of(dev), slot);
	else
		pool_report_bad(dev, "free", address);
}

/* A driver sets its mask before it maps. A pool that lies too high is then mapped again, lower. */
static int pool_dma_supported(struct device *dev, u64 mask)
{
	struct pool *pool = pool_of(dev);

	return mask >= pool->last || !pool_move(pool, mask);
}

static u64 pool_required_mask(struct device *dev)
{
	return DMA_BIT_MASK(32);
}

/* The alignment of the device may place a buffer after the start of its slot. */
static size_t pool_max_mapping_size(struct device *dev)
{
	return POOL_CHUNK_BYTES - ALIGN(core_min_align_mask(dev), 1UL << POOL_SLOT_SHIFT);
}

static size_t pool_opt_mapping_size(void)
{
	return POOL_CHUNK_BYTES / 2;
}

#define ENGINE(name) pool_##name
#define ENGINE_HAS_SHADOWS
/* A shadow is not the memory that the driver shares with its device. */
#define ENGINE_REFUSES DMA_ATTR_REQUIRE_COHERENT

#include "core_ops.h"
