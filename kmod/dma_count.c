// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures the cost of a map and its unmap for a device, with any IOMMU. Loaded for one measurement
 * and then removed. With QEMU's -icount shift=0, a tick of the time stamp counter is one
 * instruction.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/timex.h>

#define COUNT_WARM_UP 64
#define COUNT_PAIRS 256

static char *device = "0000:00:04.0";
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "the PCI device to map for, which has a driver");

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
	while (pairs--) {
		dma_addr_t address = dma_map_page(dev, page, 0, PAGE_SIZE, DMA_FROM_DEVICE);

		if (dma_mapping_error(dev, address))
			return -EIO;
		dma_unmap_page(dev, address, PAGE_SIZE, DMA_FROM_DEVICE);
	}
	return 0;
}

static int __init count_init(void)
{
	struct pci_dev *pdev = count_device();
	struct page *page = alloc_page(GFP_KERNEL);
	unsigned long flags;
	cycles_t begun;
	int err = -ENODEV;

	if (pdev && page)
		err = count_pairs(&pdev->dev, page, COUNT_WARM_UP);
	if (!err) {
		local_irq_save(flags);
		begun = get_cycles();
		err = count_pairs(&pdev->dev, page, COUNT_PAIRS);
		begun = get_cycles() - begun;
		local_irq_restore(flags);
		pr_info("dma_count: %s: %llu for %d maps and unmaps\n", device, begun, COUNT_PAIRS);
	}
	if (page)
		__free_page(page);
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
