/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The frontend of the para-virtual IOMMU: interfaces between its parts.
 *
 *   ops       the dma_map_ops that drivers call
 *   hit       fast path of a map with a cache hit, and of its unmap
 *   cache     mappings of one endpoint: lookup, sharing, removal
 *   evict     removal of mappings: at expiry, for room, on driver unbind
 *   iova      allocation of an endpoint's addresses
 *   queue     requests to the host and waiting for their answers
 *   slots     start and end of the request queue
 *   endpoint  the devices that the host translates for
 *   events    accesses that the host blocked
 */
#ifndef PVIOMMU_H
#define PVIOMMU_H

#include <linux/atomic.h>
#include <linux/cache.h>
#include <linux/dma-direction.h>
#include <linux/iova.h>
#include <linux/ktime.h>
#include <linux/list.h>
#include <linux/percpu.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>

#include "core.h"
#include "wire.h"

/* Minimum size of an endpoint's two hash tables, as a power of two. */
#define PVI_TABLE_BITS_MIN 11
/* Pages of a map in an ordinary slot of the request queue. */
#define PVI_SLOT_PAGES 64
/* Maximum number of an endpoint's shards, a power of two. */
#define PVI_SHARDS_MAX 16
/* Maximum value of pvi_cache_pages: 4 GiB of memory. */
#define PVI_LIMIT_MAX 1048576
/* Maximum value of pvi_cycles. */
#define PVI_CYCLES_MAX 1000

/* A request to the host. The host owns its memory until it has answered. */
struct pvi_slot {
	struct list_head free;
	struct pvi_request *request;
	/* Size of the memory at request, in bytes. */
	size_t room;
	/* Destination of the answer. NULL if no caller waits for it any more. */
	struct pvi_sent *sent;
	/* Written by the host. */
	u8 status;
};

/* The request queue. */
struct pvi_queue {
	/* Held for short sections, never while waiting. */
	spinlock_t lock;
	struct virtqueue *vq;
	struct list_head free;
	struct pvi_slot *slots;
	unsigned int slot_count;
	/* The last slot, which has room for a large batch. */
	struct pvi_slot *large;
	bool large_taken;
	/* True after a failure; no more requests are sent. */
	bool broken;
	u64 requests;
	u64 kicks;
};

/* A PVIOMMU device. */
struct pvi {
	struct core_iommu core;
	struct virtio_device *vdev;
	struct pvi_queue queue;
	/* The event queue, used only by the work item. NULL without events. */
	struct virtqueue *events_vq;
	struct pvi_event *event_buffers;
	struct delayed_work events;
	/* In jiffies. The work item does not run earlier. */
	unsigned long events_due;
	u64 events_seen;

	u64 giova_first;
	u64 giova_last;
	u32 pages_max;
	/* The devices that it translates for, in ascending order. */
	u32 *devices;
	u32 device_count;

	/* Number of the current cycle of the cache. */
	u64 cycle;
	struct delayed_work tick;
	struct dentry *debugfs;
};

/* State of a mapping whose driver may have unbound. */
enum pvi_orphan {
	PVI_OWNED = 0,
	/* The driver has unbound, and the host is unmapping the pages. */
	PVI_BEING_UNMAPPED,
	/* The host has unmapped the pages. The addresses are reserved until the driver's unmap. */
	PVI_UNMAPPED,
};

/* A mapping of consecutive pages to consecutive addresses. */
struct pvi_mapping {
	struct hlist_node by_page;
	struct hlist_node by_giova;
	/* In the list of unused mappings, oldest first, or in a batch. */
	struct list_head list;
	/* Addresses of the first page. */
	u64 giova;
	u64 gpa;
	/* Pages that are not contiguous, valid until the host has mapped them. Or NULL. */
	struct page **frames;
	u32 pages;
	/* Number of buffers that use it. */
	u32 users;
	enum dma_data_direction direction;
	/* True if the cache finds it by its page and keeps it when unused. */
	bool shared;
	enum pvi_orphan orphan;
	/* Cycle in which it lost its last user. */
	u64 cycle;
};

/*
 * A part of an endpoint's mappings. CPUs that map at the same time rarely use the same one. The
 * locks are held for short sections, never while waiting.
 */
struct pvi_shard {
	/* Protects the buckets of by_giova, and orphans in them. Taken before a page_lock. */
	spinlock_t giova_lock;
	/* Protects the buckets of by_page, the users of their mappings, and the list below. */
	spinlock_t page_lock ____cacheline_aligned_in_smp;
	/* Unused mappings, in the order in which they lost their last user. */
	struct list_head unused;
} ____cacheline_aligned_in_smp;

