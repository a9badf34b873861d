// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests to the host over one virtqueue (docs/PVIOMMU.md, "Requests").
 *
 * A map waits for the answer without sleeping, so that drivers may call it in any context. It
 * reschedules where the kernel allows preemption. Callers in sleepable context sleep.
 *
 * Work that does not fit into one request is split into several, with one kick for all (kick
 * merging). If the host does not answer, or answers a request that was not made, the queue is
 * broken and no more requests are sent.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/nmi.h>
#include <linux/preempt.h>
#include <linux/rcupdate.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>

#include "pviommu.h"

#define PVI_TIMEOUT_MS		10000
/* Polls before the first check of the time. */
#define PVI_BUSY_POLLS		4096
/* Sleep between two polls in sleepable context, in microseconds. */
#define PVI_SLEEP_MIN		50
#define PVI_SLEEP_MAX		200
/* Maximum number of requests in flight per caller. */
#define PVI_GROUP		8

#define PVI_LATE	"the host has not answered in 10 s"
#define PVI_UNEXPECTED	\
	"the host completed a request that was not pending, or the device was removed"

/* A position in the pages of a list of mappings. */
struct pvi_cursor {
	struct list_head *head;
	struct pvi_mapping *mapping;
	u32 page;
};

/* A request in flight and its pages. */
struct pvi_sent {
	/*
	 * Slot of the request, until it is answered. Written with queue->lock; its caller reads it
	 * without.
	 */
	struct pvi_slot *slot;
	/* Result of the request. */
	int err;
	struct pvi_cursor from;
	u32 pages;
};

static struct pvi_cursor pvi_cursor_at_first(struct list_head *mappings)
{
	struct pvi_cursor cursor = {
		.head = mappings,
		.mapping = list_first_entry(mappings, struct pvi_mapping, list),
	};

	return cursor;
}

/*
 * Returns the page at the cursor and advances. The caller must not pass the end. @gpa is NULL for
 * an unmap.
 */
static void pvi_cursor_next(struct pvi_cursor *cursor, u64 *giova, u64 *gpa)
{
	u64 offset;

	if (cursor->page == cursor->mapping->pages) {
		cursor->mapping = list_next_entry(cursor->mapping, list);
		cursor->page = 0;
	}
	offset = (u64)cursor->page << PVI_PAGE_SHIFT;
	*giova = cursor->mapping->giova + offset;
	if (gpa && cursor->mapping->frames)
		*gpa = page_to_phys(cursor->mapping->frames[cursor->page]);
	else if (gpa)
		*gpa = cursor->mapping->gpa + offset;
	cursor->page++;
}

static void pvi_break_queue(struct pvi *pvi, const char *why)
{
	struct pvi_queue *queue = &pvi->queue;
	unsigned long flags;
	bool first;

	spin_lock_irqsave(&queue->lock, flags);
	first = !queue->broken;
	WRITE_ONCE(queue->broken, true);
	spin_unlock_irqrestore(&queue->lock, flags);
	if (!first)
		return;
	__virtqueue_break(queue->vq);
	dev_err(&pvi->vdev->dev,
		"%s: the queue is broken: maps fail, and ranges not yet unmapped stay reserved\n",
		why);
}

/* Caller holds queue->lock. Returns a slot for a request of up to this many pages, or NULL. */
static struct pvi_slot *pvi_take_slot(struct pvi_queue *queue, u64 pages)
{
	struct pvi_slot *slot;

	if (pages > PVI_SLOT_PAGES && !queue->large_taken) {
		queue->large_taken = true;
		return queue->large;
	}
	slot = list_first_entry_or_null(&queue->free, struct pvi_slot, free);
	if (slot)
		list_del(&slot->free);
	return slot;
}

/* Caller holds queue->lock. */
static void pvi_put_slot(struct pvi_queue *queue, struct pvi_slot *slot)
{
	if (slot == queue->large)
		queue->large_taken = false;
	else
		list_add(&slot->free, &queue->free);
}

static int pvi_error(u8 status)
{
	switch (status) {
	case PVI_OK:
		return 0;
	case PVI_NO_ROOM:
		return -ENOSPC;
	default:
		return -EIO;
	}
}

/*
 * Caller holds queue->lock. Delivers the host's answers to the waiting callers. Frees the slots at
 * once: a waiter may have been interrupted by a caller that needs a slot, and would never free it.
 */
static void pvi_collect(struct pvi_queue *queue)
{
	struct pvi_slot *slot;
	unsigned int bytes;

	/* The virtqueue rejects an answer to a request that was not made. */
	while ((slot = virtqueue_get_buf(queue->vq, &bytes))) {
		if (slot->sent) {
			slot->sent->err = pvi_error(READ_ONCE(slot->status));
			/* The caller can return at once, and with it the memory at sent. */
			smp_store_release(&slot->sent->slot, NULL);
			slot->sent = NULL;
		}
		pvi_put_slot(queue, slot);
	}
}

/*
 * Caller holds queue->lock. Writes one request and makes it available. Returns -EBUSY if the queue
 * is full.
 */
