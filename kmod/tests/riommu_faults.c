// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs riommu_main.c and riommu_faults.c in user space (kernel.h) over the registers of
 * docs/RIOMMU-DEVICE.md. The IOMMU stops recording when it cannot write a fault: the driver starts
 * it again, and only while translation is on.
 */
#include "riommu_module.h"
#include "../riommu_main.c"
#include "../riommu_faults.c"
#include "check.h"

u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps;
static struct pci_dev pdev;

/* The IOMMU. */
static u32 control, status, head, tail;
static u64 queue;
static bool is_raised;
/* Its writes to memory fail, or fail after the given number of reads of registers. */
static bool fails;
static int reads_until_a_fault;
/* After this the driver must not start translation. */
static bool is_over;
static unsigned int starts;
/* What it says of itself. */
static u32 id = RIO_ID, version = 1 << 16, devices[RIO_DEVICES_MAX];
static unsigned int register_reads, device_reads;
static u64 capabilities = 12 << 16;

static void raise_interrupt(void)
{
	if (!(control & RIO_CTRL_INTERRUPT) || is_raised)
		return;
	is_raised = true;
	if (interrupt)
		interrupt(0, pdev.dev.driver);
}

static void fault(void)
{
	u32 entries = 1U << (queue & 0x1f);
	struct rio_entry *at = (struct rio_entry *)(queue & ~0xfffULL);

	if (!(control & RIO_CTRL_FAULTS))
		return;
	if (tail - head >= entries) {
		status |= RIO_STS_OVERFLOW;
	} else if (fails) {
		status |= RIO_STS_QUEUE;
		control &= ~RIO_CTRL_FAULTS;
	} else {
		at[tail++ % entries] = (struct rio_entry){
			.first = 0xdead,
			.second = RIO_FAULT_NOT_VALID << 24,
		};
	}
	raise_interrupt();
}

static u64 test_read(u64 offset)
{
	register_reads++;
	if (reads_until_a_fault && !--reads_until_a_fault)
		fault();
	switch (offset) {
	case RIO_REG_ID:
		return id;
	case RIO_REG_VERSION:
		return version;
	case RIO_REG_CAP:
		return capabilities;
	case RIO_REG_CTRL:
		return control;
	case RIO_REG_STS:
		return status;
	case RIO_REG_FQ_TAIL:
		return tail;
	default:
		device_reads++;
		CHECK(offset >= RIO_REG_DEV && offset < RIO_REG_DEV + sizeof(devices));
		return devices[(offset - RIO_REG_DEV) / 4];
	}
}

static void test_write(u64 word, u64 offset)
{
	switch (offset) {
	case RIO_REG_CTRL:
		CHECK(!is_over || !word);
		starts += word == RIO_CTRL_RUN;
		control = word;
		break;
	case RIO_REG_STS:
		status &= ~word;
		break;
	case RIO_REG_FQ:
		if (control & RIO_CTRL_FAULTS)
			break;
		queue = word;
		head = 0;
		tail = 0;
		break;
	case RIO_REG_FQ_HEAD:
		head = word;
		is_raised = false;
		if (head != tail)
			raise_interrupt();
		break;
	default:
		CHECK(offset == RIO_REG_ROOT);
	}
}

/* Advances the time by milliseconds; the work runs when it is due. */
static void passes(unsigned int ms)
{
	struct rio *rio = pdev.dev.driver;

	for (; ms; ms--) {
		if (rio->fault_work.work.queued && !time_after(rio->fault_work.due, jiffies)) {
			rio->fault_work.work.queued = false;
			rio->fault_work.work.does(&rio->fault_work.work);
		}
		test_now_us += 1000;
	}
}

void *test_alloc(size_t bytes)
{
	return calloc(1, bytes + 1);
}

void test_free(void *memory)
{
	free(memory);
}

/* The other parts of the driver. */
const struct core_engine rio_engine;
const struct dma_map_ops rio_ops, rio_burst_ops;

int rio_tables_init(struct rio *rio)
{
	rio->root = (struct rio_entry *)PAGE_SIZE;
	return 0;
}

