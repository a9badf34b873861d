/* SPDX-License-Identifier: GPL-2.0-only */
/* Kernel interfaces of riommu_main.c and riommu_faults.c, in addition to kernel.h. */
#ifndef TEST_RIOMMU_MODULE_H
#define TEST_RIOMMU_MODULE_H

#define __iomem
#define irqreturn_t int
#define IRQ_HANDLED 1
#define __init
#define __exit
#define module_param_named(name, variable, type, mode)
#define module_param(variable, type, mode)
#define MODULE_PARM_DESC(name, text)
#define MODULE_DEVICE_TABLE(bus, ids)
#define MODULE_DESCRIPTION(text)
#define MODULE_LICENSE(text)
#define module_init(function)
#define module_exit(function)
#define pr_err(...) ((void)test_complaints++)
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define debugfs_create_dir(name, parent) NULL
#define debugfs_remove_recursive(dir) ((void)(dir))
#define smp_rmb()
#define smp_wmb()
#define try_cmpxchg(at, old, new) (*(at) = (new), true)
#define cmpxchg(at, old, new) (*(at) = (new))

typedef struct {
	long value;
} atomic64_t;
typedef atomic64_t atomic_t;
struct tasklet_struct {
	int none;
};

struct hrtimer {
	int none;
};

#define kzalloc(bytes, gfp) test_alloc(bytes)
#define get_zeroed_page(gfp) ((uintptr_t)aligned_alloc(PAGE_SIZE, PAGE_SIZE))
#undef free_page
#define free_page(at) free((void *)(at))

static inline int match_string(const char *const *strings, size_t count, const char *string)
{
	size_t i;

	for (i = 0; i < count && strings[i]; i++)
		if (!strcmp(strings[i], string))
			return i;
	return -EINVAL;
}

/* The work item, which also may be disabled. */
#define INIT_DELAYED_WORK(one, with) ((one)->work.does = (with))
static bool is_disabled;
#define disable_delayed_work_sync(one) (is_disabled = true, (one)->work.queued = false)
#define schedule_delayed_work(one, delay)                                                          \
	((void)(is_disabled || queue_delayed_work(NULL, one, delay)))

/* The PCI function. */
struct dev_pm_ops {
	int (*prepare)(struct device *dev);
};

#define pm_sleep_ptr(ops) (ops)
struct pci_device_id {
	unsigned int vendor, device;
};

#define PCI_DEVICE(ids, id) .vendor = (ids), .device = (id)
struct pci_driver {
	const char *name;
	const struct pci_device_id *id_table;
	int (*probe)(struct pci_dev *pdev, const struct pci_device_id *id);
	void (*remove)(struct pci_dev *pdev);
	void (*shutdown)(struct pci_dev *pdev);
	struct {
		const struct dev_pm_ops *pm;
	} driver;
};

#define pci_register_driver(driver) ((void)(driver), 0)
#define pci_unregister_driver(driver) ((void)(driver))
#define PCI_IRQ_MSIX 0
#define pcim_enable_device(pdev) 0
#define IORESOURCE_MEM 0x200
#define pci_resource_flags(pdev, bar) bar_flags
#define pci_resource_len(pdev, bar) bar_bytes
#define pcim_iomap(pdev, bar, bytes) ((void *)registers)
#define pci_set_drvdata(pdev, data) ((pdev)->dev.driver = (data))
#define pci_get_drvdata(pdev) ((pdev)->dev.driver)
#define dev_get_drvdata(dev) ((dev)->driver)
#define pci_set_master(pdev) ((void)(pdev))
#define pci_clear_master(pdev) ((void)(pdev))
#define pci_alloc_irq_vectors(pdev, least, most, flags) 1
#define pci_request_irq(pdev, vector, handler, thread, data, name) (interrupt = (handler), 0)
#define pci_free_irq(pdev, vector, data) ((void)(interrupt = NULL))
#define pci_free_irq_vectors(pdev) ((void)(pdev))
static int (*interrupt)(int irq, void *data);

#define readl(from) test_read((u8 *)(from) - registers)
#define readq(from) test_read((u8 *)(from) - registers)
#define writel(word, to) test_write(word, (u8 *)(to) - registers)
#define writeq(word, to) test_write(word, (u8 *)(to) - registers)
static unsigned long bar_flags = IORESOURCE_MEM;
static u64 bar_bytes = 4096;
static u8 registers[4096];
static u64 test_read(u64 offset);
static void test_write(u64 word, u64 offset);

#endif