static int pvi_send(struct pvi_endpoint *endpoint, enum pvi_type type,
		    enum dma_data_direction direction, struct pvi_cursor *cursor, u64 left,
		    struct pvi_sent *sent)
{
	struct pvi_queue *queue = &endpoint->pvi->queue;
	struct scatterlist request, status;
	struct scatterlist *sgs[] = { &request, &status };
	struct pvi_slot *slot;
	u64 giova, gpa;
	u32 pages, i;
	int err;

	slot = pvi_take_slot(queue, left);
	if (!slot)
		return -EBUSY;
	sent->slot = slot;
	sent->from = *cursor;
	pages = min(endpoint->pvi->pages_max, pvi_pages_in(type, slot->room));
	pages = min_t(u64, pages, left);
	sent->pages = pages;

	pvi_begin(slot->request, endpoint->core.devid, type, (enum pvi_direction)direction, pages);
	for (i = 0; i < pages; i++) {
		pvi_cursor_next(cursor, &giova, type == PVI_MAP ? &gpa : NULL);
		if (type == PVI_MAP)
			pvi_set_map(slot->request, pages, i, giova, gpa);
		else
			pvi_set_unmap(slot->request, i, giova);
	}
	slot->status = PVI_FAILED;
	sg_init_one(&request, slot->request, pvi_request_bytes(type, pages));
	sg_init_one(&status, &slot->status, sizeof(slot->status));
	err = virtqueue_add_sgs(queue->vq, sgs, 1, 1, slot, GFP_ATOMIC);
	if (err) {
		*cursor = sent->from;
		pvi_put_slot(queue, slot);
		return err == -ENOSPC ? -EBUSY : err;
	}
	slot->sent = sent;
	queue->requests++;
	return 0;
}

/* Caller holds queue->lock. Returns true if the host needs a notification. */
static bool pvi_kick_due(struct pvi_queue *queue)
{
	if (!virtqueue_kick_prepare(queue->vq))
		return false;
	queue->kicks++;
	return true;
}

/* Reschedules if the caller is preemptible: in process context, without locks. */
static void pvi_cond_resched(void)
{
	if (IS_ENABLED(CONFIG_PREEMPT_COUNT) && preemptible() && !rcu_preempt_depth())
		cond_resched();
}

/*
 * Called after a poll without an answer. Returns false after the time-out. With interrupts disabled
 * the clock may stop, so delays are counted as well; the earlier of both ends the wait.
 */
static bool pvi_poll_continue(struct pvi_poll_timeout *timeout)
{
	if (timeout->polls < PVI_BUSY_POLLS) {
		timeout->polls++;
		cpu_relax();
		return true;
	}
	if (!timeout->since)
		timeout->since = ktime_get();
	if (timeout->may_sleep) {
		usleep_range(PVI_SLEEP_MIN, PVI_SLEEP_MAX);
	} else {
		udelay(1);
		timeout->microseconds++;
		if (!(timeout->microseconds & 0xffff))
			touch_nmi_watchdog();
		pvi_cond_resched();
	}
	return timeout->microseconds < PVI_TIMEOUT_MS * 1000u &&
	       timeout->waited_ns + ktime_to_ns(ktime_sub(ktime_get(), timeout->since)) <
		       PVI_TIMEOUT_MS * (s64)NSEC_PER_MSEC;
}

/* Pauses the count after an answer. */
static void pvi_poll_timeout_pause(struct pvi_poll_timeout *timeout)
{
	timeout->polls = 0;
	if (!timeout->since)
		return;
	timeout->waited_ns += ktime_to_ns(ktime_sub(ktime_get(), timeout->since));
	timeout->since = 0;
}

/*
 * Returns true if the request is answered. While another caller has the lock, it collects the
 * answers, ours included, so callers do not wait for each other.
 */
static bool pvi_poll(struct pvi_queue *queue, struct pvi_sent *sent)
{
	unsigned long flags;

	/* Pairs with smp_store_release() in pvi_collect(): the result is in sent. */
	if (smp_load_acquire(&sent->slot) && spin_trylock_irqsave(&queue->lock, flags)) {
		pvi_collect(queue);
		spin_unlock_irqrestore(&queue->lock, flags);
	}
	/* As above. */
	return !smp_load_acquire(&sent->slot);
}

/* Waits for the host's answer and returns its status as an error code. */
static int pvi_wait(struct pvi *pvi, struct pvi_sent *sent, struct pvi_poll_timeout *timeout)
{
	struct pvi_queue *queue = &pvi->queue;
	bool answered, broken;
	unsigned long flags;

	do {
		/* Read first: an answer that came before the queue broke counts. */
		broken = virtqueue_is_broken(queue->vq);
		if (pvi_poll(queue, sent)) {
			pvi_poll_timeout_pause(timeout);
			return sent->err;
		}
	} while (!broken && pvi_poll_continue(timeout));

	/*
	 * The host still owns the slot and may write to it, but sent becomes invalid when this
	 * returns.
	 */
	spin_lock_irqsave(&queue->lock, flags);
	pvi_collect(queue);
	answered = !sent->slot;
	if (!answered)
		sent->slot->sent = NULL;
	spin_unlock_irqrestore(&queue->lock, flags);
	if (answered)
		return sent->err;
	pvi_break_queue(pvi, broken ? PVI_UNEXPECTED : PVI_LATE);
	return broken ? -EIO : -ETIMEDOUT;
}

