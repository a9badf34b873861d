/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Map, unmap and sync of one buffer. Inlined into the dma_map_ops, because they run at each map and
 * unmap.
 *
 * The device reads only its pool: what it was given through the pool, what it wrote, and zeroes.
 * A buffer that the device writes therefore starts as zeroes, unless preserve=1: a copy of the
 * driver's buffer would show the device memory that the driver never gave it. Zeroes also keep the
 * pool's earlier contents out of the driver's buffer if the device writes less than the buffer.
 *
 * DMA_ATTR_SKIP_CPU_SYNC skips only the copy of an unmap. A map without a copy would show the
 * device the earlier contents of the slot.
 */
#ifndef POOL_COPY_H
#define POOL_COPY_H

#include <linux/bitops.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/string.h>

#include "pool.h"

/*
 * The CPU's cache of slots of a size, by its offset in pool_cpu. Classes are below POOL_CLASSES and
 * counts at most POOL_CACHE_SLOTS, so no access needs a check of an array's bounds.
 */
static __always_inline struct pool_cache *pool_cache_of(struct pool *pool, unsigned long offset)
{
	return (void *)this_cpu_ptr(pool->cpus) + offset;
}

/* Interrupts are off. Takes the slot that the CPU used last; returns false if it keeps none. */
static __always_inline bool pool_take(struct pool *pool, unsigned long class,
				      struct pool_slot **slot)
{
	struct pool_cache *cache = pool_cache_of(pool, class * sizeof(*cache));
	u32 count = cache->count;

	if (unlikely(!count))
		return false;
	count--;
	cache->count = count;
	cache->maps++;
	*slot = *((struct pool_slot **)cache->slots + count);
	return true;
}

/* Interrupts are off. Returns NULL if the pool has no free slot. */
static struct pool_slot *pool_take_slowly(struct pool *pool, unsigned int class)
{
	struct pool_slot *slot;

	if (pool_take(pool, class, &slot))
		return slot;
	return pool_cache_fill(pool, class) && pool_take(pool, class, &slot) ? slot : NULL;
}

/*
 * Interrupts are off, and are restored. Gives a slot that the CPU cannot keep to its chunk.
 * pool_is_unused() waits for the end of the section.
 */
static noinline __noclone void pool_put_slowly(struct pool *pool, struct pool_slot *slot,
					       unsigned long flags)
{
	/* Before the call, which queues the work that counts the mappings in use. */
	pool_cache_of(pool, slot->cache_offset)->unmaps++;
	pool_cache_spill(pool, slot);
	local_irq_restore(flags);
}

/* One section with interrupts off counts the unmap and has its last access to slot and chunk. */
static __always_inline void pool_put(struct pool *pool, struct pool_slot *slot)
{
	struct pool_cache *cache;
	unsigned long flags;

	local_irq_save(flags);
	cache = pool_cache_of(pool, slot->cache_offset);
	/* Another CPU may change the limit. */
	if (unlikely(cache->count >= data_race(cache->limit))) {
		pool_put_slowly(pool, slot, flags);
		return;
	}
	*((struct pool_slot **)cache->slots + cache->count) = slot;
	cache->count++;
	cache->unmaps++;
	local_irq_restore(flags);
}

static __always_inline struct pool_chunk *pool_chunk_at(struct pool *pool, dma_addr_t address)
{
	u64 number = address >> POOL_CHUNK_SHIFT;

	return likely(number < POOL_CHUNKS_MAX) ? pool->index[number] : NULL;
}

/* Returns the slot that contains an address, in use or not; NULL if the pool does not. */
static __always_inline struct pool_slot *pool_find(struct pool *pool, dma_addr_t address)
{
	struct pool_chunk *chunk = pool_chunk_at(pool, address);
	u32 offset = address & (POOL_CHUNK_BYTES - 1);
	u32 shift;

	if (unlikely(!chunk))
		return NULL;
	/* Below 32, without a check. */
	shift = READ_ONCE(chunk->shift) & 31;
	return &chunk->slots[offset >> shift << (shift - POOL_SLOT_SHIFT)];
}

