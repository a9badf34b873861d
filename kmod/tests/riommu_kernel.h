/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel interfaces of the ring IOMMU's driver for user space, in addition to kernel.h. Registers
 * begin at address 0. Atomic operations are the compiler's, so threads can run them.
 */
#ifndef TEST_RIOMMU_KERNEL_H
#define TEST_RIOMMU_KERNEL_H

#define __iomem
#define BIT(n) (1UL << (n))
#define irqreturn_t int
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define to_pci_dev(one) container_of((struct device *)(one), struct pci_dev, dev)

#define smp_wmb() __atomic_thread_fence(__ATOMIC_RELEASE)
#define smp_rmb() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define smp_mb() __atomic_thread_fence(__ATOMIC_SEQ_CST)
/* Counted: one before each invalidation. */
#define wmb() (barriers++)
static unsigned int barriers;
/* Called before each exchange. */
static void (*test_interrupted)(void);
#define test_may_be_interrupted() ((void)(test_interrupted && (test_interrupted(), 0)))
#undef xchg
#define xchg(at, value)                                                                            \
	({                                                                                         \
		test_may_be_interrupted();                                                         \
		__atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);                                  \
	})
#define try_cmpxchg(at, old, new)                                                                  \
	({                                                                                         \
		test_may_be_interrupted();                                                         \
		__atomic_compare_exchange_n(at, old, new, false, __ATOMIC_SEQ_CST,                 \
					    __ATOMIC_SEQ_CST);                                     \
	})
#define cmpxchg(at, old, new)                                                                      \
	({                                                                                         \
		__typeof__(*(at)) test_old = (old);                                                \
		try_cmpxchg(at, &test_old, new);                                                   \
		test_old;                                                                          \
	})
typedef struct {
	long value;
} atomic64_t;
typedef atomic64_t atomic_t;
#define atomic64_add(n, at) ((void)__atomic_fetch_add(&(at)->value, n, __ATOMIC_SEQ_CST))
#define atomic_sub(n, at) ((void)__atomic_fetch_sub(&(at)->value, n, __ATOMIC_SEQ_CST))
#define atomic_add_return(n, at) __atomic_add_fetch(&(at)->value, n, __ATOMIC_SEQ_CST)
#define atomic64_inc(at) ((void)__atomic_fetch_add(&(at)->value, 1, __ATOMIC_SEQ_CST))
#define atomic64_dec(at) ((void)__atomic_fetch_sub(&(at)->value, 1, __ATOMIC_SEQ_CST))
#define atomic64_read(at) __atomic_load_n(&(at)->value, __ATOMIC_SEQ_CST)
#define roundup_pow_of_two(n) ((n) > 1 ? 2U << ilog2((n) - 1) : 1U)

/* Softirqs, and a timer. */
static bool test_is_interrupt;
#define in_interrupt() test_is_interrupt

struct tasklet_struct {
	void (*does)(struct tasklet_struct *tasklet);
	bool is_scheduled;
};

#define tasklet_setup(tasklet, with) ((tasklet)->does = (with))
#define tasklet_schedule(tasklet) ((tasklet)->is_scheduled = true)
#define tasklet_kill(tasklet) ((tasklet)->is_scheduled = false)

enum hrtimer_restart { HRTIMER_NORESTART };

struct hrtimer {
	enum hrtimer_restart (*does)(struct hrtimer *timer);
	/* In nanoseconds; 0 while it does not run. */
	ktime_t due;
	unsigned int starts;
};

#define HRTIMER_MODE_REL_HARD 0
#define CLOCK_MONOTONIC 0
#define RIO_HAVE_HRTIMER_SETUP
#define NSEC_PER_USEC 1000L
#define ns_to_ktime(ns) ((ktime_t)(ns))
#define hrtimer_setup(timer, with, clock, mode) ((timer)->does = (with))
#define hrtimer_start(timer, after, mode) ((timer)->starts++, (timer)->due = (after))
#define hrtimer_cancel(timer) ((timer)->due = 0)

