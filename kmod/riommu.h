/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The driver of a ring IOMMU: interfaces between its parts.
 *
 *   tables    root, context and device tables in memory
 *   ring      slots of a ring: map, unmap, invalidation
 *   free      the queue of a ring's free slots
 *   ops       the dma_map_ops that drivers call
 *   burst     unmaps whose invalidation comes at the end of a burst
 *   shadow    copies of small buffers whose pages a burst cannot hold
 *   endpoint  the devices behind the IOMMU
 *   faults    accesses that the IOMMU blocked
 */
#ifndef RIOMMU_H
#define RIOMMU_H

#include <linux/atomic.h>
#include <linux/dma-direction.h>
#include <linux/hrtimer.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/pci.h>
#include <linux/workqueue.h>

#include "core.h"
#include "riommu_free.h"
#include "riommu_regs.h"

/* Rings of a device. No buffer has address 0, because ring 0 has no slots. */
enum {
	RIO_RING_NONE,
	RIO_RING_READ,
	RIO_RING_WRITE,
	/* Buffers in both directions, coherent memory. */
	RIO_RING_BOTH,
	RIO_RINGS,
};

enum rio_mode {
	/* An invalidation for each unmap of a buffer or of a list. */
	RIO_STRICT,
	/* One at the end of a burst. The pages of its buffers are held until then. */
	RIO_BURST,
	/*
	 * One at the end of a burst, as published: the device reaches freed pages until then. Only
	 * the module riommu-as-published has it.
	 */
	RIO_BURST_PAPER,
};

/* Largest shadow: a packet of an Ethernet link fits. */
#define RIO_SHADOW_BYTES 2048

/* State of a slot in addition to its entry. */
struct rio_state {
	/* Next slot in a chain of cleared slots, or RIO_NO_SLOT. */
	u32 next;
	/* The buffer whose pages are held by reference; without bytes, none are. */
	u32 held_bytes;
	u64 held;
	/* The buffer that the device uses a shadow of; without bytes, it uses the buffer. */
	u64 shadowed;
	void *shadow;
	u32 shadow_bytes;
	/* The driver unbound without an unmap of this slot. */
	bool is_orphan;
};

/* Cleared slots that one invalidation makes free, linked from the last to the first one. */
struct rio_chain {
	u32 last, first;
	int count;
	/* All of them can wait for the end of a burst. */
	bool is_deferred;
};

/* A ring: a flat table, and the queue of its free slots. */
struct rio_ring {
	struct rio_entry *table;
	struct rio_state *states;
	u32 slots;
	/* RIO_READ, RIO_WRITE or both. */
	u8 direction;
	/* Constant bits of this ring's IOVAs, of the second word of its rPTEs, and its INV word. */
	u64 iova_base, rpte_flags, inv_word;
	/* The IOMMU's registers. */
	void __iomem *regs;
	struct rio_slot_queue free_slots;

	/* Cleared slots of the present burst, the last one first. */
	u32 pending;
	atomic_t pending_count;
	/* A burst ends when it has this many slots. */
	int burst_slots;

	atomic64_t invalidations;
	/* Unmaps that waited for the end of a burst, and those among them that held pages. */
	atomic64_t deferred;
	atomic64_t held;
	/* Maps of shadows. */
	atomic64_t shadows_used;
	/* Maps that found no free slot. */
	atomic64_t full;
	/* Unmaps of addresses that were not mapped. */
	atomic64_t bad;
	/* Slots whose invalidation did not complete. They are never used again. */
	atomic64_t lost;
	/* Slots that drivers left: their entries are cleared. */
	atomic64_t orphans;
};

/* A device behind the IOMMU. */
struct rio_endpoint {
	struct core_endpoint core;
	struct rio *rio;
	u16 id;
	/* A page: the rDEVICE, then the rRINGs. */
	struct rio_entry *rdevice;
	struct rio_ring rings[RIO_RINGS];
	/* The ring for each direction of a buffer. */
	struct rio_ring *by_direction[DMA_NONE + 1];