/* The buffer's first byte in its slot. */
static __always_inline u32 pool_first(const struct pool_slot *slot)
{
	return slot->buffer - slot->address;
}

/*
 * The size class of a buffer's slot, at least POOL_CLASSES for a buffer that no slot can hold and
 * for size 0. The bits of @mask are 0 in the slot's address.
 */
static __always_inline unsigned long pool_class(u32 first, size_t size, u32 mask)
{
	u64 last = size - 1;

	/* The highest bit of three numbers, and at least that of half the smallest slot. */
	return __fls(last | (last + first) | mask | 1UL << (POOL_SLOT_SHIFT - 1)) -
	       (POOL_SLOT_SHIFT - 1);
}

/*
 * Returns the address of the shadow, after it has its initial contents. Inlined: each map copies or
 * clears, so a separate function would only cost its call.
 */
static __always_inline dma_addr_t pool_fill(struct pool_slot *slot, u64 phys, u32 first,
					    size_t size, enum dma_data_direction direction)
{
	u32 address = slot->address + first;
	u8 *shadow = slot->shadow + first;

	slot->phys = phys;
	slot->buffer = address;
	WRITE_ONCE(slot->bytes, size);
	if (direction == DMA_FROM_DEVICE && !READ_ONCE(pool_preserve))
		memset(shadow, 0, size);
	else
		memcpy(shadow, phys_to_virt(phys), size);
	return address;
}

/*
 * Ends the use of a slot by its driver. Of several calls, one succeeds. Returns the size of the
 * buffer.
 */
static __always_inline u32 pool_claim(struct pool_slot *slot)
{
	return xchg(&slot->bytes, 0);
}

/* Copies to the driver's buffer, and frees a claimed slot. */
static noinline __noclone void pool_put_copied(struct pool *pool, struct pool_slot *slot,
					       size_t size, u32 bytes)
{
	memcpy(phys_to_virt(slot->phys), slot->shadow + pool_first(slot),
	       min_t(size_t, size, bytes));
	pool_put(pool, slot);
}

/*
 * Claims the slot that begins with the buffer at an address. Returns the size of the buffer, or 0.
 * An entry that is not the first of a slot has `bytes` 0, so it cannot be claimed.
 */
static __always_inline u32 pool_claim_at(struct pool *pool, dma_addr_t address,
					 struct pool_slot **claimed)
{
	struct pool_chunk *chunk = pool_chunk_at(pool, address);
	u32 offset = address & (POOL_CHUNK_BYTES - 1);
	struct pool_slot *slot;

	if (unlikely(!chunk))
		return 0;
	slot = &chunk->slots[offset >> POOL_SLOT_SHIFT];
	*claimed = slot;
	return likely(slot->buffer == (u32)address) ? pool_claim(slot) : 0;
}

/* Copies a part of a buffer. Returns false if it is not within one buffer or coherent memory. */
static __always_inline bool pool_sync_copy(struct pool *pool, dma_addr_t address, size_t size,
					   bool is_for_cpu)
{
	struct pool_slot *slot = pool_find(pool, address);
	u32 first, offset, bytes, end;
	void *buffer;

	if (unlikely(!slot))
		return false;
	first = pool_first(slot);
	offset = (u32)address - slot->address;
	bytes = READ_ONCE(slot->bytes);
	end = first + bytes;
	/*
	 * Coherent memory has no address that is at least its first one. Drivers synchronise memory
	 * of dma_alloc_pages(), which needs no copy.
	 */
	if (unlikely(!bytes || offset < first || offset > end || size > end - offset))
		return bytes && first == POOL_COHERENT;
	buffer = phys_to_virt(slot->phys + (offset - first));
	if (is_for_cpu)
		memcpy(buffer, slot->shadow + offset, size);
	else
		memcpy(slot->shadow + offset, buffer, size);
	return true;
}

#endif
