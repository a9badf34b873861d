/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel interfaces of queue.c, cache.c, evict.c, ops.c and events.c for user space. The headers
 * that they include are empty, and this file is included before them. There is one CPU. Time
 * advances when code waits. Memory comes from malloc(), and physical addresses are virtual ones.
 */
#ifndef TEST_KERNEL_H
#define TEST_KERNEL_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/types.h>

#define CONFIG_X86_64 1
#define CONFIG_ARCH_HAS_DMA_OPS 1
#define CONFIG_PREEMPT_COUNT 1
#define CONFIG_PREEMPT_RT 0
#define IS_ENABLED(option) (option)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t s64;
typedef int64_t ktime_t;
typedef unsigned int gfp_t;
typedef u64 dma_addr_t;
typedef u64 phys_addr_t;

#define U32_MAX UINT32_MAX
#define U64_MAX UINT64_MAX
#define PAGE_SHIFT 12
#define PAGE_SIZE 4096UL
#define PAGE_ALIGN(x) (((x) + PAGE_SIZE - 1) & ~(PAGE_SIZE - 1))
#define DMA_MAPPING_ERROR (~(dma_addr_t)0)
#define DMA_BIT_MASK(n) ((1ULL << (n)) - 1)
#define DMA_ATTR_SKIP_CPU_SYNC (1UL << 5)
#define DMA_ATTR_NO_WARN (1UL << 8)
#define DMA_ATTR_MMIO (1UL << 10)
#define GFP_ATOMIC 0
#define GFP_KERNEL 0
#define __GFP_NOWARN 0
#define __GFP_ZERO 0
#define __GFP_DMA 0
#define __GFP_DMA32 0
#define __GFP_HIGHMEM 0
#define __GFP_COMP 0

#define cpu_to_le32(x) (x)
#define cpu_to_le64(x) (x)
#define le32_to_cpu(x) (x)
#define le64_to_cpu(x) (x)

#define noinline __attribute__((noinline))
#define __noclone __attribute__((noclone))
#define data_race(value) (value)
#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define ____cacheline_aligned_in_smp __attribute__((aligned(64)))
#define __percpu
#define __force
#define READ_ONCE(x) (*(volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))
#define container_of(at, type, member) ((type *)((char *)(at) - offsetof(type, member)))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define clamp(x, least, most) min(max(x, least), most)
#define fls64(x) ((x) ? 64 - __builtin_clzll(x) : 0)
#define min_t(type, a, b) min((type)(a), (type)(b))
#define min3(a, b, c) min(min(a, b), c)
#define ilog2(x) (31 - __builtin_clz(x))
#define DIV_ROUND_UP(a, b) (((a) + (b) - 1) / (b))
#define min_not_zero(a, b) ((a) && (b) ? min(a, b) : (a) ? (a) : (b))

#define MAX_ERRNO 4095
#define IS_ERR(at) ((uintptr_t)(at) >= (uintptr_t)-MAX_ERRNO)
#define ERR_PTR(err) ((void *)(intptr_t)(err))
#define PTR_ERR(at) ((intptr_t)(at))
#define IS_ERR_OR_NULL(at) (!(at) || IS_ERR(at))
#define PTR_ERR_OR_ZERO(at) (IS_ERR(at) ? PTR_ERR(at) : 0)

enum dma_data_direction {
	DMA_BIDIRECTIONAL = 0,
	DMA_TO_DEVICE = 1,
	DMA_FROM_DEVICE = 2,
	DMA_NONE = 3,
};

/* List steps, which take time, since the last lock was taken. */
extern unsigned int test_steps, test_most_steps;

/* Doubly linked circular lists, and hash lists. */
struct list_head {
	struct list_head *next, *prev;
};

#define LIST_HEAD(name) struct list_head name = { &(name), &(name) }

static inline void INIT_LIST_HEAD(struct list_head *head)
{
	head->next = head;
	head->prev = head;
}

