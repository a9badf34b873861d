// SPDX-License-Identifier: GPL-2.0-only
/*
 * Makes the driver of an IOMMU write page tables on kernels without a DMA layer for IOMMUs. A write
 * of "0000:00:04.0 3" to the parameter `device` attaches that PCI device to a domain of its own,
 * unless it has one, and maps and unmaps pseudo-random pages with these permissions (IOMMU_READ 1,
 * IOMMU_WRITE 2). No driver may be bound to the device. Domains live as long as the kernel: the
 * module cannot be unloaded.
 */
#include <linux/bits.h>
#include <linux/err.h>
#include <linux/iommu.h>
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/prandom.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#define MAP_STEPS 96
#define MAP_REGIONS 4
/* All mappings of one region lie in one range of this size. */
#define MAP_REGION SZ_8M
/*
 * Bits of a physical address in a page table entry. Nothing accesses the pages. Those of one run
 * lie in one GiB, because tools that replay the trace limit the number of GiB.
 */
#define MAP_PHYS_BITS 56

struct map_range {
	unsigned long iova;
	size_t size;
};

struct map_run {
	struct iommu_domain *domain;
	struct rnd_state random;
	unsigned long regions[MAP_REGIONS];
	phys_addr_t memory;
	int permissions;
	int live;
	struct map_range ranges[MAP_STEPS];
};

static u64 map_random(struct map_run *run)
{
	u64 high = prandom_u32_state(&run->random);

	return high << 32 | prandom_u32_state(&run->random);
}

/*
 * Regions: the lowest and the highest addresses of the domain, across 4 GiB, and anywhere. The GiB
 * of physical addresses lies anywhere.
 */
static void map_choose_regions(struct map_run *run)
{
	unsigned long first = run->domain->geometry.aperture_start;
	unsigned long last = run->domain->geometry.aperture_end;
	unsigned long offset = run->permissions * MAP_REGION;

	run->regions[0] = ALIGN(first, MAP_REGION) + offset;
	run->regions[1] = ALIGN_DOWN(last, MAP_REGION) - offset;
	run->regions[2] = SZ_4G - 2 * MAP_REGION + offset;
	run->regions[3] = ALIGN_DOWN(map_random(run) & (last >> 1), 4 * MAP_REGION) + offset;
	run->memory = ALIGN_DOWN(map_random(run) & (BIT_ULL(MAP_PHYS_BITS) - 1), SZ_1G);
}

/* Returns pages of one of the sizes of the domain, most often the smallest. */
static size_t map_choose_size(struct map_run *run)
{
	u64 choice = map_random(run) % 16;

	if (choice == 0)
		return SZ_2M;
	if (choice < 4)
		return SZ_64K;
	return PAGE_SIZE * (1 + choice % 4);
}

static bool map_is_free(const struct map_run *run, unsigned long iova, size_t size)
{
	int i;

	for (i = 0; i < run->live; i++) {
		const struct map_range *range = &run->ranges[i];

		if (iova < range->iova + range->size && range->iova < iova + size)
			return false;
	}
	return true;
}

static int map_one(struct map_run *run)
{
	size_t size = map_choose_size(run);
	size_t align = roundup_pow_of_two(size);
	unsigned long iova = run->regions[map_random(run) % MAP_REGIONS];
	phys_addr_t phys = run->memory + ALIGN_DOWN(map_random(run) % SZ_1G, align);
	int err;

	iova += ALIGN_DOWN(map_random(run) % MAP_REGION, align);
	if (!map_is_free(run, iova, size))
		return 0;
	err = iommu_map(run->domain, iova, phys, size, run->permissions, GFP_KERNEL);
	if (err)
		return err;
	run->ranges[run->live].iova = iova;
	run->ranges[run->live].size = size;
	run->live++;
	return 0;
}

static int unmap_one(struct map_run *run)
{
	struct map_range *range = &run->ranges[map_random(run) % run->live];

	if (iommu_unmap(run->domain, range->iova, range->size) != range->size)
		return -EIO;
	*range = run->ranges[--run->live];
	return 0;
}

static struct iommu_domain *map_domain(struct device *dev)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);
	int err;

	if (!domain)
		return ERR_PTR(-ENODEV);
	if (domain->type == IOMMU_DOMAIN_UNMANAGED)
		return domain;
	domain = iommu_paging_domain_alloc(dev);
	if (IS_ERR(domain))
		return domain;
	err = iommu_attach_device(domain, dev);
	if (!err)
		return domain;
	iommu_domain_free(domain);
	return ERR_PTR(err);
}

static int map_device(struct pci_dev *pdev, int permissions)
{
	struct map_run *run;
	int err = 0;
	int step;

	run = kzalloc(sizeof(*run), GFP_KERNEL);
	if (!run)
		return -ENOMEM;
	run->permissions = permissions;
	run->domain = map_domain(&pdev->dev);
	if (IS_ERR(run->domain)) {
		err = PTR_ERR(run->domain);
		goto out;
	}
	prandom_seed_state(&run->random, pci_dev_id(pdev) << 2 | permissions);
	map_choose_regions(run);
	for (step = 0; !err && step < MAP_STEPS; step++) {
		if (run->live && map_random(run) % 4 == 0)
			err = unmap_one(run);
		else
			err = map_one(run);
	}
	pci_info(pdev, "map_pages: sizes %#lx, addresses %#llx to %#llx, %d ranges: %d\n",
		 run->domain->pgsize_bitmap, (u64)run->domain->geometry.aperture_start,
		 (u64)run->domain->geometry.aperture_end, run->live, err);
out:
	kfree(run);
	return err;
}

static int map_set(const char *text, const struct kernel_param *param)
{
	unsigned int segment, bus, slot, function;
	struct pci_dev *pdev;
	int permissions;
	int err;

	if (sscanf(text, "%x:%x:%x.%x %d", &segment, &bus, &slot, &function, &permissions) != 5)
		return -EINVAL;
	if (permissions & ~(IOMMU_READ | IOMMU_WRITE) || !permissions)
		return -EINVAL;
	pdev = pci_get_domain_bus_and_slot(segment, bus, PCI_DEVFN(slot, function));
	if (!pdev)
		return -ENODEV;
	err = pdev->dev.driver ? -EBUSY : map_device(pdev, permissions);
	pci_dev_put(pdev);
	return err;
}

static const struct kernel_param_ops map_ops = {
	.set = map_set,
};

module_param_cb(device, &map_ops, NULL, 0200);
MODULE_PARM_DESC(device, "PCI device without a driver, and permissions");

static int __init map_init(void)
{
	return 0;
}

module_init(map_init);
MODULE_DESCRIPTION("Maps pseudo-random pages for devices behind an IOMMU");
MODULE_LICENSE("GPL");