/* Counters of an endpoint on one CPU. Only their sums have a meaning (pvi_count). */
struct pvi_counts {
	/* Mappings in use. */
	u64 live;
	/* Unused mappings, and their pages, which the device can still access. */
	u64 kept;
	u64 kept_pages;
	u64 maps;
	u64 unmaps;
	u64 hits;
	u64 misses;
	u64 expired;
	/* Mappings evicted before they expired, for room or on driver unbind. */
	u64 forced;
	/* Mappings that did not fit into the cache. */
	u64 full;
	u64 failures;
	/* Pages whose unmap the host did not confirm. Their addresses are never reused. */
	u64 lost;
};

/* A PCI address whose DMA this module maps. */
struct pvi_endpoint {
	struct core_endpoint core;
	struct pvi *pvi;
	struct iova_domain iovad;
	/* Removes expired mappings and makes room. */
	struct work_struct trim;

	/* Hash tables. Each shard has the same part of both. */
	struct hlist_head *by_page;
	struct hlist_head *by_giova;
	unsigned int table_bits;
	struct pvi_shard *shards;
	unsigned int shard_count;
	/* Shift from the index of a bucket to that of its shard. */
	unsigned int shard_shift;
	/* The shard from which the next map that needs room evicts. */
	unsigned int next_shard;
	/* Pages of cached mappings, in use or unused: at most pvi_cache_pages. */
	atomic_long_t cached_pages;
	/* Mappings of unbound drivers: unmapped, but their addresses are still reserved. */
	atomic_long_t orphans;
	/* True if the worker must remove some of the unused mappings. */
	bool room_requested;
	struct pvi_counts __percpu *counts;
};

/*
 * Time that a caller has waited for the host, over all its requests. A host that answers each
 * request at the last moment gets no more time than one that never answers.
 */
struct pvi_poll_timeout {
	bool may_sleep;
	unsigned int polls;
	/* Number of delays of one microsecond. */
	u32 microseconds;
	/* Total time of completed waits. */
	s64 waited_ns;
	/* Start of the current long wait; 0 if none. */
	ktime_t since;
};

/* A driver's map call, which cannot sleep. */
struct pvi_call {
	/* For its maps, and for making room. */
	struct pvi_poll_timeout timeout;
	/* For undoing its maps. */
	struct pvi_poll_timeout undoing;
	/* True after the first attempt to make room; there is only one. */
	bool made_room;
};

/* main.c */
extern bool pvi_cache;
extern unsigned int pvi_cycle_ms;
extern unsigned int pvi_cycles;
extern unsigned int pvi_cache_pages;
extern struct workqueue_struct *pvi_workqueue;
extern struct dentry *pvi_debugfs;

/* slots.c */
int pvi_queue_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_queue_stop(struct pvi *pvi);
void pvi_queue_free(struct pvi *pvi);

/* queue.c */
int pvi_queue_map(struct pvi_endpoint *endpoint, struct list_head *mappings,
		  enum dma_data_direction direction, struct pvi_call *call, bool *undone);
int pvi_queue_unmap(struct pvi_endpoint *endpoint, struct list_head *mappings,
		    struct pvi_poll_timeout *timeout);

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
u64 pvi_count(const u64 __percpu *counter);
void pvi_mappings_free(struct pvi_endpoint *endpoint, struct list_head *mappings, bool lost);
void pvi_unhash_giovas(struct pvi_endpoint *endpoint, struct list_head *mappings);
void pvi_orphan_free(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping, bool lost);
int pvi_cache_add(struct pvi_endpoint *endpoint, struct list_head *fresh, struct pvi_call *call,
		  bool *undone);
int pvi_put_orphan(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping);

/* evict.c */
int pvi_mappings_release(struct pvi_endpoint *endpoint, struct list_head *evicted,
			 struct pvi_poll_timeout *timeout);
void pvi_request_room(struct pvi_endpoint *endpoint);
bool pvi_make_room(struct pvi_endpoint *endpoint, struct pvi_poll_timeout *timeout);
void pvi_cache_expire(struct pvi_endpoint *endpoint, u64 cycle);
void pvi_cache_evict_share(struct pvi_endpoint *endpoint);
void pvi_cache_evict_unused(struct pvi_endpoint *endpoint);
void pvi_cache_unbind(struct pvi_endpoint *endpoint);
void pvi_trim_work(struct work_struct *work);

/* ops.c */
extern const struct dma_map_ops pvi_ops;

/* endpoint.c */
extern const struct core_engine pvi_engine;
void pvi_trim_all(struct pvi *pvi);

/* events.c */
void pvi_events_work(struct work_struct *work);
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_events_callback(struct virtqueue *vq);

/* debugfs.c */
void pvi_debugfs_add(struct pvi *pvi);
void pvi_debugfs_add_endpoint(struct pvi_endpoint *endpoint);

#endif
