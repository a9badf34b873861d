// SPDX-License-Identifier: GPL-2.0-only
/*
 * The tables above the rings. Each occupies a page. They are written before the IOMMU translates,
 * or before their context entry is present, and then stay.
 */
#include <linux/gfp.h>

#include "riommu_ring.h"

/* Position of the first rRING in the page of the rDEVICE. */
#define RIO_RRINGS	1

static struct rio_entry *rio_page(void)
{
	return (struct rio_entry *)get_zeroed_page(GFP_KERNEL);
}

/* Fills an rDEVICE or an rRING. */
static void rio_store(struct rio_entry *entry, u64 first, u64 second)
{
	WRITE_ONCE(entry->first, cpu_to_le64(first));
	/* Orders the address before the size. An entry of size 0 has no rings or slots. */
	smp_wmb();
	WRITE_ONCE(entry->second, cpu_to_le64(second));
}

/* Allocates the root table and a context table for each bus that has a device. */
int rio_tables_init(struct rio *rio)
{
	u32 i;

	rio->root = rio_page();
	if (!rio->root)
		return -ENOMEM;
	for (i = 0; i < rio->device_count; i++) {
		u8 bus = rio->devices[i] >> 8;

		if (rio->contexts[bus])
			continue;
		rio->contexts[bus] = rio_page();
		if (!rio->contexts[bus])
			return -ENOMEM;
		/* The first word of root and context entries has the present bit. */
		rio->root[bus].first =
			cpu_to_le64(rio_root_first(virt_to_phys(rio->contexts[bus])));
	}
	return 0;
}

void rio_tables_free(struct rio *rio)
{
	int bus;

	for (bus = 0; bus < 256; bus++)
		free_page((unsigned long)rio->contexts[bus]);
	free_page((unsigned long)rio->root);
}

/* Allocates the rings and the rDEVICE, which nothing refers to yet. */
int rio_rdevice_init(struct rio_endpoint *endpoint)
{
	int i;

	BUILD_BUG_ON((RIO_RRINGS + RIO_RINGS) * sizeof(struct rio_entry) > PAGE_SIZE);
	endpoint->rdevice = rio_page();
	if (!endpoint->rdevice)
		return -ENOMEM;
	for (i = RIO_RING_READ; i < RIO_RINGS; i++) {
		struct rio_ring *ring = &endpoint->rings[i];

		if (rio_ring_init(endpoint, i, rio_slots))
			return -ENOMEM;
		rio_store(&endpoint->rdevice[RIO_RRINGS + i], virt_to_phys(ring->table),
			  ring->slots);
	}
	rio_store(endpoint->rdevice, virt_to_phys(endpoint->rdevice + RIO_RRINGS), RIO_RINGS);
	return 0;
}

/* Lets the IOMMU find the device's rings. */
void rio_rdevice_attach(struct rio_endpoint *endpoint)
{
	struct rio *rio = endpoint->rio;
	struct rio_entry *context = &rio->contexts[endpoint->id >> 8][endpoint->id & 0xff];
	u64 first = rio_context_first(virt_to_phys(endpoint->rdevice));

	/* Domains differ, because an rIOVA is defined for one device only. */
	WRITE_ONCE(context->second, cpu_to_le64(rio_context_second(endpoint->id)));
	/* Orders the domain before the first word, which has the present bit. */
	smp_wmb();
	WRITE_ONCE(context->first, cpu_to_le64(first));
	rio_invalidate(rio->regs, rio_inv_device(endpoint->id));
}

/* Call this when the IOMMU no longer translates. */
void rio_rdevice_free(struct rio_endpoint *endpoint)
{
	int i;

	for (i = 0; i < RIO_RINGS; i++)
		rio_ring_free(&endpoint->rings[i]);
	free_page((unsigned long)endpoint->rdevice);
}
