// SPDX-License-Identifier: GPL-2.0-only
/*
 * The dma_map_ops. Memory is coherent, so the sync operations are not needed. A buffer has a slot
 * of its own, so a device reaches its bytes only, unless it needs low bits of their address.
 */
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>

#include "riommu.h"

/* Ring 3 uses bits 48 and 49. */
#define RIO_ADDRESS_MASK	DMA_BIT_MASK(50)
/* Well below the largest buffer of a slot. */
#define RIO_MAPPING_BYTES	(512UL << 20)

static struct rio_endpoint *rio_endpoint_of(struct device *dev)
{
	return container_of(get_dma_ops(dev), struct rio_endpoint, ops);
}

static struct rio_ring *rio_ring_for(struct rio_endpoint *endpoint,
				     enum dma_data_direction direction)
{
	switch (direction) {
	case DMA_TO_DEVICE:
		return &endpoint->rings[RIO_RING_READ];
	case DMA_FROM_DEVICE:
		return &endpoint->rings[RIO_RING_WRITE];
	default:
		return &endpoint->rings[RIO_RING_BOTH];
	}
}

static dma_addr_t rio_map(struct device *dev, u64 phys, size_t size,
			  enum dma_data_direction direction)
{
	struct rio_ring *ring = rio_ring_for(rio_endpoint_of(dev), direction);
	/* Some devices (NVMe) need these low bits of the address; the slot then begins earlier. */
	u32 offset = phys & dma_get_min_align_mask(dev);

	if (!size || size > RIO_MAPPING_BYTES)
		return DMA_MAPPING_ERROR;
	return rio_ring_map(ring, phys - offset, size + offset, offset);
}

static bool rio_unmap(struct device *dev, dma_addr_t address)
{
	if (rio_ring_unmap(rio_endpoint_of(dev), address))
		return true;
	dev_err_ratelimited(dev, "riommu: an unmap failed: %pad is not mapped, or the IOMMU is gone\n",
			    &address);
	return false;
}

#ifdef PVI_HAVE_MAP_PHYS
static dma_addr_t rio_map_phys(struct device *dev, phys_addr_t phys, size_t size,
			       enum dma_data_direction direction, unsigned long attrs)
{
	/* The IOMMU reaches memory only. */
	if (attrs & DMA_ATTR_MMIO)
		return DMA_MAPPING_ERROR;
	return rio_map(dev, phys, size, direction);
}

static void rio_unmap_phys(struct device *dev, dma_addr_t address, size_t size,
			   enum dma_data_direction direction, unsigned long attrs)
{
	rio_unmap(dev, address);
}
#else
static dma_addr_t rio_map_page(struct device *dev, struct page *page, unsigned long offset,
			       size_t size, enum dma_data_direction direction, unsigned long attrs)
{
	return rio_map(dev, page_to_phys(page) + offset, size, direction);
}

static void rio_unmap_page(struct device *dev, dma_addr_t address, size_t size,
			   enum dma_data_direction direction, unsigned long attrs)
{
	rio_unmap(dev, address);
}
#endif

static void rio_unmap_sg(struct device *dev, struct scatterlist *list, int nents,
			 enum dma_data_direction direction, unsigned long attrs)
{
	struct scatterlist *entry;
	int i;

	for_each_sg(list, entry, nents, i)
		rio_unmap(dev, sg_dma_address(entry));
}

static int rio_map_sg(struct device *dev, struct scatterlist *list, int nents,
		      enum dma_data_direction direction, unsigned long attrs)
{
	struct scatterlist *entry;
	int i;

	/* No retry would succeed. */
	if (nents > rio_ring_for(rio_endpoint_of(dev), direction)->slots)
		return -EIO;
	for_each_sg(list, entry, nents, i) {
		if (!entry->length || entry->length > RIO_MAPPING_BYTES) {
			rio_unmap_sg(dev, list, i, direction, attrs);
			return -EIO;
		}
		sg_dma_address(entry) = rio_map(dev, sg_phys(entry), entry->length, direction);
		if (sg_dma_address(entry) == DMA_MAPPING_ERROR) {
			rio_unmap_sg(dev, list, i, direction, attrs);
			/* A slot may become free, so a retry may succeed. */
			return -ENOMEM;
		}
		sg_dma_len(entry) = entry->length;
	}
	return nents;
}