static inline void list_between(struct list_head *one, struct list_head *before,
				struct list_head *after)
{
	one->prev = before;
	one->next = after;
	before->next = one;
	after->prev = one;
}

#define list_add(one, head) list_between(one, head, (head)->next)
#define list_add_tail(one, head) list_between(one, (head)->prev, head)
#define list_empty(head) ((head)->next == (head))

static inline void list_del(struct list_head *one)
{
	test_steps++;
	one->prev->next = one->next;
	one->next->prev = one->prev;
	/* Make an iteration that continues from here fail. */
	one->next = NULL;
	one->prev = NULL;
}

static inline void list_move_tail(struct list_head *one, struct list_head *head)
{
	list_del(one);
	list_add_tail(one, head);
}

static inline void list_splice_tail(struct list_head *from, struct list_head *head)
{
	if (list_empty(from))
		return;
	from->next->prev = head->prev;
	head->prev->next = from->next;
	from->prev->next = head;
	head->prev = from->prev;
}

#define list_first_entry(head, type, member) container_of((head)->next, type, member)
#define list_first_entry_or_null(head, type, member)                                               \
	(list_empty(head) ? NULL : list_first_entry(head, type, member))
#define list_next_entry(one, member) container_of((one)->member.next, __typeof__(*(one)), member)
#define list_for_each_entry(one, head, member)                                                     \
	for (one = list_first_entry(head, __typeof__(*(one)), member); &(one)->member != (head);   \
	     one = list_next_entry(one, member))
#define list_for_each_entry_safe(one, following, head, member)                                     \
	for (one = list_first_entry(head, __typeof__(*(one)), member),                             \
	    following = list_next_entry(one, member);                                              \
	     &(one)->member != (head); one = following, following = list_next_entry(one, member))

struct hlist_node {
	struct hlist_node *next, **leads;
};

struct hlist_head {
	struct hlist_node *first;
};

static inline void hlist_add_head(struct hlist_node *one, struct hlist_head *head)
{
	one->next = head->first;
	one->leads = &head->first;
	if (one->next)
		one->next->leads = &one->next;
	head->first = one;
}

static inline void hlist_del(struct hlist_node *one)
{
	*one->leads = one->next;
	if (one->next)
		one->next->leads = one->leads;
}

#define hlist_of(node, type, member) ((node) ? container_of(node, type, member) : NULL)
#define hlist_for_each_entry(one, head, member)                                                    \
	for (one = hlist_of((head)->first, __typeof__(*(one)), member); one;                       \
	     one = hlist_of((one)->member.next, __typeof__(*(one)), member))
#define hlist_for_each_entry_safe(one, following, head, member)                                    \
	for (one = hlist_of((head)->first, __typeof__(*(one)), member);                            \
	     one && ((following = (one)->member.next), 1);                                         \
	     one = hlist_of(following, __typeof__(*(one)), member))

static inline u32 hash_64(u64 value, unsigned int bits)
{
	return (value * 0x9e3779b97f4a7c15ULL) >> (64 - bits);
}

#ifdef TEST_THREADS
#include "threads.h"
#else
#include "single.h"
#endif

#define spin_lock_init(lock) ((lock)->held = false)
#define spin_lock(lock) test_lock(lock)
#define spin_unlock(lock) test_unlock(lock)
#define spin_trylock_irqsave(lock, flags) ((void)((flags) = 0), test_trylock(lock))
#define spin_lock_irqsave(lock, flags) ((void)((flags) = 0), test_lock(lock))
#define spin_unlock_irqrestore(lock, flags) ((void)(flags), test_unlock(lock))

#define smp_load_acquire(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
#define smp_store_release(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)

#define alloc_percpu(type) ((type *)test_alloc(sizeof(type)))
#define free_percpu(memory) test_free(memory)
#define per_cpu_ptr(at, cpu) ((void)(cpu), (at))
#define for_each_possible_cpu(cpu) for (cpu = 0; cpu < 1; cpu++)
/* Number of CPUs that the module is made for. */
extern unsigned int test_cpus;
#define num_possible_cpus() test_cpus
#define roundup_pow_of_two(n) ((n) > 1 ? 2U << ilog2((n) - 1) : 1U)