void rio_tables_free(struct rio *rio)
{
	CHECK(!control);
}

void rio_debugfs_add(struct rio *rio)
{
}

int core_check_machine(struct device *dev)
{
	return 0;
}

int core_refuse_sleep(struct core_iommu *iommu)
{
	return 0;
}

void core_init(struct core_iommu *iommu, const struct core_engine *engine, struct device *dev)
{
}

int core_start(struct core_iommu *iommu)
{
	return 0;
}

void core_stop(struct core_iommu *iommu)
{
}

void core_free(struct core_iommu *iommu)
{
}

static struct rio *probe(void)
{
	is_over = false;
	is_disabled = false;
	starts = 0;
	CHECK(!rio_probe(&pdev, rio_ids) && control == RIO_CTRL_RUN && starts == 1);
	return pdev.dev.driver;
}

static void faults_are_read(struct rio *rio)
{
	unsigned int i;

	for (i = 0; i < 200; i++)
		fault();
	CHECK(tail == 64 && status == RIO_STS_OVERFLOW && !rio->faults);
	passes(RIO_FAULTS_PAUSE_MS);
	CHECK(!rio->faults);
	passes(1);
	CHECK(rio->faults == 64 && head == 64 && !status && test_complaints == 64);
	CHECK(starts == 1 && !rio->fault_restarts);
}

/* The faults that the queue holds are read before it is emptied. */
static void stopped_queue_is_restarted(struct rio *rio)
{
	unsigned int i;

	rio->faults = 0;
	fault();
	fails = true;
	fault();
	CHECK(status == RIO_STS_QUEUE && control == (RIO_CTRL_RUN & ~RIO_CTRL_FAULTS));
	fails = false;
	fault();
	passes(RIO_FAULTS_PAUSE_MS + 1);
	CHECK(rio->faults == 1 && rio->fault_restarts == 1 && starts == 2);
	CHECK(control == RIO_CTRL_RUN && !status && !head && !tail);
	fault();
	passes(RIO_FAULTS_PAUSE_MS + 1);
	CHECK(rio->faults == 2 && head == 1);

	/* While its writes fail, one restart in each pause. */
	fails = true;
	for (i = 0; i < 1000; i++) {
		fault();
		passes(1);
	}
	CHECK(rio->fault_restarts > 50 && rio->fault_restarts <= 1 + 1000 / RIO_FAULTS_PAUSE_MS);
	fails = false;
	passes(2 * RIO_FAULTS_PAUSE_MS);
	CHECK(control == RIO_CTRL_RUN && !status);
	fault();
	passes(RIO_FAULTS_PAUSE_MS + 1);
	CHECK(rio->faults == 3);
}

/* The queue stops while the work item runs, before each register that it reads. */
static void queue_stops_meanwhile(struct rio *rio)
{
	int reads;

	for (reads = 1; reads <= 3; reads++) {
		u64 before = rio->fault_restarts;

		fault();
		passes(RIO_FAULTS_PAUSE_MS);
		CHECK(rio->fault_work.work.queued);
		fails = true;
		reads_until_a_fault = reads;
		passes(1);
		CHECK(!reads_until_a_fault);
		fails = false;
		passes(2 * RIO_FAULTS_PAUSE_MS);
		CHECK(rio->fault_restarts == before + 1 && control == RIO_CTRL_RUN && !status);
		CHECK(!rio->fault_work.work.queued);
	}
}

/* The IOMMU claims more faults than its queue has entries. The work per pause is bounded. */
static void tail_is_wrong(struct rio *rio)
{
	u64 before = rio->faults;

	tail = head + 100000;
	raise_interrupt();
	passes(RIO_FAULTS_PAUSE_MS + 1);
	CHECK(rio->faults == before + 64);
	tail = head;
	passes(2 * RIO_FAULTS_PAUSE_MS);
	CHECK(rio->faults <= before + 128);
	head = rio->fault_head;
	tail = head;
}

