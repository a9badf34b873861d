/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The kernel interfaces of pool_slots.c and pool_ops.c that kernel.h lacks: CPUs with memory of
 * their own.
 */
#ifndef TEST_POOL_KERNEL_H
#define TEST_POOL_KERNEL_H

#define CORE_HAVE_MAP_PHYS
#define __aligned(n) __attribute__((aligned(n)))
#define __percpu
#define BIT(n) (1UL << (n))
#define ALIGN(x, to) (((x) + (to) - 1) & ~((to) - 1))
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define DMA_ATTR_SKIP_CPU_SYNC (1UL << 5)
#define __fls(x) (63 - __builtin_clzl(x))
#define xchg(at, value) __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST)
#define phys_to_virt(phys) ((void *)(uintptr_t)(phys))
#define page_address(page) ((void *)(page))

/* Of these, kernel.h has the versions of one CPU. */
#undef for_each_possible_cpu
#undef num_possible_cpus
#undef per_cpu_ptr
#define TEST_CPUS 3
#define for_each_possible_cpu(cpu) for (cpu = 0; cpu < TEST_CPUS; cpu++)
#define num_possible_cpus() TEST_CPUS
#define per_cpu_ptr(at, cpu) (&(at)[cpu])
/* A CPU's own memory is used with interrupts off only. */
#define this_cpu_ptr(at) (test_irqs_off ? &(at)[test_cpu] : (abort(), (at)))
#define local_irq_save(flags) ((flags) = test_irqs_off++)
#define local_irq_restore(flags) ((void)(test_irqs_off = (flags)))
#undef alloc_percpu
#define alloc_percpu(type) ((type *)test_alloc(TEST_CPUS * sizeof(type)))
#define schedule_work(one) ((one)->queued = true)

static int test_cpu, test_irqs_off;
static bool test_raw_held;
/* The test lets another CPU run here. */
static void (*test_before_lock)(void);
static unsigned long test_boundary = UINT32_MAX;

#define raw_spinlock_t bool
#define raw_spin_lock(lock) (test_before_lock ? test_before_lock() : (void)0,                      \
			     test_raw_held || !test_irqs_off ? abort() : (void)0,                  \
			     test_raw_held = true)
#define raw_spin_unlock(lock) (test_raw_held = false)
#define dma_get_seg_boundary(dev) test_boundary

static inline void list_del_init(struct list_head *one)
{
	one->prev->next = one->next;
	one->next->prev = one->prev;
	INIT_LIST_HEAD(one);
}

#include "../pool.h"
#include "../pool_slots.c"
#include "../pool_ops.c"
#include "check.h"

void *test_alloc(size_t bytes)
{
	return calloc(1, bytes);
}

void test_free(void *memory)
{
	free(memory);
}

#ifndef TEST_POOL_MODULE_H
void free_pages_exact(void *memory, size_t bytes)
{
	free(memory);
}
#endif

#include "paged.c"

u64 test_now_us;
unsigned int test_complaints, test_steps, test_most_steps;
phys_addr_t test_peer;
#ifndef TEST_POOL_MODULE_H
bool pool_preserve;
#endif

#endif
