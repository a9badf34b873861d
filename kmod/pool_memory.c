// SPDX-License-Identifier: GPL-2.0-only
/*
 * A pool's memory. It is mapped through the device's own IOMMU, once, while that IOMMU's operations
 * are visible to the DMA API.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/iommu-dma.h>
#include <linux/mm.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "core.h"
#include "pool.h"

/* As core_set_skip_sync(). */
#ifdef CORE_HAVE_DEVICE_FLAGS
#define pool_set_dma_iommu(dev, on)	dev_assign_dma_iommu(dev, on)
#else
#define pool_set_dma_iommu(dev, on)	((dev)->dma_iommu = (on))
#endif

/*
 * Caller holds the device's lock, or the device is removed. Clears dev->dma_iommu, which the DMA
 * API tests before dma_ops, and dma_skip_sync, because shadows need syncs.
 */
void pool_install_ops(struct pool *pool)
{
	struct device *dev = &pool->pdev->dev;

	pool->had_dma_iommu = use_dma_iommu(dev);
	pool->had_skip_sync = core_get_skip_sync(dev);
	set_dma_ops(dev, &pool->ops);
	pool_set_dma_iommu(dev, false);
	core_set_skip_sync(dev, false);
}

/* Caller as above. */
void pool_restore_ops(struct pool *pool)
{
	struct device *dev = &pool->pdev->dev;

	core_set_skip_sync(dev, pool->had_skip_sync);
	pool_set_dma_iommu(dev, pool->had_dma_iommu);
	set_dma_ops(dev, NULL);
}

static gfp_t pool_zone(struct device *dev, u64 mask)
{
	if (use_dma_iommu(dev))
		return 0;
	return mask < DMA_BIT_MASK(32) ? __GFP_DMA : __GFP_DMA32;
}

/* Maps a chunk at an address of its alignment, below the mask. */
static int pool_chunk_init(struct pool *pool, struct pool_chunk *chunk, u64 mask)
{
	struct device *dev = &pool->pdev->dev;
	gfp_t gfp = GFP_KERNEL | __GFP_ZERO | __GFP_RETRY_MAYFAIL | __GFP_NOWARN;
	u64 last;

	chunk->memory = alloc_pages_exact(POOL_CHUNK_BYTES, gfp | pool_zone(dev, mask));
	chunk->slots = kvcalloc(POOL_SLOTS, sizeof(*chunk->slots), GFP_KERNEL);
	if (!chunk->memory || !chunk->slots)
		return -ENOMEM;
	chunk->address = dma_map_page(dev, virt_to_page(chunk->memory), 0, POOL_CHUNK_BYTES,
				      DMA_BIDIRECTIONAL);
	if (dma_mapping_error(dev, chunk->address)) {
		chunk->address = 0;
		return -ENOSPC;
	}
	/* Without an IOMMU the kernel may map a bounce buffer instead. */
	if (!use_dma_iommu(dev) && chunk->address != virt_to_phys(chunk->memory))
		return -EOPNOTSUPP;
	last = chunk->address + POOL_CHUNK_BYTES - 1;
	if (chunk->address & (POOL_CHUNK_BYTES - 1) || last > min_t(u64, mask, U32_MAX))
		return -ERANGE;
	pool->last = max(pool->last, last);
	return 0;
}

/* The device reaches the pool no more. Its mappings remain for the drivers that own them. */
void pool_memory_unmap(struct pool *pool)
{
	u32 i;

	for (i = 0; i < pool->chunk_count; i++) {
		struct pool_chunk *chunk = &pool->chunks[i];

		if (chunk->address)
			dma_unmap_page(&pool->pdev->dev, chunk->address, POOL_CHUNK_BYTES,
				       DMA_BIDIRECTIONAL);
	}
}

void pool_memory_free(struct pool *pool)
{
	u32 i;

	for (i = 0; i < pool->chunk_count; i++) {
		struct pool_chunk *chunk = &pool->chunks[i];

		if (chunk->memory)
			free_pages_exact(chunk->memory, POOL_CHUNK_BYTES);
		kvfree(chunk->slots);
	}
	kvfree(pool->chunks);
	pool->chunks = NULL;
	pool->chunk_count = 0;
	pool->last = 0;
	memset(pool->index, 0, POOL_CHUNKS_MAX * sizeof(*pool->index));
	pool_slots_init(pool);
}

/* Allocates and maps the pool, below a mask. The IOMMU is visible to the DMA API. */
int pool_memory_init(struct pool *pool, u64 mask)
{
	struct device *dev = &pool->pdev->dev;
	u64 before = dma_get_mask(dev);
	u32 i;
	int err = 0;

	pool->last = 0;
	pool->chunk_count = pool_mib << (20 - POOL_CHUNK_SHIFT);
	pool->chunks = kvcalloc(pool->chunk_count, sizeof(*pool->chunks), GFP_KERNEL);
	if (!pool->chunks) {
		pool->chunk_count = 0;
		return -ENOMEM;
	}
	*dev->dma_mask = min(mask, DMA_BIT_MASK(32));
	for (i = 0; i < pool->chunk_count && !err; i++)
		err = pool_chunk_init(pool, &pool->chunks[i], mask);
	if (err) {
		pool_memory_unmap(pool);
		pool_memory_free(pool);
	}
	*dev->dma_mask = before;
	pool_slots_init(pool);
	return err;
}

/*
 * The caller ensures that nothing is mapped during the call. Returns true if no mapping is in use,
 * and no unmap accesses a slot or a chunk. Sleeps.
 */
bool pool_is_unused(const struct pool *pool)
{
	if (pool_live(pool))
		return false;
	/*
	 * An unmap counts itself in a section with interrupts off, and accesses its slot and chunk
	 * until the end of that section. synchronize_rcu() waits for the end.
	 */
	synchronize_rcu();
	return true;
}

/* Maps the pool again, below a smaller mask. Sleeps. Fails if a mapping exists. */
int pool_move(struct pool *pool, u64 mask)
{
	int err;

	if (!pool->chunk_count || !pool_is_unused(pool))
		return -EBUSY;
	pool_restore_ops(pool);
	pool_memory_unmap(pool);
	pool_memory_free(pool);
	err = pool_memory_init(pool, mask);
	pool_install_ops(pool);
	if (err)
		dev_err(&pool->pdev->dev, "pooldma: no pool of %u MiB below %#llx: %d\n", pool_mib,
			mask, err);
	return err;
}
