// SPDX-License-Identifier: GPL-2.0-only
/*
 * Faults: accesses that the IOMMU blocked. A device can cause any number. The IOMMU raises at most
 * one interrupt between two writes of FQ_HEAD, and the work item writes it at most every
 * RIO_FAULTS_PAUSE_MS. It logs at most 10 faults in 5 seconds. An IOMMU that cannot write a fault
 * stops recording. The work item restarts it, at most once every RIO_FAULTS_PAUSE_MS.
 */
#include <linux/gfp.h>

#include "riommu.h"

#define RIO_FAULT_SHIFT		6
#define RIO_FAULTS_PAUSE_MS	10

static const char *rio_reason(u8 reason)
{
	switch (reason) {
	case RIO_FAULT_BLOCKED:
		return "translation is off, or the device is not listed";
	case RIO_FAULT_ROOT_NOT_PRESENT:
		return "root entry not present";
	case RIO_FAULT_CONTEXT_NOT_PRESENT:
		return "context entry not present";
	case RIO_FAULT_CONTEXT_INVALID:
		return "context entry of another type";
	case RIO_FAULT_TABLE_ACCESS:
		return "a table outside memory, or an access beyond 2^64";
	case RIO_FAULT_RESERVED_BIT:
		return "a reserved bit, or a misaligned table";
	case RIO_FAULT_RING_BEYOND_DEVICE:
		return "the device has no such ring";
	case RIO_FAULT_SLOT_BEYOND_RING:
		return "the ring has no such slot";
	case RIO_FAULT_NOT_VALID:
		return "nothing is mapped there";
	case RIO_FAULT_READ_DENIED:
	case RIO_FAULT_WRITE_DENIED:
		return "not in this direction";
	case RIO_FAULT_BEYOND_BUFFER:
		return "outside the buffer";
	case RIO_FAULT_BAD_LENGTH:
		return "invalid length";
	default:
		return "unknown reason";
	}
}

static void rio_log(struct rio *rio, const struct rio_entry *entry)
{
	u64 second = le64_to_cpu(READ_ONCE(entry->second));
	u16 device = rio_fault_device(second);

	dev_err_ratelimited(&rio->pdev->dev, "%04x:%02x:%02x.%x was stopped: %s at %#llx, %s\n",
			    pci_domain_nr(rio->pdev->bus), device >> 8, device >> 3 & 0x1f,
			    device & 7, rio_fault_is_write(second) ? "a write" : "a read",
			    le64_to_cpu(READ_ONCE(entry->first)),
			    rio_reason(rio_fault_reason(second)));
}

/* A write of FQ sets FQ_HEAD and FQ_TAIL to 0. FQ is writable, because recording has stopped. */
static void rio_set_queue(struct rio *rio)
{
	writeq(rio_fq(virt_to_phys(rio->fault_queue), ilog2(rio->fault_entries)),
	       rio->regs + RIO_REG_FQ);
	rio->fault_head = 0;
}

void rio_faults_work(struct work_struct *work)
{
	struct rio *rio = container_of(to_delayed_work(work), struct rio, fault_work);
	/* Read STS before FQ_TAIL: if it reports a stopped queue, FQ_TAIL is final. */
	u32 status = readl(rio->regs + RIO_REG_STS);
	u32 tail = readl(rio->regs + RIO_REG_FQ_TAIL);
	u32 unread = min(tail - rio->fault_head, rio->fault_entries);
	bool is_stopped = status & RIO_STS_QUEUE;

	while (unread--) {
		rio_log(rio, &rio->fault_queue[rio->fault_head % rio->fault_entries]);
		rio->fault_head++;
		rio->faults++;
	}
	/* Clear only the bits read above. */
	writel(status, rio->regs + RIO_REG_STS);
	if (is_stopped) {
		dev_err_ratelimited(&rio->pdev->dev,
				    "the IOMMU could not record a fault, and is restarted\n");
		rio_set_queue(rio);
		rio->fault_restarts++;
	}
	/* If entries are unread, the IOMMU raises the interrupt again. */
	writel(rio->fault_head, rio->regs + RIO_REG_FQ_HEAD);
	if (is_stopped)
		writel(RIO_CTRL_RUN, rio->regs + RIO_REG_CTRL);
	else if (readl(rio->regs + RIO_REG_STS) & RIO_STS_QUEUE)
		/* The queue stopped after the first read of STS, perhaps without an interrupt. */
		schedule_delayed_work(&rio->fault_work, msecs_to_jiffies(RIO_FAULTS_PAUSE_MS));
}

irqreturn_t rio_faults_interrupt(int irq, void *data)
{
	struct rio *rio = data;

	schedule_delayed_work(&rio->fault_work, msecs_to_jiffies(RIO_FAULTS_PAUSE_MS));
	return IRQ_HANDLED;
}

int rio_faults_init(struct rio *rio)
{
	u64 cap = readq(rio->regs + RIO_REG_CAP);
	u32 shift = min_t(u32, RIO_FAULT_SHIFT, RIO_CAP_QUEUE(cap));

	rio->fault_entries = 1U << shift;
	rio->fault_queue = (struct rio_entry *)get_zeroed_page(GFP_KERNEL);
	if (!rio->fault_queue)
		return -ENOMEM;
	rio_set_queue(rio);
	return 0;
}

/* On return, the work item does not run again, so nothing sets CTRL's bits but the caller. */
void rio_faults_stop(struct rio *rio)
{
	disable_delayed_work_sync(&rio->fault_work);
}

/* Call this when the IOMMU no longer records faults, and its work is stopped. */
void rio_faults_free(struct rio *rio)
{
	free_page((unsigned long)rio->fault_queue);
}