/* IOMMUs that the driver refuses, before it has changed anything. */
static void refused(void)
{
	static const struct {
		u32 id, version;
		u64 count;
		u32 second;
		int err;
	} cases[] = {
		{ 0, 1 << 16, 2, 2, -ENODEV },		{ RIO_ID, 2 << 16, 2, 2, -ENODEV },
		{ RIO_ID, 1 << 16, 769, 2, -EINVAL },	{ RIO_ID, 1 << 16, 0xffff, 2, -EINVAL },
		{ RIO_ID, 1 << 16, 2, 1, -EINVAL },	{ RIO_ID, 1 << 16, 2, 0, -EINVAL },
	};
	unsigned int i, j;

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		id = cases[i].id;
		version = cases[i].version;
		capabilities = 12 << 16 | cases[i].count;
		for (j = 0; j < RIO_DEVICES_MAX; j++)
			devices[j] = j + 1;
		devices[1] = cases[i].second;
		device_reads = 0;
		CHECK(rio_probe(&pdev, rio_ids) == cases[i].err && !control);
		CHECK(device_reads <= RIO_DEVICES_MAX);
	}
}

/* The driver reads no register that the BAR lacks. */
static void refused_bars(void)
{
	static const struct {
		unsigned long flags;
		u64 bytes;
	} cases[] = {
		{ IORESOURCE_MEM, 4095 }, { IORESOURCE_MEM, 16 }, { IORESOURCE_MEM, 0 },
		{ 0x100, 4096 }, { 0, 0 },
	};
	unsigned int i;

	register_reads = 0;
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		bar_flags = cases[i].flags;
		bar_bytes = cases[i].bytes;
		CHECK(rio_probe(&pdev, rio_ids) == -ENODEV && !register_reads);
	}
	bar_flags = IORESOURCE_MEM;
	bar_bytes = RIO_REG_BYTES;
}

/* The work item is due when the driver is removed, or the machine shuts down. */
static void restart_does_not_follow_a_stop(void)
{
	struct rio *rio = probe();

	fails = true;
	fault();
	fails = false;
	CHECK(rio->fault_work.work.queued);
	rio_shutdown(&pdev);
	is_over = true;
	CHECK(!control);
	passes(2 * RIO_FAULTS_PAUSE_MS);
	CHECK(!control);
	interrupt(0, rio);
	passes(2 * RIO_FAULTS_PAUSE_MS);
	CHECK(!control);
	rio_remove(&pdev);

	/* A crash kernel's driver finds an IOMMU that runs and has stopped its queue. */
	probe();
	fails = true;
	fault();
	fails = false;
	interrupt = NULL;
	free(((struct rio *)pdev.dev.driver)->fault_queue);
	free(((struct rio *)pdev.dev.driver)->devices);
	free(pdev.dev.driver);
	is_raised = false;
	rio = probe();
	fault();
	passes(RIO_FAULTS_PAUSE_MS + 1);
	CHECK(rio->faults >= 1);
	is_over = true;
	rio_remove(&pdev);
	CHECK(!control && !interrupt);
}

/* The mode in which devices reach freed pages is one of another module. */
static void modes(void)
{
	static const struct {
		char *name;
		int mode;
	} cases[] = {
		{ "strict", RIO_STRICT },
		{ "burst", RIO_BURST },
		{ "burst-paper", -EINVAL },
		{ "none", -EINVAL },
	};
	unsigned int i;

	CHECK(!strcmp(mode, "strict"));
	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		bool is_one = cases[i].mode >= 0;

		test_complaints = 0;
		mode = cases[i].name;
		CHECK(rio_init() == (is_one ? 0 : -EINVAL) && test_complaints == !is_one);
		CHECK(!is_one || (int)rio_mode == cases[i].mode);
		if (is_one)
			rio_exit();
	}
	mode = "strict";
	rio_mode = RIO_STRICT;
	test_complaints = 0;
}

int main(void)
{
	struct rio *rio = probe();

	faults_are_read(rio);
	stopped_queue_is_restarted(rio);
	queue_stops_meanwhile(rio);
	tail_is_wrong(rio);
	is_over = true;
	rio_remove(&pdev);
	restart_does_not_follow_a_stop();
	modes();
	refused();
	refused_bars();
	printf("all as it should be\n");
	return 0;
}
