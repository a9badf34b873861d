// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the queue of free slots (riommu_free.h) with interruptions: before each of its exchanges,
 * another processor or an interrupt handler takes slots or puts them.
 */
#define CORE_HAVE_MAP_PHYS
#include "riommu_kernel.h"

#define SLOTS 5
#define CELLS 8

static struct rio_slot_queue queue;
static u64 cells[CELLS];
/* Owners of each slot, of which there is at most one, and slots of the interrupting code. */
static unsigned int owners[SLOTS];
static u32 others[SLOTS];
static unsigned int other_count;
/* Exchanges until the interruption, and the steps that it makes: + takes, - puts. */
static int countdown;
static const char *steps;

static void test_write(u64 word, u64 offset)
{
}

static u32 test_read(u64 offset)
{
	return 0;
}

static void test_freed(struct folio *folio)
{
}

static u32 take(void)
{
	u32 slot = rio_slot_queue_take(&queue);

	if (slot != RIO_NO_SLOT) {
		CHECK(slot < SLOTS);
		CHECK(!owners[slot]++);
	}
	return slot;
}

static void put(u32 slot)
{
	CHECK(owners[slot]-- == 1);
	rio_slot_queue_put(&queue, slot);
}

static void interrupt(void)
{
	const char *step = steps;

	if (countdown-- != 0)
		return;
	test_interrupted = NULL;
	for (; *step; step++) {
		if (*step == '-' && other_count) {
			put(others[--other_count]);
		} else if (*step == '+') {
			u32 slot = take();

			if (slot != RIO_NO_SLOT)
				others[other_count++] = slot;
		}
	}
}

/* Runs a take and a put with an interruption after this many exchanges. */
static void round_with(const char *interrupting, int exchanges)
{
	u32 slot;

	steps = interrupting;
	countdown = exchanges;
	test_interrupted = interrupt;
	slot = take();
	if (slot != RIO_NO_SLOT)
		put(slot);
	test_interrupted = NULL;
}

int main(void)
{
	static const char * const interruptions[] = { "", "+", "-", "+-", "++--", "-+", "--++",
						      "+-+-+-+-+-+-+-+-", "+++++", "-----" };
	unsigned int round, i, slot;
	u64 taken;

	queue.cells = cells;
	queue.mask = CELLS - 1;
	rio_slot_queue_fill(&queue, SLOTS);
	for (round = 0; round < 20000; round++)
		round_with(interruptions[round * 7 % ARRAY_SIZE(interruptions)], round % 5);
	while (other_count)
		put(others[--other_count]);
	CHECK(queue.tail - queue.head == SLOTS);
	taken = queue.head;
	for (i = 0; i < SLOTS; i++) {
		slot = take();
		CHECK(slot != RIO_NO_SLOT);
	}
	CHECK(take() == RIO_NO_SLOT && queue.head == taken + SLOTS);
	/* First in, first out. */
	for (i = 0; i < SLOTS; i++)
		put(SLOTS - 1 - i);
	for (i = 0; i < SLOTS; i++)
		CHECK(take() == SLOTS - 1 - i);
	puts("all as it should be");
	return 0;
}
