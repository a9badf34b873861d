// SPDX-License-Identifier: GPL-2.0-only
/*
 * A driver of QEMU's educational device (`-device edu`), whose addresses have 28 bits. It tests
 * what the device reaches during and after a mapping, and logs a line for each test. When it
 * unbinds it leaves a mapping, which it unmaps when the module is unloaded.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/pci.h>

/* Registers (QEMU, docs/specs/edu.rst), and the device's memory. */
#define EDU_SOURCE	0x80
#define EDU_TARGET	0x88
#define EDU_COUNT	0x90
#define EDU_COMMAND	0x98
#define EDU_START	1
#define EDU_WRITE	2
#define EDU_MEMORY	0x40000

struct probe {
	struct pci_dev *pdev;
	void __iomem *regs;
	u8 *page;
	/* Mapped until the module is unloaded. */
	u8 *left;
	dma_addr_t left_address;
};

static struct probe probe;

/* Copies bytes between the device's memory and an address. */
static void edu_copy(u64 source, u64 target, u32 bytes, u32 command)
{
	int tries;

	writeq(source, probe.regs + EDU_SOURCE);
	writeq(target, probe.regs + EDU_TARGET);
	writeq(bytes, probe.regs + EDU_COUNT);
	writeq(command | EDU_START, probe.regs + EDU_COMMAND);
	for (tries = 0; tries < 1000 && readq(probe.regs + EDU_COMMAND) & EDU_START; tries++)
		usleep_range(1000, 2000);
}

static void edu_reads(dma_addr_t address, u32 bytes)
{
	edu_copy(address, EDU_MEMORY, bytes, 0);
}

static void edu_writes(dma_addr_t address, u32 bytes)
{
	edu_copy(EDU_MEMORY, address, bytes, EDU_WRITE);
}

static void report(const char *what, bool is_ok)
{
	dev_info(&probe.pdev->dev, "dma_probe: %s: %s\n", what, is_ok ? "ok" : "FAIL");
}

static bool is_all(const u8 *at, size_t bytes, u8 value)
{
	return !memchr_inv(at, value, bytes);
}

static dma_addr_t map(u8 *at, size_t bytes, enum dma_data_direction direction)
{
	dma_addr_t address = dma_map_single(&probe.pdev->dev, at, bytes, direction);

	report("map", !dma_mapping_error(&probe.pdev->dev, address) &&
	       address + bytes <= DMA_BIT_MASK(28));
	return address;
}

/* The device's memory has 64 bytes of this value. */
static void edu_fill(u8 value)
{
	struct device *dev = &probe.pdev->dev;
	dma_addr_t address;

	memset(probe.page, value, 64);
	address = map(probe.page, 64, DMA_TO_DEVICE);
	edu_reads(address, 64);
	dma_unmap_single(dev, address, 64, DMA_TO_DEVICE);
}

/* The device writes less than the buffer, and the driver looks at less than that. */
static void test_partial(void)
{
	struct device *dev = &probe.pdev->dev;
	dma_addr_t address;

	edu_fill('w');
	memset(probe.page, 'd', PAGE_SIZE);
	address = map(probe.page, 2000, DMA_FROM_DEVICE);
	edu_writes(address, 64);
	dma_sync_single_for_cpu(dev, address, 32, DMA_FROM_DEVICE);
	report("a sync copies its part", is_all(probe.page, 32, 'w'));
	report("a sync copies no more", is_all(probe.page + 32, 1968, 'd'));
	dma_sync_single_for_device(dev, address, 32, DMA_FROM_DEVICE);
	dma_unmap_single(dev, address, 2000, DMA_FROM_DEVICE);
	report("the unmap copies what was written", is_all(probe.page, 64, 'w'));
	report("the unmap copies nothing of earlier buffers",
	       is_all(probe.page + 64, 1936, 0) || is_all(probe.page + 64, 1936, 'd'));
	report("the rest of the page stays", is_all(probe.page + 2000, PAGE_SIZE - 2000, 'd'));
}

