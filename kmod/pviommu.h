/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A frontend of the para-virtual IOMMU: what its parts know of each other.
 *
 *   ops     what drivers call: dma_map_ops
 *   cache   the mappings of one endpoint: shared, kept, expired
 *   iova    where an endpoint's addresses come from
 *   queue   requests to the host, and waiting for their answers
 *   bind    which PCI devices are endpoints, and when
 *   events  accesses that the host stopped
 */
#ifndef PVIOMMU_H
#define PVIOMMU_H

#include <linux/dma-direction.h>
#include <linux/dma-map-ops.h>
#include <linux/iova.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>

#include "wire.h"

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ARCH_HAS_DMA_OPS)
/* Nothing is synchronised here, and without its operations set_dma_ops() does nothing. */
#error "for x86_64, whose memory is coherent, with CONFIG_ARCH_HAS_DMA_OPS (as for Xen guests)"
#endif

/* Buckets of the two tables of an endpoint's mappings, as a power of two. */
#define PVI_TABLE_BITS 12

/* What is asked of the host, in memory of its own until the host has answered. */
struct pvi_slot {
	struct list_head free;
	struct pvi_request *request;
	/* Bytes of memory at request. */
	size_t room;
	/* Where the answer goes. None if nobody waits for it any more. */
	struct pvi_sent *sent;
	/* The host's to write. */
	u8 status;
};

/* The request queue. */
struct pvi_queue {
	/* Held for a few steps at a time, never while waiting. */
	spinlock_t lock;
	struct virtqueue *vq;
	struct list_head free;
	struct pvi_slot *slots;
	unsigned int slot_count;
	/* The one slot with room for a large batch; slots' last one. */
	struct pvi_slot *large;
	bool large_taken;
	/* Nothing is asked any more. */
	bool broken;
	u64 requests;
	u64 kicks;
};

/* One PVIOMMU device. */
struct pvi {
	struct virtio_device *vdev;
	struct pvi_queue queue;
	/* Buffers are left while the host may fill others. */
	spinlock_t events_lock;
	struct pvi_event *event_buffers;
	u64 events_seen;

	u64 giova_first;
	u64 giova_last;
	u32 pages_max;
	u32 device_first;
	u32 device_last;

	/* Guards the list of endpoints; taken where one may sleep. */
	struct mutex mutex;
	struct list_head endpoints;
	struct notifier_block binding;
	struct notifier_block sleep;

	/* The number of the present cycle of the cache. */
	u64 cycle;
	struct delayed_work tick;
	struct dentry *debugfs;
};

/* Pages that an endpoint reaches, consecutive on both sides. */
struct pvi_mapping {
	struct hlist_node by_page;
	struct hlist_node by_giova;
	/* Among those without users, oldest first; or in a batch. */
	struct list_head list;
	/* First byte of the first page on either side. */
	u64 giova;
	u64 gpa;
	u32 pages;
	/* Buffers that use it. */
	u32 users;
	enum dma_data_direction direction;
	/* Can be found by its page, and is kept when it has no user. */
	bool shared;
	/* When it lost its last user. */
	u64 cycle;
};

/*
 * A place on the bus whose DMA goes through us. It outlives a device that is unplugged: what the
 * host did not unmap must not be given to the next one there.
 */
struct pvi_endpoint {
	struct list_head list;
	struct pvi *pvi;
	/* The device, if there is one; without, there are no mappings. */
	struct pci_dev *pdev;
	u64 devid;
	/* A copy of pvi_ops: by its place the endpoint is found. */
	const struct dma_map_ops ops;
	struct iova_domain iovad;

	/* Guards all below. */
	spinlock_t lock;
	struct hlist_head *by_page;
	struct hlist_head *by_giova;
	/* Mappings without users, in the order in which they lost them. */
	struct list_head unused;
	u64 live;
	u64 kept;

	u64 maps;
	u64 unmaps;
	u64 hits;
	u64 misses;
	u64 expired;
	u64 failures;
	/* Pages whose unmap was not confirmed: their addresses are out of use. */
	u64 lost;
};

/* main.c */
extern bool pvi_cache;
extern bool pvi_literal;
extern unsigned int pvi_cycle_ms;
extern unsigned int pvi_cycles;
extern struct dentry *pvi_debugfs;

/* queue.c */
int pvi_queue_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_queue_free(struct pvi *pvi);
int pvi_queue_map(struct pvi_endpoint *endpoint, struct list_head *mappings,
		  enum dma_data_direction direction, bool *undone);
int pvi_queue_unmap(struct pvi_endpoint *endpoint, struct list_head *mappings);

/* iova.c */
int pvi_iova_init(struct pvi_endpoint *endpoint);
u64 pvi_iova_alloc(struct pvi_endpoint *endpoint, u32 pages, u64 limit);
void pvi_iova_free(struct pvi_endpoint *endpoint, u64 giova, u32 pages);

/* cache.c */
int pvi_mapping_slab_init(void);
void pvi_mapping_slab_exit(void);
int pvi_cache_init(struct pvi_endpoint *endpoint);
void pvi_cache_free(struct pvi_endpoint *endpoint);
struct pvi_mapping *pvi_cache_hit(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				  enum dma_data_direction direction, u64 limit);
struct pvi_mapping *pvi_mapping_new(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				    enum dma_data_direction direction, u64 limit, bool shared);
void pvi_failed(struct pvi_endpoint *endpoint, const char *what, int err, unsigned long attrs);
void pvi_mappings_discard(struct pvi_endpoint *endpoint, struct list_head *fresh);
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, bool *undone);
int pvi_cache_put(struct pvi_endpoint *endpoint, u64 giova, struct list_head *gone);
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *gone);
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle);
void pvi_cache_drop_unused(struct pvi_endpoint *endpoint);
void pvi_cache_drop_all(struct pvi_endpoint *endpoint);

/* ops.c */
extern const struct dma_map_ops pvi_ops;

/* bind.c */
int pvi_bind_start(struct pvi *pvi);
void pvi_bind_stop(struct pvi *pvi);
void pvi_bind_free(struct pvi *pvi);
void pvi_expire_all(struct pvi *pvi, u64 cycle);

/* events.c */
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_events_come(struct virtqueue *vq);

/* debugfs.c */
void pvi_debugfs_add(struct pvi *pvi);
void pvi_debugfs_add_endpoint(struct pvi_endpoint *endpoint);

#endif
