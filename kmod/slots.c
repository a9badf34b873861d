// SPDX-License-Identifier: GPL-2.0-only
/* Start and end of the request queue: its slots, which are allocated once. */
#include <linux/slab.h>

#include "pviommu.h"

/* Pages of an unmap in the large slot. It is filled with interrupts disabled. */
#define PVI_LARGE_PAGES		4096
#define PVI_SLOTS_MAX		64

static int pvi_slot_init(struct pvi_slot *slot, size_t room)
{
	slot->request = kmalloc(room, GFP_KERNEL | __GFP_NOWARN);
	if (!slot->request)
		return -ENOMEM;
	slot->room = room;
	return 0;
}

int pvi_queue_init(struct pvi *pvi, struct virtqueue *vq)
{
	size_t room = pvi_request_bytes(PVI_MAP, PVI_SLOT_PAGES);
	u32 large = min_t(u32, pvi->pages_max, PVI_LARGE_PAGES);
	size_t most = pvi_request_bytes(PVI_UNMAP, large);
	struct pvi_queue *queue = &pvi->queue;
	unsigned int count, i;
	int err;

	spin_lock_init(&queue->lock);
	INIT_LIST_HEAD(&queue->free);
	queue->vq = vq;
	/* A request takes two descriptors. */
	count = min_t(unsigned int, virtqueue_get_vring_size(vq) / 2, PVI_SLOTS_MAX);
	if (count < 2)
		return -EINVAL;
	queue->slots = kcalloc(count, sizeof(*queue->slots), GFP_KERNEL);
	if (!queue->slots)
		return -ENOMEM;
	/* pvi_queue_free() frees this many slots. */
	queue->slot_count = count;
	for (i = 0; i < count - 1; i++) {
		err = pvi_slot_init(&queue->slots[i], room);
		if (err)
			goto free;
		list_add(&queue->slots[i].free, &queue->free);
	}
	queue->large = &queue->slots[i];
	/* Allocate as much as memory allows. Batches are split at its size. */
	for (most = max(most, room); (err = pvi_slot_init(queue->large, most)); most /= 2) {
		if (most < room)
			goto free;
	}
	return 0;

free:
	pvi_queue_free(pvi);
	return err;
}

/* Call this after a reset of the device: the host no longer writes to slots. */
void pvi_queue_free(struct pvi *pvi)
{
	struct pvi_queue *queue = &pvi->queue;
	unsigned int i;

	for (i = 0; i < queue->slot_count; i++)
		kfree(queue->slots[i].request);
	kfree(queue->slots);
	queue->slots = NULL;
	queue->slot_count = 0;
}

/* Ends all requests: callers that wait return, and nothing more is sent. */
void pvi_queue_stop(struct pvi *pvi)
{
	struct pvi_queue *queue = &pvi->queue;
	unsigned long flags;

	spin_lock_irqsave(&queue->lock, flags);
	WRITE_ONCE(queue->broken, true);
	spin_unlock_irqrestore(&queue->lock, flags);
	__virtqueue_break(queue->vq);
}
