/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The driver of a ring IOMMU: interfaces between its parts.
 *
 *   tables  root, context and device tables in memory
 *   ring    slots of a ring: allocation, map, unmap, invalidation
 *   ops     the dma_map_ops that drivers call
 *   bind    selection of the PCI devices behind the IOMMU
 *   faults  accesses that the IOMMU stopped
 */
#ifndef RIOMMU_H
#define RIOMMU_H

#include <linux/dma-direction.h>
#include <linux/dma-map-ops.h>
#include <linux/io.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "riommu_regs.h"

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ARCH_HAS_DMA_OPS)
/* The module does no cache maintenance, and set_dma_ops() needs CONFIG_ARCH_HAS_DMA_OPS. */
#error "for x86_64, whose memory is coherent, with CONFIG_ARCH_HAS_DMA_OPS (as for Xen guests)"
#endif

/* Rings of a device. No buffer has address 0, because ring 0 has no slots. */
enum {
	RIO_RING_NONE,
	RIO_RING_READ,
	RIO_RING_WRITE,
	/* Buffers in both directions, coherent memory. */
	RIO_RING_BOTH,
	RIO_RINGS,
};

/* A ring: a flat table, and which of its slots are free. */
struct rio_ring {
	struct rio_entry *table;
	u32 slots;
	u16 number;
	/* RIO_READ, RIO_WRITE or both. */
	u8 direction;

	/* Protects all fields below. */
	spinlock_t lock;
	/* Free slots in the order in which they became free: a queue in a ring. */
	u32 *free;
	u32 free_first;
	u32 free_count;
	u64 maps;
	u64 unmaps;
	u64 invalidations;
	/* Maps that found no free slot. */
	u64 full;
	/* Unmaps of what was not mapped. */
	u64 bad;
	/* Slots whose invalidation the IOMMU did not answer. They are never used again. */
	u64 lost;
};

/* A device behind the IOMMU. It stays in the list until the IOMMU is removed. */
struct rio_endpoint {
	struct list_head list;
	struct rio *rio;
	/* The device, or NULL if it is unplugged. */
	struct pci_dev *pdev;
	u16 id;
	/* A copy of rio_ops. container_of() on it finds the endpoint. */
	const struct dma_map_ops ops;
	/* A page: the rDEVICE, then the rRINGs. */
	struct rio_entry *rdevice;
	struct rio_ring rings[RIO_RINGS];
};

/* A ring IOMMU. */
struct rio {
	struct pci_dev *pdev;
	void __iomem *regs;
	struct rio_entry *root;
	/* Context tables by bus; NULL for buses without a device behind this IOMMU. */
	struct rio_entry *contexts[256];
	/* Requester IDs of the devices behind it, ascending. */
	u16 *devices;
	u32 device_count;

	/* Protects the list of endpoints and their devices. */
	struct mutex mutex;
	struct list_head endpoints;
	struct notifier_block binding;
	struct notifier_block sleep;

	struct rio_entry *fault_queue;
	u32 fault_entries;
	/* Number of entries read, modulo 2^32. Used by the work item only. */
	u32 fault_head;
	u64 faults;
	struct delayed_work fault_work;
	struct dentry *debugfs;
};

/* main.c */
extern unsigned int rio_slots;
extern struct dentry *rio_debugfs;

/* tables.c */
int rio_tables_init(struct rio *rio);
void rio_tables_free(struct rio *rio);
int rio_rdevice_init(struct rio_endpoint *endpoint);
void rio_rdevice_attach(struct rio_endpoint *endpoint);
void rio_rdevice_free(struct rio_endpoint *endpoint);

/* ring.c */
int rio_ring_init(struct rio_ring *ring, u16 number, u32 slots);
void rio_ring_free(struct rio_ring *ring);
dma_addr_t rio_ring_map(struct rio_ring *ring, u64 buffer, u64 bytes, u32 offset);
bool rio_ring_unmap(struct rio_endpoint *endpoint, dma_addr_t iova);
bool rio_invalidate(struct rio *rio, u64 word);

/* ops.c */
extern const struct dma_map_ops rio_ops;

/* bind.c */
int rio_bind_start(struct rio *rio);
void rio_bind_stop(struct rio *rio);
void rio_bind_free(struct rio *rio);

/* faults.c */
int rio_faults_init(struct rio *rio);
void rio_faults_work(struct work_struct *work);
void rio_faults_free(struct rio *rio);
irqreturn_t rio_faults_interrupt(int irq, void *data);

/* debugfs.c */
void rio_debugfs_add(struct rio *rio);
void rio_debugfs_add_endpoint(struct rio_endpoint *endpoint);

#endif