	/* Ends the bursts of the mode burst-paper after the present softirq. */
	struct tasklet_struct burst_tasklet;
	/* Ends the bursts rio_burst_us after the first unmap that waits. */
	struct hrtimer burst_timer;
	bool is_timer_armed;
};

/* A ring IOMMU. */
struct rio {
	struct core_iommu core;
	struct pci_dev *pdev;
	void __iomem *regs;
	struct rio_entry *root;
	/* Context tables by bus; NULL for buses without a device behind this IOMMU. */
	struct rio_entry *contexts[256];
	/* Requester IDs of the devices behind it, ascending. */
	u16 *devices;
	u32 device_count;

	struct rio_entry *fault_queue;
	u32 fault_entries;
	/* Number of entries read, modulo 2^32. Used by the work item only. */
	u32 fault_head;
	u64 faults;
	/* Restarts of the queue. */
	u64 fault_restarts;
	struct delayed_work fault_work;
	struct dentry *debugfs;
};

/* riommu_main.c */
extern unsigned int rio_slots;
extern enum rio_mode rio_mode;
extern unsigned int rio_burst_us;
extern struct dentry *rio_debugfs;

/* riommu_tables.c */
int rio_tables_init(struct rio *rio);
void rio_tables_free(struct rio *rio);
int rio_rdevice_init(struct rio_endpoint *endpoint);
void rio_rdevice_attach(struct rio_endpoint *endpoint);
void rio_rdevice_free(struct rio_endpoint *endpoint);

/* True in the mode in which devices reach freed pages. The module riommu has no code for it. */
static __always_inline bool rio_is_as_published(void)
{
#ifdef RIO_AS_PUBLISHED
	return rio_mode == RIO_BURST_PAPER;
#else
	return false;
#endif
}

/* riommu_ring.c */
int rio_ring_init(struct rio_endpoint *endpoint, u16 number, u32 slots);
void rio_ring_free(struct rio_ring *ring);
bool rio_ring_unmap_orphan(struct rio_ring *ring, u32 slot);
u64 rio_ring_unbind(struct rio_ring *ring);

/* riommu_burst.c */
void rio_burst_init(struct rio_endpoint *endpoint);
void rio_burst_stop(struct rio_endpoint *endpoint);
bool rio_burst_needs_shadow(u64 buffer, u32 bytes);
bool rio_burst_defers(struct rio_ring *ring, u32 slot, u64 second, unsigned long attrs);
bool rio_burst_unmap(struct rio_endpoint *endpoint, struct rio_ring *ring,
		     const struct rio_chain *chain);
u32 rio_burst_take(struct rio_ring *ring);
void rio_burst_end_all(struct rio_endpoint *endpoint);

/* riommu_shadow.c */
u64 rio_shadow_map(struct rio_ring *ring, u32 slot, u64 buffer, u32 bytes, unsigned long attrs);
void rio_shadow_unmap(struct rio_ring *ring, u32 slot, unsigned long attrs);
void rio_shadow_free(struct rio_state *state);
void rio_sync_for_cpu(struct device *dev, dma_addr_t address, size_t size,
		      enum dma_data_direction direction);
void rio_sync_for_device(struct device *dev, dma_addr_t address, size_t size,
			 enum dma_data_direction direction);
void rio_sync_list_for_cpu(struct device *dev, struct scatterlist *list, int nents,
			   enum dma_data_direction direction);
void rio_sync_list_for_device(struct device *dev, struct scatterlist *list, int nents,
			      enum dma_data_direction direction);

/* riommu_ops.c */
extern const struct dma_map_ops rio_ops;
extern const struct dma_map_ops rio_burst_ops;

/* riommu_endpoint.c */
extern const struct core_engine rio_engine;

/* riommu_faults.c */
int rio_faults_init(struct rio *rio);
void rio_faults_work(struct work_struct *work);
void rio_faults_stop(struct rio *rio);
void rio_faults_free(struct rio *rio);
irqreturn_t rio_faults_interrupt(int irq, void *data);

/* riommu_debugfs.c */
void rio_debugfs_add(struct rio *rio);
void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint);

#endif
