/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel interfaces of pool_main.c, pool_bind.c and pool_memory.c, in addition to pool_kernel.h:
 * PCI devices, debugfs, and the DMA API with an IOMMU of its own.
 */
#ifndef TEST_POOL_MODULE_H
#define TEST_POOL_MODULE_H

#include <limits.h>
#include <sys/mman.h>

#include "pool_kernel.h"

#define __init
#define __exit
#define charp 0
#define module_param_named(name, variable, type, mode)
#define module_param_array_named(name, variable, type, count, mode)
#define MODULE_PARM_DESC(name, text)
#define MODULE_DESCRIPTION(text)
#define MODULE_LICENSE(text)
#define module_init(function)
#define module_exit(function)
#define pr_err(...) ((void)test_complaints++)
#define kmemdup(from, bytes, gfp) memcpy(test_alloc(bytes), from, bytes)
#define __GFP_RETRY_MAYFAIL 0
#define dma_set_mask(dev, with) ((dev)->mask = (with))

/* Locks: the device's is taken before the list's. */
#define DEFINE_MUTEX(name) bool name
#define raw_spin_lock_init(lock) (*(lock) = false)
#define mutex_lock(mutex) (*(mutex) ? abort() : (void)0, *(mutex) = true)
#define mutex_unlock(mutex) (*(mutex) = false)
#define device_lock(dev) CHECK(!pool_mutex)
#define device_unlock(dev) CHECK(!pool_mutex)
#define synchronize_rcu() test_synchronize()
static void test_synchronize(void);
#define cancel_work_sync(one) ((one)->queued = false)

/* The module's users. */
#define THIS_MODULE NULL
static int test_users;
static bool test_is_unloading;
#define try_module_get(module) (!test_is_unloading && ++test_users)
#define module_put(module) ((void)test_users--)

/* Notifiers. */
enum {
	NOTIFY_DONE,
	NOTIFY_OK,
	BUS_NOTIFY_BIND_DRIVER,
	BUS_NOTIFY_UNBOUND_DRIVER,
	BUS_NOTIFY_DRIVER_NOT_BOUND,
	BUS_NOTIFY_REMOVED_DEVICE,
};

static struct notifier_block *test_notifiers[2];
static int test_registered;
/* The registration that fails, from 1; 0: none. */
static int test_failing;
#define bus_register_notifier(bus, block)                                                          \
	(test_registered + 1 == test_failing ? -ENOMEM                                             \
					     : (test_notifiers[test_registered++] = (block), 0))
#define bus_unregister_notifier(bus, block) ((void)(block), test_registered--)

/* PCI devices. */
struct pci_driver {
	bool driver_managed_dma;
};

#define to_pci_driver(one) ((struct pci_driver *)(one))
#define to_pci_dev(one) container_of((struct device *)(one), struct pci_dev, dev)
#define set_dma_ops(device, with) ((device)->ops = (with))
#define use_dma_iommu(device) ((device)->dma_iommu)
static int test_references;
#define pci_dev_get(pdev) (test_references++, (pdev))
#define pci_dev_put(pdev) ((void)(pdev), test_references--)
static const char *pci_name(const struct pci_dev *pdev);
#define for_each_pci_dev(pdev) while ((pdev = test_next_device(pdev)))
static struct pci_dev *test_next_device(struct pci_dev *before);
static void device_release_driver(struct device *dev);
static int device_attach(struct device *dev);

/* A guest with encrypted memory. */
#define CC_ATTR_GUEST_MEM_ENCRYPT 1
static bool test_encrypted;
#define cc_platform_has(attribute) ((void)(attribute), test_encrypted)

/* The directory, which has a file for each pool. After its removal, nothing may use it. */
struct seq_file {
	void *private;
};

static bool test_has_directory;
static void test_directory_removed(void);

static inline void seq_printf(struct seq_file *file, const char *format, ...)
{
}

#define DEFINE_SHOW_ATTRIBUTE(name) static int (*const name##_fops)(struct seq_file *, void *) = \
					    name##_show
#define debugfs_create_dir(name, parent) (test_has_directory = true, (struct dentry *)1)
#define debugfs_create_file(name, mode, parent, data, fops)                                        \
	(test_has_directory ? (void)(fops) : abort(), (parent))
#define debugfs_remove(file) (test_has_directory ? (void)(file) : abort())
#define debugfs_remove_recursive(dir)                                                              \
	((void)(dir), test_has_directory = false, test_directory_removed())

/* The DMA API without our operations. */
static dma_addr_t test_iommu_map(struct device *dev, void *memory, size_t bytes);
static void test_iommu_unmap(struct device *dev, dma_addr_t address, size_t bytes);
#define dma_map_page(dev, page, offset, bytes, direction)                                          \
	test_iommu_map(dev, page_address(page), bytes)
#define dma_unmap_page(dev, address, bytes, direction) test_iommu_unmap(dev, address, bytes)
#define dma_mapping_error(dev, address) ((address) == DMA_MAPPING_ERROR)

/* Memory of chunks. For a device without an IOMMU it lies below 4 GiB. */
#undef __GFP_DMA
#undef __GFP_DMA32
#define __GFP_DMA 1
#define __GFP_DMA32 2
#define TEST_LOW_CHUNKS 64
static u8 *test_low;
static bool test_low_used[TEST_LOW_CHUNKS];
/* The test limits the number of chunks. */
static int test_chunks, test_most_chunks = INT32_MAX;

static u8 *test_low_chunk(void)
{
	u32 i = 0;

	if (!test_low) {
		test_low = mmap(NULL, (TEST_LOW_CHUNKS + 1) * POOL_CHUNK_BYTES,
				PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
		CHECK(test_low != MAP_FAILED);
		test_low = (u8 *)ALIGN((uintptr_t)test_low, POOL_CHUNK_BYTES);
	}
	while (test_low_used[i])
		CHECK(++i < TEST_LOW_CHUNKS);
	test_low_used[i] = true;
	return test_low + i * POOL_CHUNK_BYTES;
}

void *alloc_pages_exact(size_t bytes, gfp_t gfp)
{
	u8 *memory;

	if (test_chunks >= test_most_chunks)
		return NULL;
	test_chunks++;
	memory = gfp & (__GFP_DMA | __GFP_DMA32) ? test_low_chunk()
						  : aligned_alloc(POOL_CHUNK_BYTES, bytes);
	return memset(memory, 0, bytes);
}

void free_pages_exact(void *memory, size_t bytes)
{
	u64 offset = (u8 *)memory - test_low;

	test_chunks--;
	if (test_low && offset < TEST_LOW_CHUNKS * POOL_CHUNK_BYTES)
		test_low_used[offset / POOL_CHUNK_BYTES] = false;
	else
		free(memory);
}

#endif