#define xchg(at, value) __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST)

/* Structures for cache lines of their own have sizes and addresses of whole lines. */
static inline void *test_aligned(size_t bytes)
{
	void *memory = bytes && !(bytes % 64) ? aligned_alloc(64, bytes) : malloc(bytes);

	return memory ? memset(memory, 0, bytes) : NULL;
}

/* Memory. The test limits it and checks what is freed. */
void *test_alloc(size_t bytes);
void test_free(void *memory);
#define kmalloc(bytes, gfp) test_alloc(bytes)
#define kcalloc(count, bytes, gfp) test_alloc((count) * (bytes))
#define kvcalloc(count, bytes, gfp) test_alloc((count) * (bytes))
#define kfree(memory) test_free(memory)
#define kvfree(memory) test_free(memory)

struct kmem_cache {
	size_t bytes;
};

#define KMEM_CACHE(type, flags) test_slab(sizeof(struct type))
struct kmem_cache *test_slab(size_t bytes);
#define kmem_cache_destroy(slab) test_free(slab)
#define kmem_cache_alloc(slab, gfp) test_alloc((slab)->bytes)
#define kmem_cache_free(slab, memory) test_free(memory)

void *alloc_pages_exact(size_t bytes, gfp_t gfp);
void free_pages_exact(void *memory, size_t bytes);
#define virt_to_phys(memory) ((phys_addr_t)(uintptr_t)(memory))

/* Opaque pages of the driver API. */
struct page;
#define page_to_phys(page) ((phys_addr_t)(uintptr_t)(page))
#define page_to_pfn(page) (page_to_phys(page) >> PAGE_SHIFT)
#define virt_to_page(memory) ((struct page *)(memory))
#define page_address(page) ((void *)(page))
#define get_order(bytes) (64 - __builtin_clzll(((bytes) - 1) >> PAGE_SHIFT | 1) -                  \
			  !(((bytes) - 1) >> PAGE_SHIFT))
#define dev_to_node(dev) 0
#define alloc_pages_node(node, gfp, order)                                                         \
	((struct page *)alloc_pages_exact(PAGE_SIZE << (order), gfp))
#define __free_pages(page, order) free_pages_exact(page, PAGE_SIZE << (order))
/* The end of an allocation that is rounded up to a power of two. */
#define split_page(page, order) ((void)(page))
#define free_page(at) ((void)(at))
/* A page of another device; 0 for none. */
extern phys_addr_t test_peer;
#define pfn_valid(pfn) ((pfn) != 0)
#define pfn_to_page(pfn) ((struct page *)((uintptr_t)(pfn) << PAGE_SHIFT))
#define CONFIG_ZONE_DEVICE
enum { ZONE_DEVICE = 4 };
#define page_zonenum(page) (is_pci_p2pdma_page(page) ? ZONE_DEVICE : 2)
#define is_pci_p2pdma_page(page) (test_peer && page_to_phys(page) == test_peer)

struct vm_area_struct {
	unsigned long vm_start, vm_pgoff, vm_page_prot;
};

#define vma_pages(vma) 2UL
#define remap_pfn_range(vma, start, pfn, bytes, prot) 0

/* Memory that is contiguous for the CPU only: one range at a time. */
#define MAX_PAGE_ORDER 10
#define __GFP_NORETRY 0
#define VM_MAP 0
#define VM_MAP_PUT_PAGES 0
#define PAGE_KERNEL 0
#define gfpflags_allow_blocking(gfp) ((void)(gfp), !test_atomic)
void *vmap(struct page **pages, unsigned int count, unsigned long flags, int prot);
void vfree(void *memory);
bool is_vmalloc_addr(const void *memory);
struct page *vmalloc_to_page(const void *at);
struct sg_table;
int vm_insert_page(struct vm_area_struct *vma, unsigned long at, struct page *page);
int sg_alloc_table_from_pages(struct sg_table *table, struct page **pages, unsigned int count,
			      unsigned int offset, unsigned long bytes, gfp_t gfp);

