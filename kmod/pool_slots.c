// SPDX-License-Identifier: GPL-2.0-only
/*
 * Slots. A CPU takes slots from its own cache and returns them there, with interrupts off and
 * without a lock (pool_copy.h). This file moves up to eight slots at a time between a cache and the
 * chunks, under the pool's lock. Each step takes constant time.
 */
#include "pool.h"

/* Caller holds pool->lock. Returns NULL if all slots are in use. */
static struct pool_slot *pool_chunk_take(struct pool *pool, unsigned int class)
{
	struct list_head *partial = &pool->partial[class];
	struct pool_chunk *chunk;
	struct pool_slot *slot;

	if (list_empty(partial)) {
		if (list_empty(&pool->unused))
			return NULL;
		chunk = list_first_entry(&pool->unused, struct pool_chunk, list);
		WRITE_ONCE(chunk->shift, POOL_SLOT_SHIFT + class);
		chunk->fresh = 0;
		chunk->free = NULL;
		list_move_tail(&chunk->list, partial);
	}
	chunk = list_first_entry(partial, struct pool_chunk, list);
	slot = chunk->free;
	if (slot) {
		chunk->free = slot->next;
	} else {
		u32 offset = chunk->fresh << chunk->shift;

		slot = &chunk->slots[offset >> POOL_SLOT_SHIFT];
		chunk->fresh++;
		slot->shadow = chunk->memory + offset;
		slot->address = chunk->address + offset;
		slot->class = class;
		slot->cache_offset = class * sizeof(struct pool_cache);
	}
	chunk->used++;
	if (chunk->used == POOL_SLOTS >> class)
		list_del_init(&chunk->list);
	return slot;
}

/* Caller holds pool->lock. */
static void pool_chunk_put(struct pool *pool, struct pool_slot *slot)
{
	struct pool_chunk *chunk = pool->index[slot->address >> POOL_CHUNK_SHIFT];

	slot->next = chunk->free;
	chunk->free = slot;
	if (chunk->used == POOL_SLOTS >> slot->class)
		list_add(&chunk->list, &pool->partial[slot->class]);
	chunk->used--;
	if (!chunk->used)
		list_move_tail(&chunk->list, &pool->unused);
}

/*
 * Interrupts are off. Adds slots to the CPU's empty cache. Returns false and counts it if all slots
 * of the pool are in use or in the caches of other CPUs.
 */
bool pool_cache_fill(struct pool *pool, unsigned int class)
{
	struct pool_cpu *cpu = this_cpu_ptr(pool->cpus);
	struct pool_cache *cache = &cpu->caches[class];
	u32 count = max(READ_ONCE(cache->limit) / 2, 1U);

	raw_spin_lock(&pool->lock);
	while (cache->count < count) {
		struct pool_slot *slot = pool_chunk_take(pool, class);

		if (!slot)
			break;
		cache->slots[cache->count++] = slot;
	}
	raw_spin_unlock(&pool->lock);
	if (cache->count)
		return true;
	cpu->full++;
	return false;
}

/* Interrupts are off. Gives a slot that a full cache cannot keep, and half of it, to the chunks. */
void pool_cache_spill(struct pool *pool, struct pool_slot *slot)
{
	struct pool_cache *cache = &this_cpu_ptr(pool->cpus)->caches[slot->class];
	u32 left = READ_ONCE(cache->limit) / 2;

	raw_spin_lock(&pool->lock);
	pool_chunk_put(pool, slot);
	while (cache->count > left)
		pool_chunk_put(pool, cache->slots[--cache->count]);
	raw_spin_unlock(&pool->lock);
	if (READ_ONCE(pool->has_orphans))
		schedule_work(&pool->release_work);
}

void pool_count_bad(struct pool *pool)
{
	unsigned long flags;

	local_irq_save(flags);
	this_cpu_ptr(pool->cpus)->bad++;
	local_irq_restore(flags);
}

/* Calls of map that succeeded. */
u64 pool_maps(const struct pool *pool)
{
	unsigned int class;
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu) {
		for (class = 0; class < POOL_CLASSES; class++)
			sum += READ_ONCE(per_cpu_ptr(pool->cpus, cpu)->caches[class].maps);
	}
	return sum;
}

u64 pool_unmaps(const struct pool *pool)
{
	unsigned int class;
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu) {
		for (class = 0; class < POOL_CLASSES; class++)
			sum += READ_ONCE(per_cpu_ptr(pool->cpus, cpu)->caches[class].unmaps);
	}
	return sum;
}

/* Mappings in use. Unmaps are counted first, so none is counted without its map. */
u64 pool_live(const struct pool *pool)
{
	u64 unmaps = pool_unmaps(pool);

	return pool_maps(pool) - unmaps;
}

/*
 * Slots that a CPU may keep: at most 64 KiB of a size, and a quarter of the pool for all sizes and
 * CPUs.
 */
static u32 pool_cache_limit(const struct pool *pool, unsigned int class)
{
	u64 share = (u64)pool->chunk_count << POOL_CHUNK_SHIFT;
	u64 bytes = 1ULL << (POOL_SLOT_SHIFT + class);
	u64 most;

	share /= 4 * POOL_CLASSES * num_possible_cpus();
	most = min3(share / bytes, POOL_CACHE_BYTES / bytes, (u64)POOL_CACHE_SLOTS);
	/* A cache of one slot would be filled at every second map. */
	return most > 1 ? most : 0;
}

/* While a pool has orphans, every unmap takes the slow path, which queues the work. */
void pool_slots_set_orphans(struct pool *pool, bool has_orphans)
{
	unsigned int class;
	int cpu;

	WRITE_ONCE(pool->has_orphans, has_orphans);
	for (class = 0; class < POOL_CLASSES; class++) {
		u32 limit = has_orphans ? 0 : pool_cache_limit(pool, class);

		for_each_possible_cpu(cpu)
			WRITE_ONCE(per_cpu_ptr(pool->cpus, cpu)->caches[class].limit, limit);
	}
}

/* All chunks are unused, and the caches are empty. */
void pool_slots_init(struct pool *pool)
{
	unsigned int i;
	int cpu;

	INIT_LIST_HEAD(&pool->unused);
	for (i = 0; i < POOL_CLASSES; i++)
		INIT_LIST_HEAD(&pool->partial[i]);
	for (i = 0; i < pool->chunk_count; i++) {
		struct pool_chunk *chunk = &pool->chunks[i];

		pool->index[chunk->address >> POOL_CHUNK_SHIFT] = chunk;
		chunk->shift = POOL_CHUNK_SHIFT;
		chunk->used = 0;
		list_add_tail(&chunk->list, &pool->unused);
	}
	for_each_possible_cpu(cpu) {
		for (i = 0; i < POOL_CLASSES; i++)
			per_cpu_ptr(pool->cpus, cpu)->caches[i].count = 0;
	}
	pool_slots_set_orphans(pool, false);
}
