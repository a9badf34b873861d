// SPDX-License-Identifier: GPL-2.0-only
/*
 * Events: the host reports each blocked access in a buffer, and the driver logs it.
 *
 * A device can cause any number of events. The interrupt only queues a work item and disables the
 * next interrupt. The work handles at most as many events as there are buffers, and runs again
 * after PVI_EVENTS_PAUSE_MS; it enables interrupts once it finds no event. The host may still send
 * interrupts, even while the work runs, but they do not shorten the pause. The host drops and
 * counts events for which it has no buffer.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "pviommu.h"

#define PVI_EVENT_BUFFERS	16
/* With the buffers, at most 1600 events a second. */
#define PVI_EVENTS_PAUSE_MS	10

static int pvi_queue_event_buffer(struct virtqueue *vq, struct pvi_event *event)
{
	struct scatterlist list;

	sg_init_one(&list, event, sizeof(*event));
	return virtqueue_add_inbuf(vq, &list, 1, event, GFP_KERNEL);
}

static void pvi_log_event(struct pvi *pvi, const struct pvi_event *event)
{
	u32 access = le32_to_cpu(event->access);
	u32 reason = le32_to_cpu(event->reason);
	u64 devid = le64_to_cpu(event->devid);

	dev_err_ratelimited(&pvi->vdev->dev,
			    "%04llx:%02llx:%02llx.%llx was stopped: %s at %#llx, %s\n",
			    devid >> 16, devid >> 8 & 0xff, devid >> 3 & 0x1f, devid & 7,
			    access == PVI_EVENT_WRITE ? "a write" : "a read",
			    le64_to_cpu(event->giova),
			    reason == PVI_EVENT_DIRECTION ? "not in this direction" :
							    "nothing is mapped there");
}

static long pvi_events_pause(void)
{
	return msecs_to_jiffies(PVI_EVENTS_PAUSE_MS);
}

/* Queues the work for the end of the pause, at once if that has passed. */
static void pvi_queue_events_work(struct pvi *pvi)
{
	long left = READ_ONCE(pvi->events_due) - jiffies;

	/* At most the pause: a 32-bit long overflows after weeks without an event. */
	queue_delayed_work(pvi_workqueue, &pvi->events, clamp(left, 0L, pvi_events_pause()));
}

/* Interrupt handler of the event queue. */
void pvi_events_callback(struct virtqueue *vq)
{
	virtqueue_disable_cb(vq);
	pvi_queue_events_work(vq->vdev->priv);
}

void pvi_events_work(struct work_struct *work)
{
	struct pvi *pvi = container_of(to_delayed_work(work), struct pvi, events);
	struct virtqueue *vq = pvi->events_vq;
	unsigned int bytes, count;
	struct pvi_event *event;

	WRITE_ONCE(pvi->events_due, jiffies + pvi_events_pause());
	for (count = 0; count < PVI_EVENT_BUFFERS; count++) {
		struct pvi_event copy;

		event = virtqueue_get_buf(vq, &bytes);
		if (!event)
			break;
		/* Copy the event, because the host can still write to the buffer. */
		memcpy(&copy, event, sizeof(copy));
		pvi_queue_event_buffer(vq, event);
		if (!pvi_event_is_known(&copy, bytes))
			continue;
		pvi->events_seen++;
		pvi_log_event(pvi, &copy);
	}
	if (count)
		virtqueue_kick(vq);
	/* An event after the last poll and before this has no interrupt. */
	if (count || !virtqueue_enable_cb(vq))
		pvi_queue_events_work(pvi);
}

/* Called before the device is ready and may interrupt. */
int pvi_events_init(struct pvi *pvi, struct virtqueue *vq)
{
	unsigned int count, i;
	int err = 0;

	count = min_t(unsigned int, PVI_EVENT_BUFFERS, virtqueue_get_vring_size(vq));
	pvi->event_buffers = kcalloc(count, sizeof(*pvi->event_buffers), GFP_KERNEL);
	if (!pvi->event_buffers)
		return -ENOMEM;
	pvi->events_vq = vq;
	for (i = 0; i < count && !err; i++)
		err = pvi_queue_event_buffer(vq, &pvi->event_buffers[i]);
	return err;
}
