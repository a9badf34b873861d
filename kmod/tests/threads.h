/* SPDX-License-Identifier: GPL-2.0-only */
/* Locks, atomic variables and counters of kernel.h for programs with threads. */
#ifndef TEST_THREADS_H
#define TEST_THREADS_H

#include <sched.h>

typedef struct {
	bool held;
} spinlock_t;

/* Locks that the thread has taken. */
extern __thread unsigned long thread_locks;

/* Lets other threads run in each 16th section, so that they meet. */
static inline void test_lock(spinlock_t *lock)
{
	while (__atomic_exchange_n(&lock->held, true, __ATOMIC_ACQUIRE))
		sched_yield();
	if (!(++thread_locks % 16))
		sched_yield();
}

static inline void test_unlock(spinlock_t *lock)
{
	__atomic_store_n(&lock->held, false, __ATOMIC_RELEASE);
}

static inline bool test_trylock(spinlock_t *lock)
{
	return !__atomic_exchange_n(&lock->held, true, __ATOMIC_ACQUIRE);
}

typedef struct {
	long value;
} atomic_long_t;

#define test_add(at, count) __atomic_add_fetch(at, count, __ATOMIC_SEQ_CST)
#define atomic_long_read(counter) __atomic_load_n(&(counter)->value, __ATOMIC_SEQ_CST)
#define atomic_long_add_return(count, counter) test_add(&(counter)->value, (long)(count))
#define atomic_long_sub(count, counter) test_add(&(counter)->value, -(long)(count))
#define atomic_long_inc(counter) test_add(&(counter)->value, 1)
#define atomic_long_dec(counter) test_add(&(counter)->value, -1)
#define this_cpu_inc(counter) test_add(&(counter), 1)
#define this_cpu_dec(counter) test_add(&(counter), -1)
#define this_cpu_add(counter, count) test_add(&(counter), count)
#define this_cpu_sub(counter, count) test_add(&(counter), -(count))

#endif
