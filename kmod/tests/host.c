// SPDX-License-Identifier: GPL-2.0-only
/*
 * The host and the environment of queue.c, cache.c, evict.c and ops.c in user space: the device
 * side of the virtqueue, checking allocators, a clock, a driver and its device. The host records
 * the mappings. It checks that no page is freed, no address is reused and no request's memory is
 * freed while the host may still use it.
 */
#define CORE_HAVE_MAP_PHYS
#include "../queue.c"
#include "../slots.c"
#include "../cache.c"
#include "../evict.c"
#include "../ops.c"

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			fprintf(stderr, "%s:%d: %s: not %s\n", __FILE__, __LINE__, test_case,      \
				#what);                                                            \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* Counters of the endpoint, on one CPU. */
#define COUNTS (endpoint->counts)
#define ORPHANS ((u64)atomic_long_read(&endpoint->orphans))
#define CACHED_PAGES ((u64)atomic_long_read(&endpoint->cached_pages))
#define ASKED_MAX 256
#define MAPPED_MAX 65536
#define BUFFERS (64 << 20)

static const char *test_case = "";
#ifndef TEST_PARAMETERS_OF_MAIN
bool pvi_cache;
unsigned int pvi_cycle_ms = 10000;
unsigned int pvi_cycles = 3;
unsigned int pvi_cache_pages = 65536;
struct workqueue_struct *pvi_workqueue;
#endif
u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps, test_naps, test_yields;
bool test_atomic, test_other_cpu;
unsigned int test_cpus = 1, test_refused_locks;
phys_addr_t test_peer;

/* A pending or answered request of the host. */
struct asked {
	void *data;
	struct pvi_request *request;
	size_t bytes;
	u8 *status;
};

/* The host. */
static struct {
	/* Number of chains in the ring. */
	unsigned int chains;
	bool broken;
	/* Unanswered requests, oldest first, and the number of them that the guest has kicked. */
	struct asked asked[ASKED_MAX];
	unsigned int asked_count, told;
	/* Answered requests that the guest has not collected. */
	struct asked used[ASKED_MAX];
	unsigned int used_count;
	/* True if it answers at the kick. */
	bool prompt;
	/* True if it executes nothing and writes no status. */
	bool silent;
	/* Delay of each answer after the kick, in microseconds. */
	u64 delay_us, told_at;
	/* Maximum number of mapped pages; 0 for no limit. */
	unsigned int room;
	/* Number of requests until one is refused with this status; 0 for none. */
	unsigned int refuse_after;
	u8 refuse_with;
	struct {
		u64 giova, gpa;
		unsigned int direction;
	} mapped[MAPPED_MAX];
	unsigned int mapped_count;
} host;

/* Called during a wait. */
static void (*on_wait)(void);
static unsigned int allocations, allocations_left = ~0u;
/* Allocated pages. Leaked ones are freed at the end. */
static void *lent[4096];
static unsigned int lent_count, pages_lent;
/* Maximum size of contiguous memory. */
static size_t contiguous_bytes = ~0UL;

static struct virtio_device vdev;
static struct pci_dev pdev;
static struct pvi pvi;
static struct pvi_endpoint *endpoint;
static char *buffers;

static u64 asked_page(const struct asked *asked, u32 index, bool gpas)
{
	u64 at = asked->request->type == PVI_MAP ? 1 + (gpas ? asked->request->len : 0) : 0;

	return asked->request->words[at + index];
}

static int mapped_at(u64 giova)
{
	unsigned int i;

	for (i = 0; i < host.mapped_count; i++)
		if (host.mapped[i].giova == giova)
			return i;
	return -1;
}

/* Returns true if the host maps such an address or page, or may do so for a pending request. */
static bool host_may_reach(u64 first, u64 bytes, bool gpas)
{
	unsigned int i;
	u32 page;

	for (i = 0; i < host.mapped_count; i++)
		if ((gpas ? host.mapped[i].gpa : host.mapped[i].giova) - first < bytes)
			return true;
	for (i = 0; i < host.asked_count; i++)
		for (page = 0; page < host.asked[i].request->len; page++)
			if (!(gpas && host.asked[i].request->type == PVI_UNMAP) &&
			    asked_page(&host.asked[i], page, gpas) - first < bytes)
				return true;
	return false;
}

/* Answers the oldest request as a whole. */
static void host_answers(void)
{
	struct asked asked = host.asked[0];
	struct pvi_request *request = asked.request;
	u8 status = PVI_OK;
	u32 i;

	CHECK(host.asked_count);
	memmove(host.asked, host.asked + 1, --host.asked_count * sizeof(asked));
	host.told -= host.told > 0;
	CHECK(asked.bytes == pvi_request_bytes(request->type, request->len));
	CHECK(request->devid == endpoint->core.devid && request->len &&
	      request->len <= pvi.pages_max);
	if (host.refuse_after && !--host.refuse_after)
		status = host.refuse_with;
	if (host.silent)
		status = PVI_FAILED;
	if (!status && host.room && request->type == PVI_MAP &&
	    host.mapped_count + request->len > host.room)
		status = PVI_NO_ROOM;
	for (i = 0; !status && i < request->len; i++)
		CHECK((mapped_at(asked_page(&asked, i, false)) < 0) == (request->type == PVI_MAP));
	for (i = 0; !status && i < request->len; i++) {
		u64 giova = asked_page(&asked, i, false);

		if (request->type == PVI_MAP) {
			CHECK(host.mapped_count < MAPPED_MAX);
			host.mapped[host.mapped_count].giova = giova;
			host.mapped[host.mapped_count].direction = request->words[0];
			host.mapped[host.mapped_count++].gpa = asked_page(&asked, i, true);
		} else {
			host.mapped[mapped_at(giova)] = host.mapped[host.mapped_count - 1];
			host.mapped_count--;
		}
	}
	if (!host.silent)
		*asked.status = status;
	host.used[host.used_count++] = asked;
}

static void host_answers_all(void)
{
	while (host.asked_count)
		host_answers();
}

unsigned int virtqueue_get_vring_size(struct virtqueue *vq)
{
	(void)vq;
	return host.chains * 2;
}

int virtqueue_add_sgs(struct virtqueue *vq, struct scatterlist *sgs[], unsigned int out,
		      unsigned int in, void *data, gfp_t gfp)
{
	struct asked asked = {
		.data = data,
		.request = sgs[0]->memory,
		.bytes = sgs[0]->length,
		.status = sgs[1]->memory,
	};

	(void)vq;
	(void)gfp;
	CHECK(out == 1 && in == 1 && sgs[1]->length == 1);
	if (host.broken)
		return -EIO;
	if (host.asked_count + host.used_count >= host.chains)
		return -ENOSPC;
	host.asked[host.asked_count++] = asked;
	return 0;
}

void *virtqueue_get_buf(struct virtqueue *vq, unsigned int *bytes)
{
	void *data = host.used[0].data;

	(void)vq;
	if (host.broken || !host.used_count)
		return NULL;
	memmove(host.used, host.used + 1, --host.used_count * sizeof(host.used[0]));
	*bytes = 1;
	return data;
}

bool virtqueue_kick_prepare(struct virtqueue *vq)
{
	(void)vq;
	return host.asked_count;
}

bool virtqueue_notify(struct virtqueue *vq)
{
	(void)vq;
	CHECK(!pvi.queue.lock.held);
	host.told = host.asked_count;
	host.told_at = test_now_us;
	if (host.prompt)
		host_answers_all();
	return true;
}

bool virtqueue_is_broken(struct virtqueue *vq)
{
	(void)vq;
	return host.broken;
}

void __virtqueue_break(struct virtqueue *vq)
{
	(void)vq;
	host.broken = true;
}

static bool a_lock_is_held(void)
{
	unsigned int i;

	if (pvi.queue.lock.held)
		return true;
	for (i = 0; i < endpoint->shard_count; i++)
		if (endpoint->shards[i].giova_lock.held || endpoint->shards[i].page_lock.held)
			return true;
	return false;
}

void test_time_passes(void)
{
	void (*come)(void) = on_wait;

	test_now_us++;
	CHECK(test_other_cpu || !a_lock_is_held());
	if (host.delay_us && host.asked_count && test_now_us - host.told_at >= host.delay_us) {
		host_answers();
		host.told_at = test_now_us;
	}
	/* Call it once, because an interrupt does not interrupt itself. */
	on_wait = NULL;
	if (come)
		come();
}

void test_sleeps(unsigned int us)
{
	CHECK(!test_atomic);
	test_naps += !!us;
	while (us--)
		test_time_passes();
	CHECK(test_other_cpu || !a_lock_is_held());
}

/* Runs the queued worker. */
static void work(void)
{
	CHECK(endpoint->trim.queued);
	endpoint->trim.queued = false;
	endpoint->trim.does(&endpoint->trim);
}

void *test_alloc(size_t bytes)
{
	if (!allocations_left)
		return NULL;
	allocations_left--;
	allocations++;
	return test_aligned(bytes);
}

void test_free(void *memory)
{
	unsigned int i;

	for (i = 0; memory && i < host.asked_count; i++)
		CHECK(memory != host.asked[i].request);
	allocations -= !!memory;
	free(memory);
}

struct kmem_cache *test_slab(size_t bytes)
{
	struct kmem_cache *slab = test_alloc(sizeof(*slab));

	if (slab)
		slab->bytes = bytes;
	return slab;
}

void *alloc_pages_exact(size_t bytes, gfp_t gfp)
{
	void *memory;

	(void)gfp;
	if (bytes > contiguous_bytes)
		return NULL;
	memory = aligned_alloc(PAGE_SIZE, PAGE_ALIGN(bytes));
	CHECK(memory && lent_count < 4096);
	lent[lent_count++] = memory;
	pages_lent++;
	return memory;
}

void free_pages_exact(void *memory, size_t bytes)
{
	CHECK(!host_may_reach(virt_to_phys(memory), PAGE_ALIGN(bytes), true));
	pages_lent--;
}

#include "paged.c"

/* Allocates the lowest free addresses, so that one freed too early is reused at once. */
static u8 taken[MAPPED_MAX];

u64 pvi_iova_alloc(struct pvi_endpoint *of, u32 pages, u64 limit)
{
	u32 first, page;

	CHECK(of == endpoint && pages);
	for (first = 1; first + pages <= MAPPED_MAX; first++) {
		for (page = 0; page < pages && !taken[first + page]; page++)
			;
		if (page < pages)
			continue;
		if (((u64)(first + pages) << PAGE_SHIFT) - 1 > limit)
			return 0;
		memset(taken + first, 1, pages);
		CHECK(!host_may_reach((u64)first << PAGE_SHIFT, (u64)pages << PAGE_SHIFT, false));
		return (u64)first << PAGE_SHIFT;
	}
	return 0;
}

void pvi_iova_free(struct pvi_endpoint *of, u64 giova, u32 pages)
{
	CHECK(of == endpoint && taken[giova >> PAGE_SHIFT]);
	CHECK(!host_may_reach(giova, (u64)pages << PAGE_SHIFT, false));
	memset(taken + (giova >> PAGE_SHIFT), 0, pages);
}

static void begin(const char *name, bool cached, unsigned int chains)
{
	test_case = name;
	memset(&host, 0, sizeof(host));
	memset(&pvi, 0, sizeof(pvi));
	memset(taken, 0, sizeof(taken));
	host.chains = chains;
	host.prompt = true;
	pvi_cache = cached;
	pvi_cache_pages = 65536;
	on_wait = NULL;
	test_complaints = 0;
	test_atomic = false;
	test_peer = 0;
	test_most_steps = 0;
	pages_lent = 0;
	pvi.vdev = &vdev;
	pvi.pages_max = 512;
	endpoint = calloc(1, sizeof(*endpoint));
	memcpy((void *)&endpoint->core.ops, &pvi_ops, sizeof(pvi_ops));
	endpoint->pvi = &pvi;
	endpoint->core.pdev = &pdev;
	endpoint->core.devid = 0x20;
	pdev.dev.ops = &endpoint->core.ops;
	pdev.dev.mask = ~0ULL;
	pdev.dev.coherent_dma_mask = DMA_BIT_MASK(32);
	CHECK(!pvi_mapping_slab_init() && !pvi_cache_init(endpoint));
}

static void begin_with_queue(const char *name, bool cached, unsigned int chains)
{
	begin(name, cached, chains);
	CHECK(!pvi_queue_init(&pvi, NULL));
}

/* Unbinds the driver and resets the device. Checks that nothing is leaked. */
static void end(void)
{
	test_atomic = false;
	pvi_cache_unbind(endpoint);
	CHECK(!COUNTS->live && !COUNTS->kept && !COUNTS->kept_pages);
	CHECK(!CACHED_PAGES && test_most_steps <= PVI_LOCKED_STEPS);
	host.asked_count = 0;
	pvi_queue_free(&pvi);
	pvi_cache_free(endpoint);
	pvi_mapping_slab_exit();
	CHECK(!allocations);
	while (lent_count)
		free(lent[--lent_count]);
	free(endpoint);
}

static dma_addr_t map(u64 at, size_t size, enum dma_data_direction direction)
{
	return pvi_ops.map_phys(&pdev.dev, virt_to_phys(buffers) + at, size, direction, 0);
}

static void unmap(dma_addr_t address)
{
	pvi_ops.unmap_phys(&pdev.dev, address, 0, DMA_NONE, 0);
}

/* Returns true if the whole buffer is mapped at its address. */
static bool leads(dma_addr_t address, phys_addr_t gpa, size_t size,
		  enum dma_data_direction direction)
{
	u64 page;

	for (page = 0; page < pvi_pages_for(gpa, size); page++) {
		int at = mapped_at((address & ~(PAGE_SIZE - 1)) + (page << PAGE_SHIFT));

		if (at < 0 || host.mapped[at].direction != (unsigned int)direction ||
		    host.mapped[at].gpa != (gpa & ~(PAGE_SIZE - 1)) + (page << PAGE_SHIFT))
			return false;
	}
	return (address & (PAGE_SIZE - 1)) == (gpa & (PAGE_SIZE - 1));
}

/* Writes a byte as the device, if its mapping allows it. */
static bool device_writes(dma_addr_t address, char byte)
{
	int at = mapped_at(address & ~(PAGE_SIZE - 1));

	if (at < 0 || host.mapped[at].direction == DMA_TO_DEVICE)
		return false;
	*(char *)(uintptr_t)(host.mapped[at].gpa + pvi_offset(address)) = byte;
	return true;
}

/* Returns true if no caller waits for an answer. */
static bool nobody_waits(void)
{
	unsigned int i;

	for (i = 0; i < pvi.queue.slot_count; i++)
		if (pvi.queue.slots[i].sent)
			return false;
	return true;
}

static void fill(struct scatterlist *list, unsigned int count, unsigned int bytes)
{
	size_t apart = 2 * PAGE_SIZE * (1 + bytes / PAGE_SIZE);
	unsigned int i;

	for (i = 0; i < count; i++) {
		memset(&list[i], 0, sizeof(list[i]));
		list[i].memory = buffers + apart * (i * 7 % count);
		list[i].length = bytes;
	}
}