/* After the unmap, a write does not reach the buffer. */
static void test_late_write(void)
{
	struct device *dev = &probe.pdev->dev;
	dma_addr_t address;

	memset(probe.page, 'd', PAGE_SIZE);
	address = map(probe.page, 256, DMA_FROM_DEVICE);
	dma_unmap_single(dev, address, 256, DMA_FROM_DEVICE);
	memset(probe.page, 'n', PAGE_SIZE);
	edu_writes(address, 64);
	report("a late write does not reach the buffer", is_all(probe.page, PAGE_SIZE, 'n'));
}

/* The bytes beside a buffer are secret, and so are those of a buffer that the device writes. */
static void test_reads(void)
{
	struct device *dev = &probe.pdev->dev;
	dma_addr_t address, other;

	memset(probe.page, 's', PAGE_SIZE);
	memset(probe.page + 1024, 'g', 64);
	address = map(probe.page + 1024, 64, DMA_TO_DEVICE);
	edu_reads(address + 64, 64);
	memset(probe.left, 0, 64);
	other = map(probe.left, 64, DMA_FROM_DEVICE);
	edu_writes(other, 64);
	dma_unmap_single(dev, other, 64, DMA_FROM_DEVICE);
	report("the device cannot read beside a buffer", !memchr(probe.left, 's', 64));
	dma_unmap_single(dev, address, 64, DMA_TO_DEVICE);

	address = map(probe.page, 64, DMA_FROM_DEVICE);
	edu_reads(address, 64);
	dma_unmap_single(dev, address, 64, DMA_FROM_DEVICE);
	memset(probe.left, 0, 64);
	other = map(probe.left, 64, DMA_FROM_DEVICE);
	edu_writes(other, 64);
	dma_unmap_single(dev, other, 64, DMA_FROM_DEVICE);
	report("the device cannot read a buffer for writing", !memchr(probe.left, 's', 64));
}

static int probe_bind(struct pci_dev *pdev, const struct pci_device_id *id)
{
	int err;

	if (probe.pdev)
		return -EBUSY;
	err = pcim_enable_device(pdev) ?: dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(28));
	if (err)
		return err;
	pci_set_master(pdev);
	probe.regs = pcim_iomap(pdev, 0, 0);
	probe.page = (u8 *)__get_free_page(GFP_KERNEL);
	probe.left = (u8 *)__get_free_page(GFP_KERNEL);
	if (!probe.regs || !probe.page || !probe.left)
		return -ENOMEM;
	probe.pdev = pci_dev_get(pdev);
	test_partial();
	test_late_write();
	test_reads();
	edu_fill('l');
	memset(probe.left, 0, 64);
	probe.left_address = map(probe.left, 64, DMA_FROM_DEVICE);
	edu_writes(probe.left_address, 64);
	return 0;
}

static void probe_unbind(struct pci_dev *pdev)
{
	pci_clear_master(pdev);
}

static const struct pci_device_id probe_ids[] = {
	{ PCI_DEVICE(0x1234, 0x11e8) },
	{ 0 },
};

static struct pci_driver probe_driver = {
	.name = "dma_probe",
	.id_table = probe_ids,
	.probe = probe_bind,
	.remove = probe_unbind,
};

static int __init probe_init(void)
{
	return pci_register_driver(&probe_driver);
}

static void __exit probe_exit(void)
{
	pci_unregister_driver(&probe_driver);
	if (!probe.pdev)
		return;
	dma_unmap_single(&probe.pdev->dev, probe.left_address, 64, DMA_FROM_DEVICE);
	report("a mapping outlives its driver", is_all(probe.left, 64, 'l'));
	free_page((unsigned long)probe.page);
	free_page((unsigned long)probe.left);
	pci_dev_put(probe.pdev);
}

module_init(probe_init);
module_exit(probe_exit);
MODULE_DESCRIPTION("Tests what QEMU's educational device reaches");
MODULE_LICENSE("GPL");
