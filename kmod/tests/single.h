/* SPDX-License-Identifier: GPL-2.0-only */
/* Locks, atomic variables and counters of kernel.h for programs with one thread. */
#ifndef TEST_SINGLE_H
#define TEST_SINGLE_H

/* A lock that detects recursive locking. */
typedef struct {
	bool held;
	unsigned int taken;
} spinlock_t;

static inline void test_lock(spinlock_t *lock)
{
	if (lock->held)
		abort();
	lock->held = true;
	lock->taken++;
	test_steps = 0;
}

static inline void test_unlock(spinlock_t *lock)
{
	lock->held = false;
	if (test_steps > test_most_steps)
		test_most_steps = test_steps;
}

/* True while the test holds locks as another CPU. */
extern bool test_other_cpu;
extern unsigned int test_refused_locks;

static inline bool test_trylock(spinlock_t *lock)
{
	if (lock->held) {
		test_refused_locks++;
		return false;
	}
	test_lock(lock);
	return true;
}

/* Atomic variables and counters, of one CPU. */
typedef struct {
	long value;
} atomic_long_t;

#define atomic_long_read(counter) ((counter)->value)
#define atomic_long_add_return(count, counter) ((counter)->value += (long)(count))
#define atomic_long_sub(count, counter) ((counter)->value -= (long)(count))
#define atomic_long_inc(counter) ((counter)->value++)
#define atomic_long_dec(counter) ((counter)->value--)
#define this_cpu_inc(counter) ((counter)++)
#define this_cpu_dec(counter) ((counter)--)
#define this_cpu_add(counter, count) ((counter) += (count))
#define this_cpu_sub(counter, count) ((counter) -= (count))

#endif
