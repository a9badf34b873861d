// SPDX-License-Identifier: GPL-2.0-only
/*
 * A module with one defect of each kind that the debug kernel's checks find. The parameter "how"
 * selects one. reports.sh requires that each of them fails a test.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

static char *how = "";
module_param(how, charp, 0444);
MODULE_PARM_DESC(how, "the defect");

static char *device = "0000:00:04.0";
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "PCI device of the defects in the use of the DMA API");

static DEFINE_SPINLOCK(one);
static DEFINE_SPINLOCK(two);
static int protected_value;
static int __rcu *published = RCU_INITIALIZER(&protected_value);

/* Takes two locks in both orders. */
static int lock_order(void)
{
	spin_lock(&one);
	spin_lock(&two);
	spin_unlock(&two);
	spin_unlock(&one);
	spin_lock(&two);
	spin_lock(&one);
	spin_unlock(&one);
	spin_unlock(&two);
	return 0;
}

/* Takes a lock with interrupts on that a soft interrupt takes too. */
static void take_one(struct timer_list *timer)
{
	spin_lock(&one);
	spin_unlock(&one);
}

static DEFINE_TIMER(timer, take_one);

static int lock_softirq(void)
{
	mod_timer(&timer, jiffies + 1);
	msleep(100);
	spin_lock(&one);
	spin_unlock(&one);
	timer_delete_sync(&timer);
	return 0;
}

static int rcu_unprotected(void)
{
	return *rcu_dereference(published);
}

static int sleep_in_atomic(void)
{
	spin_lock(&one);
	kfree(kzalloc(24, GFP_KERNEL));
	spin_unlock(&one);
	return 0;
}

static int preemptible_cpu(void)
{
	return smp_processor_id() * 0;
}

/* Writes behind a buffer. */
static int out_of_bounds(void)
{
	volatile char *bytes = kzalloc(24, GFP_KERNEL);
	volatile int at = 24;

	if (!bytes)
		return -ENOMEM;
	bytes[at] = 1;
	kfree((void *)bytes);
	return 0;
}

/* Reads a buffer that it has freed. */
static int after_free(void)
{
	volatile char *bytes = kzalloc(24, GFP_KERNEL);

	if (!bytes)
		return -ENOMEM;
	kfree((void *)bytes);
	return bytes[3];
}

static int index_of_array(void)
{
	static int array[4];
	volatile int at = 7;

	return array[at] * 0;
}

/* Adds an entry to a list twice. */
static int list_twice(void)
{
	static struct list_head entry;
	static LIST_HEAD(list);

	list_add(&entry, &list);
	list_add(&entry, &list);
	return 0;
}

static int refcount(void)
{
	static refcount_t count = REFCOUNT_INIT(1);

	return refcount_dec_and_test(&count) && refcount_dec_and_test(&count);
}

static void nothing(struct work_struct *work)
{
}

/* Frees a work item that is queued. */
static int free_queued(void)
{
	struct delayed_work *work = kzalloc(sizeof(*work), GFP_KERNEL);

	if (!work)
		return -ENOMEM;
	INIT_DELAYED_WORK(work, nothing);
	schedule_delayed_work(work, 100 * HZ);
	kfree(work);
	return 0;
}

/* Unmaps a buffer twice. */
static int unmap_twice(void)
{
	int domain, bus, slot, function;
	struct pci_dev *pdev = NULL;
	void *bytes = kzalloc(64, GFP_KERNEL);
	dma_addr_t at;

	if (sscanf(device, "%x:%x:%x.%x", &domain, &bus, &slot, &function) == 4)
		pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
	if (!pdev || !bytes)
		return -ENODEV;
	at = dma_map_single(&pdev->dev, bytes, 64, DMA_TO_DEVICE);
	if (!dma_mapping_error(&pdev->dev, at)) {
		dma_unmap_single(&pdev->dev, at, 64, DMA_TO_DEVICE);
		dma_unmap_single(&pdev->dev, at, 64, DMA_TO_DEVICE);
	}
	pci_dev_put(pdev);
	kfree(bytes);
	return 0;
}

/* Sleeps longer than the limit that reports.sh sets, and no signal wakes it. */
static int hang(void)
{
	set_current_state(TASK_UNINTERRUPTIBLE);
	schedule_timeout(8 * HZ);
	return 0;
}

static const struct {
	const char *name;
	int (*run)(void);
} defects[] = {
	{ "rcu", rcu_unprotected },
	{ "sleep", sleep_in_atomic },
	{ "preemptible", preemptible_cpu },
	{ "ubsan", index_of_array },
	{ "refcount", refcount },
	{ "list", list_twice },
	{ "object", free_queued },
	{ "dma", unmap_twice },
	{ "hung", hang },
	{ "order", lock_order },
	{ "softirq", lock_softirq },
	{ "bounds", out_of_bounds },
	{ "free", after_free },
};

/* Never stays loaded: insmod fails, and the next defect can be loaded at once. */
static int __init broken_init(void)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(defects); i++) {
		if (!strcmp(defects[i].name, how)) {
			defects[i].run();
			return -ECANCELED;
		}
	}
	return -EINVAL;
}
module_init(broken_init);

MODULE_DESCRIPTION("One defect of each kind that the debug kernel finds");
MODULE_LICENSE("GPL");
