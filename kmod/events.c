// SPDX-License-Identifier: GPL-2.0-only
/*
 * Accesses that the host stopped: each is told in a buffer that was left for it, and goes into the
 * kernel's log.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "pviommu.h"

#define PVI_EVENT_BUFFERS 16

static int pvi_leave(struct virtqueue *vq, struct pvi_event *event)
{
	struct scatterlist list;

	sg_init_one(&list, event, sizeof(*event));
	return virtqueue_add_inbuf(vq, &list, 1, event, GFP_ATOMIC);
}

static void pvi_tell(struct pvi *pvi, struct pvi_event *event)
{
	u32 access = le32_to_cpu(event->access);
	u32 reason = le32_to_cpu(event->reason);
	u64 devid = le64_to_cpu(event->devid);

	pvi->events_seen++;
	dev_err_ratelimited(&pvi->vdev->dev, "%04llx:%02llx:%02llx.%llx was stopped: %s at %#llx, %s\n",
			    devid >> 16, devid >> 8 & 0xff, devid >> 3 & 0x1f, devid & 7,
			    access == PVI_EVENT_WRITE ? "a write" : "a read",
			    le64_to_cpu(event->giova),
			    reason == PVI_EVENT_DIRECTION ? "not in this direction" :
							    "nothing is mapped there");
}

void pvi_events_come(struct virtqueue *vq)
{
	struct pvi *pvi = vq->vdev->priv;
	struct pvi_event *event;
	unsigned long flags;
	unsigned int bytes;

	spin_lock_irqsave(&pvi->events_lock, flags);
	while ((event = virtqueue_get_buf(vq, &bytes))) {
		if (pvi_event_is_known(event, bytes))
			pvi_tell(pvi, event);
		pvi_leave(vq, event);
	}
	virtqueue_kick(vq);
	spin_unlock_irqrestore(&pvi->events_lock, flags);
}

/* Once the device is ready: it may fill the first buffer before the last is left. */
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq)
{
	unsigned int count, i;
	unsigned long flags;
	int err = 0;

	count = min_t(unsigned int, PVI_EVENT_BUFFERS, virtqueue_get_vring_size(vq));
	pvi->event_buffers = kcalloc(count, sizeof(*pvi->event_buffers), GFP_KERNEL);
	if (!pvi->event_buffers)
		return -ENOMEM;
	spin_lock_irqsave(&pvi->events_lock, flags);
	for (i = 0; i < count && !err; i++)
		err = pvi_leave(vq, &pvi->event_buffers[i]);
	virtqueue_kick(vq);
	spin_unlock_irqrestore(&pvi->events_lock, flags);
	return err;
}
