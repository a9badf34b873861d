// SPDX-License-Identifier: GPL-2.0-only
/*
 * Threads map and unmap for one device, over queue.c, cache.c, evict.c and ops.c, while another one
 * ends cycles, and once without cycles, so that nearly all maps are hits. The host answers at once.
 * Nothing may be left at the end.
 */
#define CORE_HAVE_MAP_PHYS
#include <pthread.h>

#include "../queue.c"
#include "../slots.c"
#include "../cache.c"
#include "../evict.c"
#include "../ops.c"
#include "check.h"

#define THREADS 4
#define ROUNDS 4000
/* Pages of each thread; the first ones are mapped by all threads. */
#define PAGES 48
#define COMMON_PAGES 8
#define CHAINS 64

__thread unsigned long thread_locks;
bool pvi_cache;
unsigned int pvi_cycle_ms = 10000;
unsigned int pvi_cycles;
unsigned int pvi_cache_pages;
struct workqueue_struct *pvi_workqueue;
u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps, test_naps, test_yields, test_cpus;
bool test_atomic;
phys_addr_t test_peer;

static struct virtio_device vdev;
static struct pci_dev pdev;
static struct pvi pvi;
static struct pvi_endpoint *endpoint;
static char *buffers;
static bool done;

/* The host: answered requests, and the number of mapped pages. */
static struct {
	pthread_mutex_t mutex;
	void *used[CHAINS];
	unsigned int used_count;
	long mapped;
} host = { .mutex = PTHREAD_MUTEX_INITIALIZER };

int virtqueue_add_sgs(struct virtqueue *vq, struct scatterlist *sgs[], unsigned int out,
		      unsigned int in, void *data, gfp_t gfp)
{
	const struct pvi_request *request = sgs[0]->memory;

	pthread_mutex_lock(&host.mutex);
	CHECK(host.used_count < CHAINS);
	host.mapped += request->type == PVI_MAP ? (long)request->len : -(long)request->len;
	*(u8 *)sgs[1]->memory = PVI_OK;
	host.used[host.used_count++] = data;
	pthread_mutex_unlock(&host.mutex);
	return 0;
}

void *virtqueue_get_buf(struct virtqueue *vq, unsigned int *bytes)
{
	void *data = NULL;

	pthread_mutex_lock(&host.mutex);
	if (host.used_count)
		data = host.used[--host.used_count];
	pthread_mutex_unlock(&host.mutex);
	return data;
}

unsigned int virtqueue_get_vring_size(struct virtqueue *vq)
{
	return 2 * CHAINS;
}

bool virtqueue_kick_prepare(struct virtqueue *vq)
{
	return true;
}

bool virtqueue_notify(struct virtqueue *vq)
{
	return true;
}

bool virtqueue_is_broken(struct virtqueue *vq)
{
	return false;
}

void __virtqueue_break(struct virtqueue *vq)
{
}

void test_time_passes(void)
{
	sched_yield();
}

void test_sleeps(unsigned int us)
{
	sched_yield();
}

void *test_alloc(size_t bytes)
{
	return test_aligned(bytes);
}

void test_free(void *memory)
{
	free(memory);
}

struct kmem_cache *test_slab(size_t bytes)
{
	struct kmem_cache *slab = calloc(1, sizeof(*slab));

	slab->bytes = bytes;
	return slab;
}

void *alloc_pages_exact(size_t bytes, gfp_t gfp)
{
	return NULL;
}

void free_pages_exact(void *memory, size_t bytes)
{
}

#include "paged.c"

/* Addresses are never reused, and all have to be freed. */
static u64 next_page = 1;
static long pages_in_use;

u64 pvi_iova_alloc(struct pvi_endpoint *of, u32 pages, u64 limit)
{
	test_add(&pages_in_use, pages);
	return __atomic_fetch_add(&next_page, pages, __ATOMIC_SEQ_CST) << PAGE_SHIFT;
}

void pvi_iova_free(struct pvi_endpoint *of, u64 giova, u32 pages)
{
	test_add(&pages_in_use, -(long)pages);
}

static void *driver(void *number)
{
	u64 own = (u64)(uintptr_t)number * PAGES;
	u32 state = 1 + own;
	unsigned int i;

	for (i = 0; i < ROUNDS; i++) {
		struct scatterlist list[2];
		dma_addr_t one;
		u64 page;

		state = state * 1664525 + 1013904223;
		page = (state >> 8) % PAGES;
		page = page < COMMON_PAGES ? page : own + page;
		one = pvi_ops.map_phys(&pdev.dev, virt_to_phys(buffers) + page * PAGE_SIZE, 8,
				       DMA_TO_DEVICE, 0);
		CHECK(one != DMA_MAPPING_ERROR);
		memset(list, 0, sizeof(list));
		list[0].memory = buffers + page * PAGE_SIZE;
		list[1].memory = buffers + (own + COMMON_PAGES) * PAGE_SIZE;
		list[0].length = 8;
		list[1].length = PAGE_SIZE;
		CHECK(pvi_ops.map_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0) == 2);
		pvi_ops.unmap_phys(&pdev.dev, one, 8, DMA_TO_DEVICE, 0);
		pvi_ops.unmap_sg(&pdev.dev, list, 2, DMA_FROM_DEVICE, 0);
	}
	return NULL;
}

static void *worker(void *unused)
{
	while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST)) {
		WRITE_ONCE(pvi.cycle, pvi.cycle + 1);
		endpoint->trim.does(&endpoint->trim);
		sched_yield();
	}
	return NULL;
}

static void run(bool cached, bool ends_cycles, unsigned int shards)
{
	pthread_t threads[THREADS], other;
	uintptr_t i;

	test_cpus = shards;
	done = !ends_cycles;
	pvi_cache = cached;
	pvi_cache_pages = ends_cycles ? 128 : 65536;
	memset(&pvi, 0, sizeof(pvi));
	pvi.vdev = &vdev;
	pvi.pages_max = 512;
	endpoint = calloc(1, sizeof(*endpoint));
	memcpy((void *)&endpoint->core.ops, &pvi_ops, sizeof(pvi_ops));
	endpoint->pvi = &pvi;
	pdev.dev.ops = &endpoint->core.ops;
	pdev.dev.mask = ~0ULL;
	CHECK(!pvi_mapping_slab_init() && !pvi_cache_init(endpoint));
	CHECK(!pvi_queue_init(&pvi, NULL));
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, driver, (void *)i));
	CHECK(!pthread_create(&other, NULL, worker, NULL));
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	__atomic_store_n(&done, true, __ATOMIC_SEQ_CST);
	CHECK(!pthread_join(other, NULL));
	CHECK(!endpoint->counts->live && !test_complaints);
	pvi_cache_unbind(endpoint);
	CHECK(!host.mapped && !pages_in_use && !endpoint->counts->kept);
	CHECK(!atomic_long_read(&endpoint->cached_pages) && !pvi.queue.broken);
	CHECK(endpoint->counts->maps == 3 * THREADS * ROUNDS);
	CHECK(endpoint->counts->unmaps == 3 * THREADS * ROUNDS);
	pvi_queue_free(&pvi);
	pvi_cache_free(endpoint);
	pvi_mapping_slab_exit();
	free(endpoint);
}

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, THREADS * PAGES * PAGE_SIZE);
	CHECK(buffers);
	run(true, false, 1);
	run(true, false, 16);
	run(true, true, 1);
	run(true, true, 16);
	run(false, true, 1);
	run(false, true, 16);
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
