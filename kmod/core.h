/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The core: shared by pviommu and riommu, which link core_bind.o and core_refuse.o, and include
 * core_ops.h in one file. Each adds an engine, which translates the addresses of devices. pooldma
 * uses only core_ops.h, and the macros and inline functions below.
 *
 *   core_bind   selection of PCI devices, binding, unbinding, unplugging
 *   core_refuse devices and machines that the engines cannot handle, refusal of suspend
 *   core_ops    the dma_map_ops that drivers call, over the functions of the engine
 */
#ifndef CORE_H
#define CORE_H

#include <linux/bits.h>
#include <linux/dma-map-ops.h>
#include <linux/list.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>

#if !defined(CONFIG_X86_64) || !defined(CONFIG_ARCH_HAS_DMA_OPS)
/* The module does no cache maintenance, and set_dma_ops() needs CONFIG_ARCH_HAS_DMA_OPS. */
#error "requires x86_64 (DMA-coherent) and CONFIG_ARCH_HAS_DMA_OPS, which CONFIG_XEN selects"
#endif

/* Flags of a device: bits of an array since 7.0, bit fields before that. */
#ifdef CORE_HAVE_DEVICE_FLAGS
#define core_get_skip_sync(dev)		dev_dma_skip_sync(dev)
#define core_set_skip_sync(dev, on)	dev_assign_dma_skip_sync(dev, on)
#else
#define core_get_skip_sync(dev)		((dev)->dma_skip_sync)
#define core_set_skip_sync(dev, on)	((dev)->dma_skip_sync = (on))
#endif

/* Since 7.2: no sync follows, so the device must reach the buffer. */
#ifndef DMA_ATTR_REQUIRE_COHERENT
#define DMA_ATTR_REQUIRE_COHERENT	BIT(12)
#endif

struct core_engine;

/* An IOMMU, in the structure of its engine. */
struct core_iommu {
	const struct core_engine *engine;
	/* The device whose driver the engine is, for messages. */
	struct device *dev;
	/*
	 * Protects the list of endpoints and their devices. Taken in sleepable context, never held
	 * during a request to the host. Endpoints stay in the list until the IOMMU is removed.
	 */
	struct mutex mutex;
	struct list_head endpoints;
	struct notifier_block binding;
};

/*
 * A PCI address whose DMA an engine maps: the first member of the engine's endpoint. It outlives an
 * unplugged device: addresses that the device may still reach must not be reused for the next
 * device there.
 */
struct core_endpoint {
	struct list_head list;
	struct core_iommu *iommu;
	/* The device, or NULL. Without a device, no mapping is in use. */
	struct pci_dev *pdev;
	/* Unplugged devices with orphaned mappings. They keep our dma_map_ops. */
	struct list_head unplugged;
	/* Segment in bits 16 to 31, requester ID in bits 0 to 15. */
	u32 devid;
	/* PCI address. */
	char name[16];
	/* A copy of the engine's operations. container_of() on it finds the endpoint. */
	const struct dma_map_ops ops;
};

/* All functions are called in sleepable context. Optional ones may be NULL. */
struct core_engine {
	/* For messages. */
	const char *name;
	const struct dma_map_ops *ops;
	/* Size of the engine's endpoint. */
	size_t endpoint_bytes;
	/* True if devices reach whole pages, also beside a buffer. */
	bool maps_pages;
	/* Returns true if the IOMMU translates for the device. False for the IOMMU itself. */
	bool (*translates)(struct core_iommu *iommu, struct pci_dev *pdev);
	/* Prepares an endpoint, whose memory is zero except for `core`. */
	int (*init)(struct core_endpoint *endpoint);
	/* The reverse of init. The IOMMU no longer translates. */
	void (*free)(struct core_endpoint *endpoint);
	/* Optional. A driver's probe failed. Its allocations are freed after this call. */
	void (*not_bound)(struct core_endpoint *endpoint);
	/*
	 * The driver has unbound, or the device is unplugged. On return, the device reaches no
	 * memory. Mappings that the driver has not unmapped become orphans.
	 */
	void (*unbound)(struct core_endpoint *endpoint);
	/* Number of mappings of unbound drivers that their owners have not unmapped yet. */
	u64 (*count_orphans)(struct core_endpoint *endpoint);
	/* Optional. No driver is bound, and none will be. The endpoint's work must end. */
	void (*stop)(struct core_endpoint *endpoint);
	/* Optional. The device's driver is about to be unbound, because the IOMMU is removed. */
	void (*will_release)(struct core_iommu *iommu, struct pci_dev *pdev);
};

static inline u32 core_devid(struct pci_dev *pdev)
{
	return (u32)pci_domain_nr(pdev->bus) << 16 | pci_dev_id(pdev);
}

/* The endpoint of a device that has our operations. */
static __always_inline struct core_endpoint *core_endpoint_of(struct device *dev)
{
	/* Not get_dma_ops(), which serves devices without operations too. */
	return container_of(dev->dma_ops, struct core_endpoint, ops);
}

/* Low bits that an address has in common with its buffer. */
static __always_inline u32 core_min_align_mask(struct device *dev)
{
	/* Not dma_get_min_align_mask(): each PCI device has parameters, from pci_device_add(). */
	return dev->dma_parms->min_align_mask;
}

/* Memory of another device does not belong to the guest, so an IOMMU does not reach it. */
static __always_inline bool core_is_peer(const struct page *page)
{
#ifdef CONFIG_ZONE_DEVICE
	/* One bit, which no other zone has, if the kernel has all zones. */
	return unlikely(page_zonenum(page) & ZONE_DEVICE) && is_pci_p2pdma_page(page);
#else
	return false;
#endif
}

typedef dma_addr_t (*core_map_function)(struct device *dev, phys_addr_t phys, size_t size,
					enum dma_data_direction direction, unsigned long attrs);
typedef void (*core_unmap_list_function)(struct device *dev, struct scatterlist *list, int nents,
					 enum dma_data_direction direction, unsigned long attrs);

/*
 * Maps a list entry by entry, each of at most `most` bytes. Inlined, so that the calls are direct.
 * Returns the number of entries, or an error of dma_map_sgtable(): only after -ENOMEM may a retry
 * succeed.
 */
static __always_inline int core_map_each(struct device *dev, struct scatterlist *list, int nents,
					 enum dma_data_direction direction, unsigned long attrs,
					 size_t most, core_map_function map,
					 core_unmap_list_function unmap_list)
{
	struct scatterlist *entry;
	int err = 0;
	int i;

	for_each_sg(list, entry, nents, i) {
		if (!entry->length || entry->length > most)
			err = -EINVAL;
		else if (core_is_peer(sg_page(entry)))
			err = -EREMOTEIO;
		else
			sg_dma_address(entry) = map(dev, sg_phys(entry), entry->length, direction,
						    attrs);
		if (!err && sg_dma_address(entry) == DMA_MAPPING_ERROR)
			err = -ENOMEM;
		if (err) {
			unmap_list(dev, list, i, direction, attrs);
			return err;
		}
		sg_dma_len(entry) = entry->length;
	}
	return nents;
}

/* core_refuse.c */
extern const struct dma_map_ops core_refusing_ops;
int core_check_machine(struct device *dev);
const char *core_refusal(struct core_iommu *iommu, struct pci_dev *pdev);
int core_refuse_sleep(struct core_iommu *iommu);

/* core_bind.c */
void core_init(struct core_iommu *iommu, const struct core_engine *engine, struct device *dev);
int core_start(struct core_iommu *iommu);
void core_stop(struct core_iommu *iommu);
void core_free(struct core_iommu *iommu);

#endif
