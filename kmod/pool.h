/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shadow buffers: interfaces between the parts of the module.
 *
 *   slots   allocation of slots: per-CPU caches, chunks
 *   copy    map, unmap and sync of one buffer, inline
 *   ops     the operations (dma_map_ops) that drivers call
 *   memory  the memory of a pool, and its mapping through the device's own IOMMU
 *   bind    selection of PCI devices
 *
 * A pool is one device's memory. It is mapped for the device once, in chunks of 256 KiB. A chunk in
 * use is divided into slots of one size, a power of two. Each slot is aligned to its size.
 */
#ifndef POOL_H
#define POOL_H

#include <linux/bits.h>
#include <linux/dma-direction.h>
#include <linux/dma-map-ops.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/percpu.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ARCH_HAS_DMA_OPS)
/* The module does no cache maintenance, and set_dma_ops() needs CONFIG_ARCH_HAS_DMA_OPS. */
#error "requires x86_64 (DMA-coherent) and CONFIG_ARCH_HAS_DMA_OPS, which CONFIG_XEN selects"
#endif

#define POOL_CHUNK_SHIFT	18
#define POOL_CHUNK_BYTES	BIT(POOL_CHUNK_SHIFT)
/* Smallest slot: 512 bytes. */
#define POOL_SLOT_SHIFT		9
/* Sizes of slots: 512 bytes to 256 KiB. */
#define POOL_CLASSES		(POOL_CHUNK_SHIFT - POOL_SLOT_SHIFT + 1)
#define POOL_SLOTS		((u32)(POOL_CHUNK_BYTES >> POOL_SLOT_SHIFT))
/* A pool has addresses below 4 GiB, so a table finds the chunk of an address. */
#define POOL_CHUNKS_MAX		BIT(32 - POOL_CHUNK_SHIFT)
/* Slots that a CPU keeps of each size, at most. */
#define POOL_CACHE_SLOTS	16
#define POOL_CACHE_BYTES	(64UL << 10)
/* pool_first() of coherent memory: it is mapped at no address. */
#define POOL_COHERENT		U32_MAX

/* State of a slot. */
struct pool_slot {
	union {
		/* In use: physical address of the driver's buffer. */
		u64 phys;
		/* Free: the next one of the chunk. */
		struct pool_slot *next;
	};
	u8 *shadow;
	/* Device addresses of the slot and of the buffer in it. */
	u32 address;
	u32 buffer;
	/* Size of the buffer. A free slot has 0. */
	u32 bytes;
	u8 class;
	/* Offset of the cache of its class in pool_cpu. */
	u16 cache_offset;
};

struct pool_chunk {
	u8 *memory;
	dma_addr_t address;
	/* The slot that begins at each multiple of the smallest size. */
	struct pool_slot *slots;
	/* Constant while a slot is in use. */
	u8 shift;

	/* Protected by pool.lock. List of unused chunks, or of those with free slots of a size. */
	struct list_head list;
	u16 used;
	/* Slots from this one on have never been used since the chunk has this size. */
	u16 fresh;
	struct pool_slot *free;
};

/* Free slots of a size, the one that was used last at the end. */
struct pool_cache {
	u32 count;
	/* Slots that the CPU may keep, at most POOL_CACHE_SLOTS. */
	u32 limit;
	struct pool_slot *slots[POOL_CACHE_SLOTS];
	/* Maps and unmaps of this size. */
	u64 maps;
	u64 unmaps;
	/* A shift finds the cache of a class. */
} __aligned(256);

/* Used with interrupts off, by its CPU only. */
struct pool_cpu {
	struct pool_cache caches[POOL_CLASSES];
	/* Maps that found no free slot. */
	u64 full;
	/* Unmaps and syncs of what was not mapped. */
	u64 bad;
};

/* The pool of a device. It stays in the list until the module is unloaded. */
struct pool {
	/* A copy of pool_ops. container_of() on it finds the pool. */
	const struct dma_map_ops ops;
	struct pool_cpu __percpu *cpus;
	/* The chunk at each address >> POOL_CHUNK_SHIFT, or NULL. */
	struct pool_chunk **index;
	struct pool_chunk *chunks;
	/* 0 without memory: every map fails. */
	u32 chunk_count;
	/* Highest device address. */
	u64 last;
	/* Mappings of an unbound driver remain. CPUs keep no slots; unmaps queue release_work. */
	bool has_orphans;

	raw_spinlock_t lock;
	/* Unused chunks, and chunks with free slots of each size. */
	struct list_head unused;
	struct list_head partial[POOL_CLASSES];

	/* The fields below are protected by pool_mutex. */
	struct list_head list;
	struct pci_dev *pdev;
	struct work_struct release_work;
	struct dentry *debugfs;
	/* The operations are installed, or remain for orphaned mappings. */
	bool is_active;
	/* The device was removed from its bus, and reaches nothing. */
	bool is_removed;
	/* State of the device without the module. */
	bool had_dma_iommu;
	bool had_skip_sync;
};

extern unsigned int pool_mib;
extern bool pool_preserve;
extern struct dentry *pool_debugfs;
extern const struct dma_map_ops pool_ops;

/* pool_slots.c */
void pool_slots_init(struct pool *pool);
void pool_slots_set_orphans(struct pool *pool, bool has_orphans);
bool pool_cache_fill(struct pool *pool, unsigned int class);
void pool_cache_spill(struct pool *pool, struct pool_slot *slot);
void pool_count_bad(struct pool *pool);
u64 pool_maps(const struct pool *pool);
u64 pool_unmaps(const struct pool *pool);
u64 pool_live(const struct pool *pool);

/* pool_memory.c */
int pool_memory_init(struct pool *pool, u64 mask);
void pool_memory_unmap(struct pool *pool);
void pool_memory_free(struct pool *pool);
void pool_install_ops(struct pool *pool);
void pool_restore_ops(struct pool *pool);
bool pool_is_unused(const struct pool *pool);
int pool_move(struct pool *pool, u64 mask);

/* pool_bind.c */
int pool_bind_start(void);
void pool_bind_stop(void);
void pool_bind_free(void);

/* pool_main.c */
void pool_debugfs_add(struct pool *pool);

#endif
