// SPDX-License-Identifier: GPL-2.0-only
/*
 * The PCI driver. A probe of a ring IOMMU installs our dma_map_ops on the PCI devices behind it.
 * Its removal unbinds their drivers.
 */
#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#include "riommu.h"

unsigned int rio_slots = 4096;
module_param_named(slots, rio_slots, uint, 0444);
MODULE_PARM_DESC(slots, "slots of each ring, 1 to 262143 (default: 4096)");

#ifdef RIO_AS_PUBLISHED
static char *mode = "burst-paper";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode,
		 "burst-paper (default): devices reach freed memory in bursts; strict; burst");
#else
static char *mode = "strict";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode,
		 "strict (default): an invalidation for each unmap; burst: one for each burst");
#endif

/* As for the flush queues of Linux (10 ms). */
unsigned int rio_burst_us = 10000;
module_param_named(burst_us, rio_burst_us, uint, 0444);
MODULE_PARM_DESC(burst_us,
		 "maximum time of a burst in microseconds, 1 to 1000000 (default: 10000)");

enum rio_mode rio_mode;
static const char * const rio_modes[] = {
	[RIO_STRICT] = "strict",
	[RIO_BURST] = "burst",
#ifdef RIO_AS_PUBLISHED
	[RIO_BURST_PAPER] = "burst-paper",
#endif
};

struct dentry *rio_debugfs;

/* Registers beyond the end of a BAR have no mapping. */
static int rio_check_bar(struct pci_dev *pdev)
{
	if (pci_resource_flags(pdev, 0) & IORESOURCE_MEM &&
	    pci_resource_len(pdev, 0) >= RIO_REG_BYTES)
		return 0;
	dev_err(&pdev->dev, "BAR 0 is not memory of at least %u bytes\n", RIO_REG_BYTES);
	return -ENODEV;
}

static int rio_identify(struct rio *rio)
{
	struct device *dev = &rio->pdev->dev;

	if (readl(rio->regs + RIO_REG_ID) != RIO_ID ||
	    RIO_MAJOR(readl(rio->regs + RIO_REG_VERSION)) != 1) {
		dev_err(dev, "not a ring IOMMU of version 1\n");
		return -ENODEV;
	}
	rio->device_count = RIO_CAP_DEVICES(readq(rio->regs + RIO_REG_CAP));
	if (rio->device_count > RIO_DEVICES_MAX) {
		dev_err(dev, "%u devices exceed the limit of %u\n", rio->device_count,
			RIO_DEVICES_MAX);
		return -EINVAL;
	}
	return 0;
}

/* The host may change the list during the read, so the copy is checked. */
static int rio_read_devices(struct rio *rio)
{
	u32 i;

	rio->devices = kcalloc(rio->device_count, sizeof(*rio->devices), GFP_KERNEL);
	if (!rio->devices)
		return -ENOMEM;
	for (i = 0; i < rio->device_count; i++) {
		rio->devices[i] = readl(rio->regs + RIO_REG_DEV + 4 * i);
		if (i && rio->devices[i] <= rio->devices[i - 1]) {
			dev_err(&rio->pdev->dev, "the list of devices is not in ascending order\n");
			return -EINVAL;
		}
	}
	return 0;
}

static int rio_request_interrupt(struct rio *rio)
{
	int err = pci_alloc_irq_vectors(rio->pdev, 1, 1, PCI_IRQ_MSIX);

	if (err < 0)
		return err;
	return pci_request_irq(rio->pdev, 0, rio_faults_interrupt, NULL, rio, "riommu");
}

/* Disables translation and fault recording, and waits until the IOMMU has stopped. */
static void rio_disable(struct rio *rio)
{
	writel(0, rio->regs + RIO_REG_CTRL);
	readl(rio->regs + RIO_REG_STS);
	pci_clear_master(rio->pdev);
}

/* Stops the work item first, because it can set CTRL's bits again. */
static void rio_stop(struct rio *rio)
{
	rio_faults_stop(rio);
	rio_disable(rio);
}

static void rio_release(struct rio *rio)
{
	rio_stop(rio);
	rio_faults_free(rio);
	core_free(&rio->core);
	rio_tables_free(rio);
	kfree(rio->devices);
	kfree(rio);
}

static int rio_start(struct rio *rio)
{
	int err;

	/*
	 * The kernel before a kexec may have left the IOMMU running. FQ is writable only while it
	 * records no faults.
	 */
	rio_disable(rio);
	err = rio_tables_init(rio) ?: rio_faults_init(rio);
	if (err)
		return err;
	pci_set_master(rio->pdev);
	err = rio_request_interrupt(rio);
	if (err)
		return err;
	writeq(virt_to_phys(rio->root), rio->regs + RIO_REG_ROOT);
	writel(RIO_CTRL_RUN, rio->regs + RIO_REG_CTRL);
	return 0;
}

