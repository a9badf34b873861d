// SPDX-License-Identifier: GPL-2.0-only
/*
 * Devices and machines that the engines cannot handle. A refused device gets operations that map
 * nothing, so that its driver fails with a reason in the log: without operations of ours, it would
 * use addresses that the IOMMU does not translate.
 */
#include <linux/cc_platform.h>
#include <linux/dma-mapping.h>
#include <linux/suspend.h>

#include "core.h"

/*
 * Refuses machines with encrypted memory. Devices of a guest (SEV, TDX) reach only pages that the
 * guest shares with the host; the modules neither bounce buffers through such pages nor share
 * coherent memory. On a host (SME), the engines do not set the encryption bit of addresses.
 */
int core_check_machine(struct device *dev)
{
	if (!cc_platform_has(CC_ATTR_MEM_ENCRYPT))
		return 0;
	dev_err(dev, "memory is encrypted, and devices behind this IOMMU cannot reach it\n");
	return -EOPNOTSUPP;
}

/*
 * Returns true if the device's accesses, or those of another device, have the requester ID of a
 * bridge: the IOMMU cannot tell them apart.
 */
static bool core_has_alias(struct pci_dev *pdev)
{
	struct pci_bus *bus;

	for (bus = pdev->bus; !pci_is_root_bus(bus); bus = bus->parent) {
		/* The bus of virtual functions has no bridge. */
		if (!bus->self)
			continue;
		if (!pci_is_pcie(bus->self))
			return true;
		switch (pci_pcie_type(bus->self)) {
		case PCI_EXP_TYPE_ROOT_PORT:
		case PCI_EXP_TYPE_UPSTREAM:
		case PCI_EXP_TYPE_DOWNSTREAM:
			break;
		default:
			return true;
		}
	}
	return pdev->dma_alias_mask;
}

/* Returns why the device cannot be an endpoint, or NULL. */
const char *core_refusal(struct core_iommu *iommu, struct pci_dev *pdev)
{
	if (pdev->untrusted && iommu->engine->maps_pages)
		return "it is untrusted, and it would reach all of the pages of its buffers";
	if (core_has_alias(pdev))
		return "its accesses have the requester ID of a bridge, or an alias";
	return NULL;
}

static void *core_refuse_alloc(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
			       unsigned long attrs)
{
	return NULL;
}

static void core_refuse_free(struct device *dev, size_t size, void *memory, dma_addr_t address,
			     unsigned long attrs)
{
}

#ifdef CORE_HAVE_MAP_PHYS
static dma_addr_t core_refuse_map(struct device *dev, phys_addr_t phys, size_t size,
				  enum dma_data_direction direction, unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}

static void core_refuse_unmap(struct device *dev, dma_addr_t address, size_t size,
			      enum dma_data_direction direction, unsigned long attrs)
{
}
#else
static dma_addr_t core_refuse_map(struct device *dev, struct page *page, unsigned long offset,
				  size_t size, enum dma_data_direction direction,
				  unsigned long attrs)
{
	return DMA_MAPPING_ERROR;
}

static void core_refuse_unmap(struct device *dev, dma_addr_t address, size_t size,
			      enum dma_data_direction direction, unsigned long attrs)
{
}
#endif

static int core_refuse_map_sg(struct device *dev, struct scatterlist *list, int nents,
			      enum dma_data_direction direction, unsigned long attrs)
{
	return -EIO;
}

static int core_refuse_mask(struct device *dev, u64 mask)
{
	return 0;
}

const struct dma_map_ops core_refusing_ops = {
	.alloc = core_refuse_alloc,
	.free = core_refuse_free,
#ifdef CORE_HAVE_MAP_PHYS
	.map_phys = core_refuse_map,
	.unmap_phys = core_refuse_unmap,
#else
	.map_page = core_refuse_map,
	.unmap_page = core_refuse_unmap,
#endif
	.map_sg = core_refuse_map_sg,
	.dma_supported = core_refuse_mask,
};

/*
 * For the prepare operation of the IOMMU's driver, which runs before any device is suspended. A
 * resume would reset the IOMMU, which drops every mapping, and the drivers would not map again.
 */
int core_refuse_sleep(struct core_iommu *iommu)
{
	dev_err(iommu->dev, "the devices behind it cannot be suspended\n");
	return -EBUSY;
}