/* Time: each waiting poll takes a microsecond. */
extern u64 test_now_us;
void test_time_passes(void);
#define cpu_relax() test_time_passes()
#define udelay(us) test_time_passes()
/* True in atomic context, and the numbers of sleeps and reschedules. */
extern bool test_atomic;
extern unsigned int test_naps, test_yields;
void test_sleeps(unsigned int us);
#define usleep_range(least, most) test_sleeps(most)
#define preemptible() (!test_atomic)
#define rcu_preempt_depth() 0
#define cond_resched() (test_yields++, test_sleeps(0))
#define NSEC_PER_MSEC 1000000L
#define ktime_sub(one, other) ((one) - (other))
#define ktime_to_ns(time) (time)
#define touch_nmi_watchdog() ((void)0)
#define ktime_get() ((ktime_t)test_now_us * 1000)
#define jiffies ((unsigned long)(test_now_us / 1000))
#define msecs_to_jiffies(ms) ((unsigned long)(ms))
#define time_after(one, other) ((long)((other) - (one)) < 0)

/* Devices. */
#define DMA_ATTR_FORCE_CONTIGUOUS (1UL << 6)
struct dma_map_ops;

struct device {
	const struct dma_map_ops *ops;
	u64 mask, coherent_dma_mask, bus_dma_limit;
	u64 *dma_mask;
	bool dma_iommu, dma_skip_sync;
	struct device *parent;
	void *driver;
	struct {
		unsigned int min_align_mask;
	} dma_parms[1];
};

#define dma_ops ops
#define get_dma_ops(dev) ((dev)->ops)
#define dma_get_mask(dev) ((dev)->mask)

struct pci_dev {
	struct device dev;
	void *bus;
	unsigned int id, error_state;
	bool untrusted, is_pcie;
	unsigned int pcie_type;
	unsigned long *dma_alias_mask;
};

/* PCI devices: the bus of a device is the number of its segment. */
#define pci_domain_nr(bus) ((int)(uintptr_t)(bus))
#define pci_dev_id(pdev) ((pdev)->id)

struct virtio_config_ops;

struct virtio_device {
	struct device dev;
	const struct virtio_config_ops *config;
	void *priv;
};

extern unsigned int test_complaints;

#define pr_warn(...) ((void)test_complaints++)

static inline void test_complains(struct device *dev, const char *format, ...)
{
	(void)dev;
	(void)format;
	test_complaints++;
}

#define dev_err test_complains
#define dev_err_ratelimited test_complains
#define dev_warn test_complains

struct mutex {
	int none;
};

struct notifier_block {
	int (*notifier_call)(struct notifier_block *block, unsigned long event, void *data);
	int priority;
};

/* Work items. The test decides when they run. */
struct work_struct {
	void (*does)(struct work_struct *work);
	bool queued;
};

struct delayed_work {
	struct work_struct work;
	/* In jiffies, valid while queued. */
	unsigned long due;
};

#define to_delayed_work(one) container_of(one, struct delayed_work, work)

struct workqueue_struct;
#define INIT_WORK(one, with) ((one)->does = (with))
#define queue_work(on, one) ((void)(on), (one)->queued = true)
/* Work that is already queued keeps its due time. */
#define queue_delayed_work(on, one, delay)                                                         \
	((void)(on),                                                                               \
	 (one)->work.queued ? 0 : ((one)->due = jiffies + (delay), (one)->work.queued = true))

struct dentry;
struct iova_domain {
	u64 next;
};

/* Scatterlists. */
struct scatterlist {
	void *memory;
	unsigned int length;
	dma_addr_t dma_address;
	unsigned int dma_length;
};

