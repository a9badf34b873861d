/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The wire format of docs/PVIOMMU.md, for the kernel and for user-space programs: layout of
 * requests, events and the configuration space.
 */
#ifndef PVIOMMU_WIRE_H
#define PVIOMMU_WIRE_H

#ifdef __KERNEL__
#include <linux/types.h>
#include <asm/byteorder.h>
#else
#include <endian.h>
#include <stddef.h>
#include <stdint.h>
#include <linux/types.h>
#define cpu_to_le32(x) htole32(x)
#define cpu_to_le64(x) htole64(x)
#define le32_to_cpu(x) le32toh(x)
#define le64_to_cpu(x) le64toh(x)
#endif

/* Virtio device id. */
#define PVI_DEVICE_TYPE		63
/* Version of the format. */
#define PVI_VERSION		2
/* Feature bit: the device has an event queue. */
#define PVI_F_EVENTS		0

#define PVI_PAGE_SHIFT		12
#define PVI_PAGE_BYTES		4096ULL
/* Highest valid pages_max of any device. */
#define PVI_PAGES_LIMIT		65536
/* Maximum number of devices in a configuration space, which must fit into one page. */
#define PVI_DEVICES_LIMIT	1016

/* Configuration space. */
struct pvi_config {
	__le64 giova_first;
	__le64 giova_last;
	__le32 pages_max;
	__le32 device_count;
	__le32 reserved;
	__le32 version;
	/* Devids in ascending order. */
	__le32 devices[];
};

/* Errors in a configuration space. The first one found is reported. */
enum pvi_config_error {
	PVI_CONFIG_OK = 0,
	PVI_CONFIG_VERSION,
	PVI_CONFIG_WINDOW,
	PVI_CONFIG_PAGES_MAX,
	PVI_CONFIG_DEVICES,
};

enum pvi_type {
	PVI_MAP = 0,
	PVI_UNMAP = 1,
};

/* The values of enum dma_data_direction. */
enum pvi_direction {
	PVI_BOTH = 0,
	PVI_TO_DEVICE = 1,
	PVI_FROM_DEVICE = 2,
};

enum pvi_status {
	PVI_OK = 0,
	PVI_MALFORMED = 1,
	PVI_NO_DEVICE = 2,
	PVI_BAD_GIOVA = 3,
	PVI_BAD_GPA = 4,
	PVI_MAPPED = 5,
	PVI_NOT_MAPPED = 6,
	PVI_NO_ROOM = 7,
	PVI_FAILED = 8,
};

/*
 * A request. The words of a map are the direction, all GIOVAs, all GPAs. Those of an unmap are the
 * GIOVAs.
 */
struct pvi_request {
	__le64 devid;
	__le32 type;
	__le32 len;
	__le64 words[];
};

/* An access that the device blocked. */
struct pvi_event {
	__le64 devid;
	__le32 access;
	__le32 reason;
	__le64 giova;
};

#define PVI_EVENT_READ		1
#define PVI_EVENT_WRITE		2
#define PVI_EVENT_NOT_MAPPED	1
#define PVI_EVENT_DIRECTION	2

/* Validates the fields of a configuration space, in CPU byte order. */
static inline enum pvi_config_error pvi_check_config(__u64 giova_first, __u64 giova_last,
						     __u32 pages_max, __u32 device_count,
						     __u32 version)
{
	if (version != PVI_VERSION)
		return PVI_CONFIG_VERSION;
	/* The window holds a page and excludes the last page, so no end address wraps. */
	if (giova_first & (PVI_PAGE_BYTES - 1) || giova_last < giova_first ||
	    giova_last - giova_first < PVI_PAGE_BYTES - 1 || giova_last >= -PVI_PAGE_BYTES)
		return PVI_CONFIG_WINDOW;
	if (!pages_max || pages_max > PVI_PAGES_LIMIT)
		return PVI_CONFIG_PAGES_MAX;
	if (device_count > PVI_DEVICES_LIMIT)
		return PVI_CONFIG_DEVICES;
	return PVI_CONFIG_OK;
}

/* Validates the list of devices, whose count is valid. */
static inline enum pvi_config_error pvi_check_devices(const __u32 *devices, __u32 count)
{
	__u32 i;

	for (i = 1; i < count; i++) {
		if (devices[i - 1] >= devices[i])
			return PVI_CONFIG_DEVICES;
	}
	return PVI_CONFIG_OK;
}

/* Returns true if the device wrote a whole event with known values. */
static inline int pvi_event_is_known(const struct pvi_event *event, size_t bytes)
{
	__u32 access, reason;

	if (bytes < sizeof(*event))
		return 0;
	access = le32_to_cpu(event->access);
	reason = le32_to_cpu(event->reason);
	return (access == PVI_EVENT_READ || access == PVI_EVENT_WRITE) &&
	       (reason == PVI_EVENT_NOT_MAPPED || reason == PVI_EVENT_DIRECTION);
}

static inline size_t pvi_request_bytes(enum pvi_type type, __u32 pages)
{
	size_t words = type == PVI_MAP ? 1 + 2 * (size_t)pages : pages;

	return sizeof(struct pvi_request) + words * sizeof(__le64);
}

/* Returns the maximum number of pages of such a request in this many bytes. */
static inline __u32 pvi_pages_in(enum pvi_type type, size_t bytes)
{
	if (bytes < pvi_request_bytes(type, 0))
		return 0;
	bytes -= pvi_request_bytes(type, 0);
	return bytes / (type == PVI_MAP ? 2 * sizeof(__le64) : sizeof(__le64));
}

/* Starts a request with this number of pages. Only a map uses the direction. */
static inline void pvi_begin(struct pvi_request *request, __u64 devid, enum pvi_type type,
			     enum pvi_direction direction, __u32 pages)
{
	request->devid = cpu_to_le64(devid);
	request->type = cpu_to_le32(type);
	request->len = cpu_to_le32(pages);
	if (type == PVI_MAP)
		request->words[0] = cpu_to_le64(direction);
}

/* Sets page number `index` of a map with `pages` pages. */
static inline void pvi_set_map(struct pvi_request *request, __u32 pages, __u32 index, __u64 giova,
			       __u64 gpa)
{
	request->words[1 + (size_t)index] = cpu_to_le64(giova);
	request->words[1 + (size_t)pages + index] = cpu_to_le64(gpa);
}

/* Sets page number `index` of an unmap. */
static inline void pvi_set_unmap(struct pvi_request *request, __u32 index, __u64 giova)
{
	request->words[index] = cpu_to_le64(giova);
}

#endif