/* Coherent memory. Pages that the device may still access are not returned to the kernel. */
static void *rio_alloc(struct device *dev, size_t size, dma_addr_t *address, gfp_t gfp,
		       unsigned long attrs)
{
	void *memory;

	gfp &= ~(__GFP_DMA | __GFP_DMA32 | __GFP_HIGHMEM | __GFP_COMP);
	memory = alloc_pages_exact(size, gfp | __GFP_ZERO);
	if (!memory)
		return NULL;
	*address = rio_map(dev, virt_to_phys(memory), size, DMA_BIDIRECTIONAL);
	if (*address != DMA_MAPPING_ERROR)
		return memory;
	free_pages_exact(memory, size);
	return NULL;
}

static void rio_free(struct device *dev, size_t size, void *memory, dma_addr_t address,
		     unsigned long attrs)
{
	if (rio_unmap(dev, address))
		free_pages_exact(memory, size);
}

static struct page *rio_alloc_pages(struct device *dev, size_t size, dma_addr_t *address,
				    enum dma_data_direction direction, gfp_t gfp)
{
	struct page *page = alloc_pages_node(dev_to_node(dev), gfp | __GFP_ZERO, get_order(size));

	if (!page)
		return NULL;
	*address = rio_map(dev, page_to_phys(page), size, direction);
	if (*address != DMA_MAPPING_ERROR)
		return page;
	__free_pages(page, get_order(size));
	return NULL;
}

static void rio_free_pages(struct device *dev, size_t size, struct page *page, dma_addr_t address,
			   enum dma_data_direction direction)
{
	if (rio_unmap(dev, address))
		__free_pages(page, get_order(size));
}

static int rio_mmap(struct device *dev, struct vm_area_struct *vma, void *memory,
		    dma_addr_t address, size_t size, unsigned long attrs)
{
	unsigned long pages = PAGE_ALIGN(size) >> PAGE_SHIFT;

	if (vma->vm_pgoff >= pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -ENXIO;
	return remap_pfn_range(vma, vma->vm_start,
			       page_to_pfn(virt_to_page(memory)) + vma->vm_pgoff,
			       vma_pages(vma) << PAGE_SHIFT, vma->vm_page_prot);
}

static int rio_get_sgtable(struct device *dev, struct sg_table *table, void *memory,
			   dma_addr_t address, size_t size, unsigned long attrs)
{
	int err = sg_alloc_table(table, 1, GFP_KERNEL);

	if (!err)
		sg_set_page(table->sgl, virt_to_page(memory), PAGE_ALIGN(size), 0);
	return err;
}

static int rio_dma_supported(struct device *dev, u64 mask)
{
	return mask >= RIO_ADDRESS_MASK;
}

static u64 rio_get_required_mask(struct device *dev)
{
	return RIO_ADDRESS_MASK;
}

static size_t rio_max_mapping_size(struct device *dev)
{
	return RIO_MAPPING_BYTES;
}

const struct dma_map_ops rio_ops = {
	.alloc = rio_alloc,
	.free = rio_free,
	.alloc_pages_op = rio_alloc_pages,
	.free_pages = rio_free_pages,
	.mmap = rio_mmap,
	.get_sgtable = rio_get_sgtable,
#ifdef PVI_HAVE_MAP_PHYS
	.map_phys = rio_map_phys,
	.unmap_phys = rio_unmap_phys,
#else
	.map_page = rio_map_page,
	.unmap_page = rio_unmap_page,
#endif
	.map_sg = rio_map_sg,
	.unmap_sg = rio_unmap_sg,
	.dma_supported = rio_dma_supported,
	.get_required_mask = rio_get_required_mask,
	.max_mapping_size = rio_max_mapping_size,
};
