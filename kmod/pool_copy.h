/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Map, unmap and sync of one buffer. Inlined into the dma_map_ops, because they run at each map and
 * unmap.
 *
 * The device reads only its pool: what it was given through the pool, what it wrote, and zeroes.
 * A buffer that the device writes therefore starts as zeroes, unless preserve=1: a copy of the
 * driver's buffer would show the device memory that the driver never gave it. Zeroes also keep the
 * pool's earlier contents out of the driver's buffer if the device writes less than the buffer.
 */
#ifndef POOL_COPY_H
#define POOL_COPY_H

#include <linux/bitops.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/string.h>

#include "pool.h"

/* The first of several cached slots, which the CPU keeps in the order of their last use. */
static __always_inline struct pool_slot *pool_take(struct pool *pool, unsigned int class)
{
	struct pool_cache *cache;
	struct pool_slot *slot;
	struct pool_cpu *cpu;
	unsigned long flags;

	local_irq_save(flags);
	cpu = this_cpu_ptr(pool->cpus);
	cache = &cpu->caches[class];
	slot = cache->free;
	if (likely(slot)) {
		cache->free = slot->next;
		cache->count--;
		cpu->maps++;
	}
	local_irq_restore(flags);
	return slot;
}

/* The same if the cache is empty. Returns NULL if the pool has no free slot. */
static struct pool_slot *pool_take_slowly(struct pool *pool, unsigned int class)
{
	struct pool_slot *slot = NULL;
	unsigned long flags;

	local_irq_save(flags);
	if (this_cpu_ptr(pool->cpus)->caches[class].free || pool_cache_fill(pool, class))
		slot = pool_take(pool, class);
	local_irq_restore(flags);
	return slot;
}

static __always_inline void pool_put(struct pool *pool, struct pool_slot *slot)
{
	struct pool_cache *cache;
	struct pool_cpu *cpu;
	unsigned long flags;

	local_irq_save(flags);
	cpu = this_cpu_ptr(pool->cpus);
	/* Before the slow path, which counts the mappings that are left. */
	cpu->unmaps++;
	cache = &cpu->caches[slot->class];
	if (likely(cache->count < READ_ONCE(cache->limit))) {
		slot->next = cache->free;
		cache->free = slot;
		cache->count++;
	} else {
		pool_cache_spill(pool, slot);
	}
	local_irq_restore(flags);
}

/* Returns the slot that contains an address, in use or not; NULL if the pool does not. */
static __always_inline struct pool_slot *pool_find(struct pool *pool, dma_addr_t address)
{
	struct pool_chunk *chunk;
	u32 offset = address & (POOL_CHUNK_BYTES - 1);

	if (unlikely(address >> 32))
		return NULL;
	chunk = pool->index[address >> POOL_CHUNK_SHIFT];
	if (unlikely(!chunk))
		return NULL;
	return &chunk->slots[offset >> READ_ONCE(chunk->shift)];
}

/* The size class of a buffer's slot. The slot's address has the low bits that mask selects as 0. */
static __always_inline unsigned int pool_class(u32 first, u32 size, u32 mask)
{
	/* Bit 0 makes the size class of the smallest buffers 0. */
	return __fls(max(first + size - 1, mask) >> (POOL_SLOT_SHIFT - 1) | 1);
}

/* Initial contents of the shadow. */
static __always_inline void pool_copy_out(u8 *shadow, u64 phys, size_t size,
					  enum dma_data_direction direction, unsigned long attrs)
{
	if (direction == DMA_FROM_DEVICE ? READ_ONCE(pool_preserve) :
					   !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		memcpy(shadow, phys_to_virt(phys), size);
	else if (direction != DMA_TO_DEVICE)
		memset(shadow, 0, size);
}

static __always_inline dma_addr_t pool_fill(struct pool_slot *slot, u64 phys, u32 first, u32 size,
					    enum dma_data_direction direction, unsigned long attrs)
{
	dma_addr_t address = slot->address + first;

	slot->phys = phys - first;
	slot->first = first;
	WRITE_ONCE(slot->end, first + size);
	pool_copy_out(slot->shadow + first, phys, size, direction, attrs);
	return address;
}

static noinline dma_addr_t pool_map_slowly(struct pool *pool, u64 phys, u32 first, u32 size,
					   unsigned int class, enum dma_data_direction direction,
					   unsigned long attrs)
{
	struct pool_slot *slot = pool_take_slowly(pool, class);

	return slot ? pool_fill(slot, phys, first, size, direction, attrs) : DMA_MAPPING_ERROR;
}

/*
 * Returns the address of the buffer's shadow, or DMA_MAPPING_ERROR. The address has the same bits
 * as phys where mask has ones.
 */
static __always_inline dma_addr_t pool_map_copy(struct pool *pool, u64 phys, size_t size, u32 mask,
						enum dma_data_direction direction,
						unsigned long attrs)
{
	u32 first = phys & mask;
	unsigned int class = pool_class(first, size, mask);
	struct pool_slot *slot;

	/* A size of 0 is too large here. */
	if (unlikely(size - 1 >= POOL_CHUNK_BYTES || class >= POOL_CLASSES))
		return DMA_MAPPING_ERROR;
	slot = pool_take(pool, class);
	if (unlikely(!slot))
		return pool_map_slowly(pool, phys, first, size, class, direction, attrs);
	return pool_fill(slot, phys, first, size, direction, attrs);
}

/*
 * Ends the use of a slot by its driver. Of several calls, one succeeds. Returns the end of the
 * buffer.
 */
static __always_inline u32 pool_claim(struct pool_slot *slot)
{
	return xchg(&slot->end, 0);
}

/* Returns false if no buffer is mapped at the address. */
static __always_inline bool pool_unmap_copy(struct pool *pool, dma_addr_t address, size_t size,
					    enum dma_data_direction direction, unsigned long attrs)
{
	struct pool_slot *slot = pool_find(pool, address);
	u32 end;

	if (unlikely(!slot || slot->address + slot->first != (u32)address))
		return false;
	end = pool_claim(slot);
	if (unlikely(!end))
		return false;
	if (direction != DMA_TO_DEVICE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		memcpy(phys_to_virt(slot->phys + slot->first), slot->shadow + slot->first,
		       min_t(size_t, size, end - slot->first));
	pool_put(pool, slot);
	return true;
}

/* Copies a part of a buffer. Returns false if it is not within one buffer. */
static __always_inline bool pool_sync_copy(struct pool *pool, dma_addr_t address, size_t size,
					   bool is_for_cpu)
{
	struct pool_slot *slot = pool_find(pool, address);
	u32 offset, end;
	void *buffer;

	if (unlikely(!slot))
		return false;
	offset = (u32)address - slot->address;
	end = READ_ONCE(slot->end);
	if (unlikely(offset < slot->first || offset > end || size > end - offset))
		return false;
	buffer = phys_to_virt(slot->phys + offset);
	if (is_for_cpu)
		memcpy(buffer, slot->shadow + offset, size);
	else
		memcpy(slot->shadow + offset, buffer, size);
	return true;
}

#endif
