// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A plug-in for a benchmark that times IOVA allocators beside Linux's own code. The benchmark loads
// the symbol iova_impl. KIND selects the allocator: an enum ringfence_iova_kind.
//
//   cc -O2 -shared -fPIC -DKIND=0 linux_iova.c -o linux_iova.so libringfence.a
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <ringfence.h>

#ifndef KIND
#define KIND RINGFENCE_IOVA_KIND_MAGAZINES
#endif

#define CPUS 4
#define LAST_PAGE 0xfffff // the 32-bit space

// The benchmark's interface.
struct iova_impl {
	const char *name;
	void *(*create)(void);
	uint64_t (*alloc)(void *domain, unsigned pages);
	void (*free)(void *domain, uint64_t pfn, unsigned pages);
	void (*destroy)(void *domain);
	void (*thread_init)(int cpu);
};

struct domain {
	struct ringfence_iova *space;
	struct ringfence_iova_cpu *cpu[CPUS];
};

static __thread unsigned cpu;

// Each thread has a handle of its own: one thread at a time may use a handle.
static void thread_init(int number)
{
	if (number < 0 || number >= CPUS) {
		fprintf(stderr, "iova: thread %d has no handle: use threads 0 to %d\n", number,
			CPUS - 1);
		exit(1);
	}
	cpu = (unsigned)number;
}

static void destroy(void *opaque)
{
	struct domain *domain = opaque;

	for (unsigned i = 0; i < CPUS; i++)
		ringfence_iova_cpu_destroy(&domain->cpu[i]);
	ringfence_iova_destroy(&domain->space);
	free(domain);
}

static void *create(void)
{
	struct domain *domain = calloc(1, sizeof *domain);
	int32_t status;

	if (!domain)
		return NULL;
	status = ringfence_iova_create(KIND, 1, LAST_PAGE, RINGFENCE_IOVA_TRUSTED, &domain->space);
	for (unsigned i = 0; i < CPUS && status == RINGFENCE_STATUS_OK; i++)
		status = ringfence_iova_cpu_create(domain->space, &domain->cpu[i]);
	if (status != RINGFENCE_STATUS_OK) {
		fprintf(stderr, "iova: %s\n", ringfence_status_text(status));
		destroy(domain);
		return NULL;
	}
	return domain;
}

// Ranges are aligned to their size, as Linux's are.
static uint64_t alloc(void *opaque, unsigned pages)
{
	struct domain *domain = opaque;
	uint64_t pfn = 0;
	uint32_t order = pages > 1 ? 32 - __builtin_clz(pages - 1) : 0;

	ringfence_iova_alloc(domain->cpu[cpu], pages, order, LAST_PAGE, &pfn);
	return pfn;
}

static void release(void *opaque, uint64_t pfn, unsigned pages)
{
	struct domain *domain = opaque;

	ringfence_iova_free(domain->cpu[cpu], pfn, pages);
}

#define TEXT(x) #x
#define NAME(kind) "c-library-" TEXT(kind)

const struct iova_impl iova_impl = { NAME(KIND), create, alloc, release, destroy, thread_init };