/* Makes a group of at least one request available, with one kick. Returns their number. */
static int pvi_send_group(struct pvi_endpoint *endpoint, enum pvi_type type,
			  enum dma_data_direction direction, struct pvi_cursor *cursor, u64 *left,
			  struct pvi_sent *sent, struct pvi_poll_timeout *timeout)
{
	struct pvi_queue *queue = &endpoint->pvi->queue;
	unsigned long flags;
	bool kick = false;
	int count = 0;
	int err = 0;

	for (;;) {
		spin_lock_irqsave(&queue->lock, flags);
		if (queue->broken)
			err = -EIO;
		while (!err && *left && count < PVI_GROUP) {
			err = pvi_send(endpoint, type, direction, cursor, *left, &sent[count]);
			if (!err)
				*left -= sent[count++].pages;
		}
		if (count)
			kick = pvi_kick_due(queue);
		else
			pvi_collect(queue);
		spin_unlock_irqrestore(&queue->lock, flags);
		if (count || err != -EBUSY)
			break;
		/* Other callers own all slots. Wait for the host to answer one of them. */
		if (!pvi_poll_continue(timeout)) {
			pvi_break_queue(endpoint->pvi, PVI_LATE);
			return -ETIMEDOUT;
		}
		err = 0;
	}
	pvi_poll_timeout_pause(timeout);
	if (kick)
		virtqueue_notify(queue->vq);
	if (err && err != -EBUSY && virtqueue_is_broken(queue->vq))
		pvi_break_queue(endpoint->pvi, PVI_UNEXPECTED);
	return count ?: err;
}

static u64 pvi_pages_of(struct list_head *mappings)
{
	struct pvi_mapping *mapping;
	u64 pages = 0;

	list_for_each_entry(mapping, mappings, list)
		pages += mapping->pages;
	return pages;
}

/*
 * Unmaps @left pages from the cursor on, after a failed request too, but none after a group that
 * cannot be sent. Returns the first error, if any.
 */
static int pvi_unmap_from(struct pvi_endpoint *endpoint, struct pvi_cursor cursor, u64 left,
			  struct pvi_poll_timeout *timeout)
{
	struct pvi_sent sent[PVI_GROUP];
	int first = 0;

	while (left) {
		int count = pvi_send_group(endpoint, PVI_UNMAP, DMA_NONE, &cursor, &left, sent,
					   timeout);
		int i;

		if (count < 0)
			return first ?: count;
		for (i = 0; i < count; i++) {
			int err = pvi_wait(endpoint->pvi, &sent[i], timeout);

			first = first ?: err;
		}
	}
	return first;
}

/*
 * Maps the pages of all mappings, or none. On failure, *@undone is true if the host has confirmed
 * that none of them is mapped. Otherwise their addresses must not be reused.
 */
int pvi_queue_map(struct pvi_endpoint *endpoint, struct list_head *mappings,
		  enum dma_data_direction direction, struct pvi_call *call, bool *undone)
{
	struct pvi_cursor cursor = pvi_cursor_at_first(mappings);
	struct pvi_cursor first = cursor;
	u64 left = pvi_pages_of(mappings);
	struct pvi_sent sent[PVI_GROUP];
	u64 mapped = 0;
	int failed = 0;

	*undone = true;
	while (left && !failed) {
		int count = pvi_send_group(endpoint, PVI_MAP, direction, &cursor, &left, sent,
					   &call->timeout);
		u64 in_group = 0;
		int i;

		if (count < 0) {
			failed = count;
			break;
		}
		for (i = 0; i < count; i++) {
			sent[i].err = pvi_wait(endpoint->pvi, &sent[i], &call->timeout);
			failed = failed ?: sent[i].err;
			in_group += sent[i].pages;
		}
		if (!failed) {
			mapped += in_group;
			continue;
		}
		/* The host executes a request as a whole or not at all. */
		for (i = 0; i < count; i++) {
			if (!sent[i].err &&
			    pvi_unmap_from(endpoint, sent[i].from, sent[i].pages, &call->undoing))
				*undone = false;
		}
	}
	if (failed && mapped && pvi_unmap_from(endpoint, first, mapped, &call->undoing))
		*undone = false;
	/* The host may still execute an unanswered request. */
	if (READ_ONCE(endpoint->pvi->queue.broken))
		*undone = false;
	return failed;
}

/* Unmaps the pages of all mappings. On failure, their addresses must not be reused. */
int pvi_queue_unmap(struct pvi_endpoint *endpoint, struct list_head *mappings,
		    struct pvi_poll_timeout *timeout)
{
	return pvi_unmap_from(endpoint, pvi_cursor_at_first(mappings), pvi_pages_of(mappings),
			      timeout);
}