/* Pages of memory at TEST_MEMORY: a folio each, or several in one. */
#define TEST_MEMORY 0x100000UL
#define TEST_PAGES 32
#define PAGE_MASK (~(PAGE_SIZE - 1))
#define PFN_PHYS(pfn) ((u64)(pfn) << PAGE_SHIFT)
#define PHYS_PFN(phys) ((phys) >> PAGE_SHIFT)
#undef pfn_valid
#define pfn_valid(pfn) (PFN_PHYS(pfn) - TEST_MEMORY < TEST_PAGES * PAGE_SIZE)

struct page {
	bool has_type;
};

struct folio {
	struct page page;
	bool is_reserved, is_zone_device;
	int references;
	unsigned int pages;
};

static struct folio test_folios[TEST_PAGES];
/* The folio of each page. */
static unsigned int test_heads[TEST_PAGES];
static void test_freed(struct folio *folio);

static inline struct folio *page_folio(struct page *page)
{
	u64 index = (page_to_phys(page) - TEST_MEMORY) >> PAGE_SHIFT;

	if (index >= TEST_PAGES)
		abort();
	return &test_folios[test_heads[index]];
}

/* The bytes of the pages, and shadows. */
static u8 test_memory[TEST_PAGES * PAGE_SIZE];
#define phys_to_virt(phys) ((void *)(test_memory + ((phys) - TEST_MEMORY)))
/* Number of the driver's allocations that the device uses. */
static int test_shadows;
#define kzalloc(bytes, gfp) (test_shadows++, test_alloc(bytes))
#undef kfree
#define kfree(memory) (test_shadows -= !!(memory), test_free(memory))

#define folio_pfn(folio) ((TEST_MEMORY >> PAGE_SHIFT) + ((folio) - test_folios))
#define folio_size(folio) ((folio)->pages * PAGE_SIZE)
#define folio_test_reserved(folio) ((folio)->is_reserved)
#define folio_is_zone_device(folio) ((folio)->is_zone_device)
#define page_has_type(page) ((page)->has_type)

#define folio_ref_count(folio) ((folio)->references)

static inline bool folio_try_get(struct folio *folio)
{
	if (!folio->references)
		return false;
	folio->references++;
	return true;
}

/* Freed compound pages become pages without references. */
static inline void test_dissolve(struct folio *folio)
{
	unsigned int first = folio - test_folios;

	while (--folio->pages) {
		test_heads[first + folio->pages] = first + folio->pages;
		test_folios[first + folio->pages].references = 0;
	}
	folio->pages = 1;
}

static inline void folio_put(struct folio *folio)
{
	if (folio->references <= 0)
		abort();
	if (!--folio->references) {
		test_freed(folio);
		test_dissolve(folio);
	}
}

#define writeq(word, to) test_write(word, (u8 *)(to) - (u8 *)NULL)
#define readl(from) test_read((u8 *)(from) - (u8 *)NULL)
static void test_write(u64 word, u64 offset);
static u32 test_read(u64 offset);

u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps;
phys_addr_t test_peer;

/* Allocations in use, and those that succeed before all fail. */
static int test_allocations, test_allocations_left = INT32_MAX;

static bool test_may_alloc(void)
{
	if (!test_allocations_left)
		return false;
	test_allocations_left--;
	test_allocations++;
	return true;
}

void *test_alloc(size_t bytes)
{
	return test_may_alloc() ? calloc(1, bytes) : NULL;
}

void test_free(void *memory)
{
	test_allocations -= !!memory;
	free(memory);
}

void *alloc_pages_exact(size_t bytes, gfp_t gfp)
{
	if (!test_may_alloc())
		return NULL;
	/* As with __GFP_ZERO. */
	return memset(aligned_alloc(PAGE_SIZE, PAGE_ALIGN(bytes)), 0, bytes);
}

void free_pages_exact(void *memory, size_t bytes)
{
	test_free(memory);
}

/* The module. */
#include "../riommu.h"
enum rio_mode rio_mode;
unsigned int rio_burst_us = 1000;
#include "../riommu_ring.c"
#include "../riommu_burst.c"
#include "../riommu_shadow.c"
#include "../riommu_ops.c"
#include "check.h"

#include "paged.c"

#endif
