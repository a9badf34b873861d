/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A frontend of the para-virtual IOMMU: what its parts know of each other.
 *
 *   ops     what drivers call: dma_map_ops
 *   hit     the path of a map that finds its pages mapped, and of its unmap
 *   cache   the mappings of one endpoint: known, shared, forgotten
 *   leave   how mappings leave: expired, for room, with their driver
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
#include <linux/ktime.h>
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

/* Fewest buckets of the two tables of an endpoint's mappings, as a power of two. */
#define PVI_TABLE_BITS_MIN 11
/* Most pages that a cache can be allowed: 4 GiB of memory. */
#define PVI_LIMIT_MAX 1048576

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
	/* The event queue, which its work alone looks at. None if there are no events. */
	struct virtqueue *events_vq;
	struct pvi_event *event_buffers;
	struct delayed_work events;
	/* In jiffies: the work does not run before. */
	unsigned long events_due;
	u64 events_seen;

	u64 giova_first;
	u64 giova_last;
	u32 pages_max;
	/* The devices that it translates for, in ascending order. */
	u32 *devices;
	u32 device_count;

	/*
	 * Guards the list of endpoints and their devices; taken where one may sleep, and never held
	 * while the host is asked. Endpoints stay in the list until the device is removed.
	 */
	struct mutex mutex;
	struct list_head endpoints;
	struct notifier_block binding;
	struct notifier_block sleep;

	/* The number of the present cycle of the cache. */
	u64 cycle;
	struct delayed_work tick;
	struct dentry *debugfs;
};

/* Whether the driver that made a mapping is there to unmap it. */
enum pvi_orphan {
	PVI_OWNED = 0,
	/* It is gone, and the host is being asked to unmap. */
	PVI_BEING_UNMAPPED,
	/* The host has; the addresses wait for the driver's unmap. */
	PVI_UNMAPPED,
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
	enum pvi_orphan orphan;
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
	/* The device, if there is one; without, there are no mappings in use. */
	struct pci_dev *pdev;
	/* Devices that are unplugged and left mappings; they have our operations. */
	struct list_head unplugged;
	u32 devid;
	/* The PCI address. */
	char name[16];
	/* A copy of pvi_ops: by its place the endpoint is found. */
	const struct dma_map_ops ops;
	struct iova_domain iovad;
	/* Removes what has expired, and makes room. */
	struct work_struct trim;

	/* Guards all below. */
	spinlock_t lock;
	struct hlist_head *by_page;
	struct hlist_head *by_giova;
	unsigned int table_bits;
	/* Mappings without users, in the order in which they lost them. */
	struct list_head unused;
	u64 live;
	u64 kept;
	/* Pages of the kept ones: what the device reaches beside what is in use. */
	u64 kept_pages;
	/* Pages of what is found by its page, in use or kept: at most pvi_cache_pages. */
	u64 cached_pages;
	/* Left by drivers that are gone: unmapped, and their addresses not free. */
	u64 orphans;
	/* The worker removes a part of what is kept. */
	bool room_wanted;

	u64 maps;
	u64 unmaps;
	u64 hits;
	u64 misses;
	u64 expired;
	/* Left the cache before their time, for want of room or with their driver. */
	u64 forced;
	/* Found no room in the cache. */
	u64 full;
	u64 failures;
	/* Pages whose unmap was not confirmed: their addresses are out of use. */
	u64 lost;
};

/*
 * How long a caller has been waiting for the host, in all of its requests: a host that answers each
 * in the last moment gets no more time than one that answers none.
 */
struct pvi_patience {
	bool may_sleep;
	unsigned int looks;
	/* Delays, each of a microsecond. */
	u32 microseconds;
	/* In waits that are over. */
	s64 waited_ns;
	/* When this one began to take long; 0 before. */
	ktime_t since;
};

/* A driver's call to map, which cannot sleep. */
struct pvi_call {
	/* For what it maps, and for the room that it makes. */
	struct pvi_patience patience;
	/* For taking back what it has mapped. */
	struct pvi_patience undoing;
	/* Room is made once. */
	bool made_room;
};

/* main.c */
extern bool pvi_cache;
extern bool pvi_literal;
extern unsigned int pvi_cycle_ms;
extern unsigned int pvi_cycles;
extern unsigned int pvi_cache_pages;
extern struct workqueue_struct *pvi_workqueue;
extern struct dentry *pvi_debugfs;

/* queue.c */
int pvi_queue_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_queue_free(struct pvi *pvi);
int pvi_queue_map(struct pvi_endpoint *endpoint, struct list_head *mappings,
		  enum dma_data_direction direction, struct pvi_call *call, bool *undone);
int pvi_queue_unmap(struct pvi_endpoint *endpoint, struct list_head *mappings,
		    struct pvi_patience *patience);

/* iova.c */
int pvi_iova_init(struct pvi_endpoint *endpoint);
u64 pvi_iova_alloc(struct pvi_endpoint *endpoint, u32 pages, u64 limit);
void pvi_iova_free(struct pvi_endpoint *endpoint, u64 giova, u32 pages);

/* cache.c */
int pvi_mapping_slab_init(void);
void pvi_mapping_slab_exit(void);
int pvi_cache_init(struct pvi_endpoint *endpoint);
void pvi_cache_free(struct pvi_endpoint *endpoint);
struct pvi_mapping *pvi_mapping_new(struct pvi_endpoint *endpoint, u64 gpa, u32 pages,
				    enum dma_data_direction direction, u64 limit, bool shared,
				    struct pvi_call *call);
void pvi_failed(struct pvi_endpoint *endpoint, const char *what, int err, unsigned long attrs);
void pvi_forget(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping);
void pvi_mappings_free(struct pvi_endpoint *endpoint, struct list_head *mappings, bool lost);
void pvi_orphan_free(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping, bool lost);
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, struct pvi_call *call,
		  bool *undone);
int pvi_put_orphan(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping);

/* leave.c */
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *gone,
			 struct pvi_patience *patience);
void pvi_want_room(struct pvi_endpoint *endpoint);
bool pvi_make_room(struct pvi_endpoint *endpoint, struct pvi_patience *patience);
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle);
void pvi_cache_shed(struct pvi_endpoint *endpoint);
void pvi_cache_drop_unused(struct pvi_endpoint *endpoint);
void pvi_cache_abandon(struct pvi_endpoint *endpoint);
void pvi_trim_work(struct work_struct *work);

/* ops.c */
extern const struct dma_map_ops pvi_ops;

/* bind.c */
int pvi_bind_start(struct pvi *pvi);
void pvi_bind_stop(struct pvi *pvi);
void pvi_bind_free(struct pvi *pvi);
void pvi_trim_all(struct pvi *pvi);

/* events.c */
void pvi_events_work(struct work_struct *work);
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_events_come(struct virtqueue *vq);

/* debugfs.c */
void pvi_debugfs_add(struct pvi *pvi);
void pvi_debugfs_add_endpoint(struct pvi_endpoint *endpoint);

#endif
