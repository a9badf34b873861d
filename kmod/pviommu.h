/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The frontend of the para-virtual IOMMU: interfaces between its parts.
 *
 *   ops     the dma_map_ops that drivers call
 *   hit     fast path of a map with a cache hit, and of its unmap
 *   cache   mappings of one endpoint: lookup, sharing, removal
 *   leave   removal of mappings: at expiry, for room, on driver unbind
 *   iova    allocation of an endpoint's addresses
 *   queue   requests to the host and waiting for their answers
 *   bind    selection of the PCI devices that are endpoints
 *   events  accesses that the host blocked
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
/* The module does no cache maintenance, and set_dma_ops() needs CONFIG_ARCH_HAS_DMA_OPS. */
#error "for x86_64, whose memory is coherent, with CONFIG_ARCH_HAS_DMA_OPS (as for Xen guests)"
#endif

/* Minimum size of an endpoint's two hash tables, as a power of two. */
#define PVI_TABLE_BITS_MIN 11
/* Maximum value of pvi_cache_pages: 4 GiB of memory. */
#define PVI_LIMIT_MAX 1048576

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

	/*
	 * Protects the list of endpoints and their devices. Taken in sleepable context, never held
	 * during a request to the host. Endpoints stay in the list until the device is removed.
	 */
	struct mutex mutex;
	struct list_head endpoints;
	struct notifier_block binding;
	struct notifier_block sleep;

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
 * A PCI address whose DMA this module maps. It outlives an unplugged device: addresses that the
 * host did not unmap must not be reused for the next device there.
 */
struct pvi_endpoint {
	struct list_head list;
	struct pvi *pvi;
	/* The device, or NULL. Without a device, no mapping is in use. */
	struct pci_dev *pdev;
	/* Unplugged devices that left mappings. They keep our dma_map_ops. */
	struct list_head unplugged;
	u32 devid;
	/* PCI address. */
	char name[16];
	/* A copy of pvi_ops. container_of() on it finds the endpoint. */
	const struct dma_map_ops ops;
	struct iova_domain iovad;
	/* Removes expired mappings and makes room. */
	struct work_struct trim;

	/* Protects all fields below. */
	spinlock_t lock;
	struct hlist_head *by_page;
	struct hlist_head *by_giova;
	unsigned int table_bits;
	/* Unused mappings, in the order in which they lost their last user. */
	struct list_head unused;
	u64 live;
	u64 kept;
	/* Pages of unused mappings, which the device can still access. */
	u64 kept_pages;
	/* Pages of cached mappings, in use or unused: at most pvi_cache_pages. */
	u64 cached_pages;
	/* Mappings of unbound drivers: unmapped, but their addresses are still reserved. */
	u64 orphans;
	/* True if the worker must remove some of the unused mappings. */
	bool room_requested;

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
extern bool pvi_as_published;
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
void pvi_unhash_mapping(struct pvi_endpoint *endpoint, struct pvi_mapping *mapping);
void pvi_mappings_free(struct pvi_endpoint *endpoint, struct list_head *mappings, bool lost);
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

/* bind.c */
int pvi_bind_start(struct pvi *pvi);
void pvi_bind_stop(struct pvi *pvi);
void pvi_bind_free(struct pvi *pvi);
void pvi_trim_all(struct pvi *pvi);

/* events.c */
void pvi_events_work(struct work_struct *work);
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq);
void pvi_events_callback(struct virtqueue *vq);

/* debugfs.c */
void pvi_debugfs_add(struct pvi *pvi);
void pvi_debugfs_add_endpoint(struct pvi_endpoint *endpoint);

#endif