static void rio_free_interrupt(struct rio *rio)
{
	pci_free_irq(rio->pdev, 0, rio);
	pci_free_irq_vectors(rio->pdev);
}

static int rio_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct rio *rio;
	int err;

	err = core_check_machine(&pdev->dev) ?: rio_check_bar(pdev) ?: pcim_enable_device(pdev);
	if (err)
		return err;
	rio = kzalloc(sizeof(*rio), GFP_KERNEL);
	if (!rio)
		return -ENOMEM;
	rio->pdev = pdev;
	core_init(&rio->core, &rio_engine, &pdev->dev);
	INIT_DELAYED_WORK(&rio->fault_work, rio_faults_work);
	rio->regs = pcim_iomap(pdev, 0, 0);
	if (!rio->regs) {
		kfree(rio);
		return -ENOMEM;
	}
	err = rio_identify(rio) ?: rio_read_devices(rio);
	if (err) {
		kfree(rio->devices);
		kfree(rio);
		return err;
	}
	pci_set_drvdata(pdev, rio);
	err = rio_start(rio);
	if (err)
		goto release;
	rio_debugfs_add(rio);
	err = core_start(&rio->core);
	if (!err)
		return 0;

	debugfs_remove_recursive(rio->debugfs);
	rio_free_interrupt(rio);
release:
	rio_release(rio);
	return err;
}

static void rio_remove(struct pci_dev *pdev)
{
	struct rio *rio = pci_get_drvdata(pdev);

	core_stop(&rio->core);
	debugfs_remove_recursive(rio->debugfs);
	rio_stop(rio);
	rio_free_interrupt(rio);
	rio_release(rio);
}

/* Before a reboot or kexec: the IOMMU must not write faults to the memory of the next kernel. */
static void rio_shutdown(struct pci_dev *pdev)
{
	rio_stop(pci_get_drvdata(pdev));
}

static int rio_prepare(struct device *dev)
{
	struct rio *rio = dev_get_drvdata(dev);

	return core_refuse_sleep(&rio->core);
}

static const struct dev_pm_ops rio_pm = { .prepare = rio_prepare };

static const struct pci_device_id rio_ids[] = {
	{ PCI_DEVICE(RIO_VENDOR, RIO_DEVICE) },
	{ 0 },
};

#ifndef RIO_AS_PUBLISHED
MODULE_DEVICE_TABLE(pci, rio_ids);
#endif

static struct pci_driver rio_driver = {
	.name = "riommu",
	.id_table = rio_ids,
	.probe = rio_probe,
	.remove = rio_remove,
	.shutdown = rio_shutdown,
	.driver.pm = pm_sleep_ptr(&rio_pm),
};

static int __init rio_init(void)
{
	int err;

	if (!rio_slots || rio_slots > RIO_SLOTS_MAX || !rio_burst_us || rio_burst_us > 1000000) {
		pr_err("riommu: slots must be 1 to %u, and burst_us 1 to 1000000\n",
		       RIO_SLOTS_MAX);
		return -EINVAL;
	}
	err = match_string(rio_modes, ARRAY_SIZE(rio_modes), mode);
	if (err < 0) {
		pr_err("riommu: mode must be strict or burst (riommu-as-published: burst-paper)\n");
		return err;
	}
	rio_mode = err;
	/* The timer of a burst frees pages in interrupt context, where such a kernel cannot. */
	if (IS_ENABLED(CONFIG_PREEMPT_RT) && rio_mode == RIO_BURST) {
		pr_err("riommu: mode=burst needs a kernel without PREEMPT_RT\n");
		return -EINVAL;
	}
	if (rio_is_as_published())
		pr_warn("riommu-as-published: burst-paper: devices can access unmapped memory\n");
	rio_debugfs = debugfs_create_dir("riommu", NULL);
	err = pci_register_driver(&rio_driver);
	if (err)
		debugfs_remove_recursive(rio_debugfs);
	return err;
}

static void __exit rio_exit(void)
{
	pci_unregister_driver(&rio_driver);
	debugfs_remove_recursive(rio_debugfs);
}

module_init(rio_init);
module_exit(rio_exit);
MODULE_DESCRIPTION("Driver of Ringfence's ring IOMMU");
MODULE_LICENSE("GPL");