struct sg_table {
	struct scatterlist *sgl;
};

#define sg_page(entry) ((struct page *)((uintptr_t)(entry)->memory & ~(PAGE_SIZE - 1)))
#define sg_phys(entry) ((phys_addr_t)(uintptr_t)(entry)->memory)
#define sg_dma_address(entry) ((entry)->dma_address)
#define sg_dma_len(entry) ((entry)->dma_length)
#define for_each_sg(list, entry, count, i)                                                         \
	for (i = 0, entry = (list); i < (int)(count); i++, entry++)

static inline void sg_init_one(struct scatterlist *entry, void *memory, unsigned int bytes)
{
	entry->memory = memory;
	entry->length = bytes;
}

/* The virtqueue. The test is its device side. */
struct virtqueue {
	struct virtio_device *vdev;
};

int virtqueue_add_inbuf(struct virtqueue *vq, struct scatterlist *list, unsigned int count,
			void *data, gfp_t gfp);
bool virtqueue_kick(struct virtqueue *vq);
void virtqueue_disable_cb(struct virtqueue *vq);
bool virtqueue_enable_cb(struct virtqueue *vq);
unsigned int virtqueue_get_vring_size(struct virtqueue *vq);
int virtqueue_add_sgs(struct virtqueue *vq, struct scatterlist *sgs[], unsigned int out,
		      unsigned int in, void *data, gfp_t gfp);
void *virtqueue_get_buf(struct virtqueue *vq, unsigned int *bytes);
bool virtqueue_kick_prepare(struct virtqueue *vq);
bool virtqueue_notify(struct virtqueue *vq);
bool virtqueue_is_broken(struct virtqueue *vq);
void __virtqueue_break(struct virtqueue *vq);

/* The operations, with the names of both kernel versions. */
struct dma_map_ops {
	void *(*alloc)(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
		       unsigned long attrs);
	void (*free)(struct device *dev, size_t size, void *memory, dma_addr_t address,
		     unsigned long attrs);
	struct page *(*alloc_pages_op)(struct device *dev, size_t size, dma_addr_t *address,
				       enum dma_data_direction direction, gfp_t gfp);
	void (*free_pages)(struct device *dev, size_t size, struct page *page, dma_addr_t address,
			   enum dma_data_direction direction);
	int (*mmap)(struct device *dev, struct vm_area_struct *vma, void *memory,
		    dma_addr_t address, size_t size, unsigned long attrs);
	int (*get_sgtable)(struct device *dev, struct sg_table *table, void *memory,
			   dma_addr_t address, size_t size, unsigned long attrs);
	dma_addr_t (*map_phys)(struct device *dev, phys_addr_t phys, size_t size,
			       enum dma_data_direction direction, unsigned long attrs);
	void (*unmap_phys)(struct device *dev, dma_addr_t address, size_t size,
			   enum dma_data_direction direction, unsigned long attrs);
	int (*map_sg)(struct device *dev, struct scatterlist *list, int nents,
		      enum dma_data_direction direction, unsigned long attrs);
	void (*unmap_sg)(struct device *dev, struct scatterlist *list, int nents,
			 enum dma_data_direction direction, unsigned long attrs);
	void (*sync_single_for_cpu)(struct device *dev, dma_addr_t address, size_t size,
				    enum dma_data_direction direction);
	void (*sync_single_for_device)(struct device *dev, dma_addr_t address, size_t size,
				       enum dma_data_direction direction);
	void (*sync_sg_for_cpu)(struct device *dev, struct scatterlist *list, int nents,
				enum dma_data_direction direction);
	void (*sync_sg_for_device)(struct device *dev, struct scatterlist *list, int nents,
				   enum dma_data_direction direction);
	int (*dma_supported)(struct device *dev, u64 mask);
	u64 (*get_required_mask)(struct device *dev);
	size_t (*max_mapping_size)(struct device *dev);
	size_t (*opt_mapping_size)(void);
};

#endif
