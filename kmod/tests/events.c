// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs events.c in user space (kernel.h). The host fills every buffer as soon as it is notified and
 * sends an interrupt each time, even if interrupts are disabled.
 */
#include "../events.c"
#include "check.h"

struct workqueue_struct *pvi_workqueue;
u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps;
static struct virtio_device device;
static struct virtqueue queue = { .vdev = &device };
static struct pvi pvi = { .vdev = &device };
/* Empty buffers, and buffers with an event. */
static struct pvi_event *left[PVI_EVENT_BUFFERS], *filled[PVI_EVENT_BUFFERS];
static unsigned int left_count, filled_count;
static bool enabled, storm;

void *test_alloc(size_t bytes)
{
	return calloc(1, bytes);
}

unsigned int virtqueue_get_vring_size(struct virtqueue *vq)
{
	return 64;
}

int virtqueue_add_inbuf(struct virtqueue *vq, struct scatterlist *list, unsigned int count,
			void *data, gfp_t gfp)
{
	CHECK(left_count < PVI_EVENT_BUFFERS);
	left[left_count++] = data;
	return 0;
}

void *virtqueue_get_buf(struct virtqueue *vq, unsigned int *bytes)
{
	if (!filled_count)
		return NULL;
	*bytes = sizeof(struct pvi_event);
	return filled[--filled_count];
}

static void host_fills(unsigned int most)
{
	while (left_count && most--) {
		struct pvi_event *event = left[--left_count];

		*event = (struct pvi_event){ .access = PVI_EVENT_WRITE,
					     .reason = PVI_EVENT_NOT_MAPPED };
		filled[filled_count++] = event;
	}
	pvi_events_callback(&queue);
}

bool virtqueue_kick(struct virtqueue *vq)
{
	if (storm)
		host_fills(PVI_EVENT_BUFFERS);
	return true;
}

void virtqueue_disable_cb(struct virtqueue *vq)
{
	enabled = false;
}

bool virtqueue_enable_cb(struct virtqueue *vq)
{
	enabled = true;
	return !filled_count;
}

/*
 * Advances the time by milliseconds. Runs the work once in each if it is due; without the pause it
 * would be due again.
 */
static void passes(unsigned int ms)
{
	for (; ms; ms--) {
		if (pvi.events.work.queued && !time_after(pvi.events.due, jiffies)) {
			pvi.events.work.queued = false;
			pvi_events_work(&pvi.events.work);
			CHECK(!pvi.events.work.queued || time_after(pvi.events.due, jiffies));
		}
		test_now_us += 1000;
	}
}

int main(void)
{
	device.priv = &pvi;
	CHECK(!pvi_events_init(&pvi, &queue) && left_count == PVI_EVENT_BUFFERS);
	passes(100);

	/* An event after a quiet time is handled at once, and interrupts are enabled again. */
	host_fills(1);
	passes(1);
	CHECK(pvi.events_seen == 1 && !enabled);
	passes(PVI_EVENTS_PAUSE_MS);
	CHECK(enabled && !pvi.events.work.queued);

	/* A second of a storm: 100 times all buffers. */
	storm = true;
	pvi.events_seen = 0;
	host_fills(PVI_EVENT_BUFFERS);
	passes(1000);
	CHECK(pvi.events_seen == 100 * PVI_EVENT_BUFFERS);
	CHECK(test_complaints == 1 + pvi.events_seen);
	storm = false;
	passes(2 * PVI_EVENTS_PAUSE_MS);
	CHECK(enabled && !pvi.events.work.queued);

	/* An overflow of the due time delays events by at most the pause. */
	pvi.events_due = jiffies + (1UL << 40);
	pvi.events_seen = 0;
	host_fills(1);
	passes(PVI_EVENTS_PAUSE_MS + 1);
	CHECK(pvi.events_seen == 1);
	free(pvi.event_buffers);
	printf("all as it should be\n");
	return 0;
}
