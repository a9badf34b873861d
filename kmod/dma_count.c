// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures the cost of a map and its unmap for a device, with any IOMMU. Loaded for one measurement
 * and then removed. With QEMU's -icount shift=0, a tick of the time stamp counter is one
 * instruction.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/timex.h>

#define COUNT_WARM_UP 64
#define COUNT_PAIRS 256

static char *device = "0000:00:04.0";
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "the PCI device to map for, which has a driver");

static unsigned int bytes = PAGE_SIZE;
module_param(bytes, uint, 0444);
MODULE_PARM_DESC(bytes, "size of the buffer, at most a page");

static bool to_device;
module_param(to_device, bool, 0444);
MODULE_PARM_DESC(to_device, "map for the device to read, not to write");

static bool copies;
module_param(copies, bool, 0444);
MODULE_PARM_DESC(copies, "count copies of the buffer instead of maps and unmaps");

static unsigned int coherent;
module_param(coherent, uint, 0444);
MODULE_PARM_DESC(coherent, "allocate this many bytes of coherent memory instead");

static struct pci_dev *count_device(void)
{
	struct pci_dev *pdev = NULL;

	for_each_pci_dev(pdev) {
		if (!strcmp(pci_name(pdev), device))
			return pdev;
	}
	return NULL;
}

static int count_pairs(struct device *dev, struct page *page, int pairs)
{
	enum dma_data_direction direction = to_device ? DMA_TO_DEVICE : DMA_FROM_DEVICE;

	while (pairs--) {
		dma_addr_t address = dma_map_page(dev, page, 0, bytes, direction);

		if (dma_mapping_error(dev, address))
			return -EIO;
		dma_unmap_page(dev, address, bytes, direction);
	}
	return 0;
}

/* Copies from the first page to the second. */
static void count_copies(struct page *pages, int times)
{
	void *from = page_address(pages);

	while (times--) {
		memcpy(from + PAGE_SIZE, from, bytes);
		/* The compiler must not omit a copy. */
		barrier();
	}
}

static int count(struct device *dev, struct page *pages)
{
	unsigned long flags;
	cycles_t cycles;
	int err = 0;

	if (copies)
		count_copies(pages, COUNT_WARM_UP);
	else
		err = count_pairs(dev, pages, COUNT_WARM_UP);
	if (err)
		return err;
	/* As in a NAPI poll: modes that wait for the end of a burst do so there. */
	local_bh_disable();
	local_irq_save(flags);
	cycles = get_cycles();
	if (copies)
		count_copies(pages, COUNT_PAIRS);
	else
		err = count_pairs(dev, pages, COUNT_PAIRS);
	cycles = get_cycles() - cycles;
	local_irq_restore(flags);
	local_bh_enable();
	pr_info("dma_count: %s: %llu for %d %s\n", device, cycles, COUNT_PAIRS,
		copies ? "copies" : "maps and unmaps");
	return err;
}

/* Allocates coherent memory, writes all of it, and frees it. */
static int allocate(struct device *dev)
{
	dma_addr_t address;
	void *memory = dma_alloc_coherent(dev, coherent, &address, GFP_KERNEL);

	if (!memory)
		return -ENOMEM;
	memset(memory, 0xa5, coherent);
	pr_info("dma_count: %s: %u bytes of coherent memory, %s\n", device, coherent,
		is_vmalloc_addr(memory) ? "single pages" : "contiguous");
	dma_free_coherent(dev, coherent, memory, address);
	return 0;
}

static int __init count_init(void)
{
	struct pci_dev *pdev = count_device();
	struct page *pages = alloc_pages(GFP_KERNEL, 1);
	int err = -ENODEV;

	if (!pages)
		err = -ENOMEM;
	if (pdev && pages && bytes <= PAGE_SIZE) {
		/* Its driver stays. */
		device_lock(&pdev->dev);
		if (pdev->dev.driver)
			err = coherent ? allocate(&pdev->dev) : count(&pdev->dev, pages);
		device_unlock(&pdev->dev);
	}
	if (pages)
		__free_pages(pages, 1);
	pci_dev_put(pdev);
	return err;
}

static void __exit count_exit(void)
{
}

module_init(count_init);
module_exit(count_exit);
MODULE_DESCRIPTION("Counts what a map and its unmap cost");
MODULE_LICENSE("GPL");
