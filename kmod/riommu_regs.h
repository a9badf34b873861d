/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Registers and table entries of docs/RIOMMU-DEVICE.md. For the kernel and for user space.
 */
#ifndef RIOMMU_REGS_H
#define RIOMMU_REGS_H

#include <linux/types.h>

#define RIO_VENDOR		0x1af4
#define RIO_DEVICE		0x10f7

#define RIO_REG_ID		0x00
#define RIO_REG_VERSION		0x04
#define RIO_REG_CAP		0x08
#define RIO_REG_ROOT		0x10
#define RIO_REG_CTRL		0x18
#define RIO_REG_STS		0x1c
#define RIO_REG_INV		0x20
#define RIO_REG_FQ		0x28
#define RIO_REG_FQ_HEAD		0x30
#define RIO_REG_FQ_TAIL		0x34
#define RIO_REG_DEV		0x400
/* Size of the registers, with those of RIO_DEVICES_MAX devices. */
#define RIO_REG_BYTES		0x1000

#define RIO_ID			0x474e4952
#define RIO_MAJOR(version)	((version) >> 16)
#define RIO_CAP_DEVICES(cap)	((__u32)(cap) & 0xffff)
#define RIO_CAP_QUEUE(cap)	((__u32)((cap) >> 16) & 0x1f)
#define RIO_CAP_PREFETCH	0x1000000
#define RIO_DEVICES_MAX		768

#define RIO_CTRL_TRANSLATE	0x1
#define RIO_CTRL_FAULTS		0x2
#define RIO_CTRL_INTERRUPT	0x4
/* All of them. */
#define RIO_CTRL_RUN		0x7

#define RIO_STS_OVERFLOW	0x1
#define RIO_STS_QUEUE		0x2
#define RIO_STS_INVALIDATION	0x4

/* Reasons of faults. */
#define RIO_FAULT_BLOCKED		1
#define RIO_FAULT_ROOT_NOT_PRESENT	2
#define RIO_FAULT_CONTEXT_NOT_PRESENT	3
#define RIO_FAULT_CONTEXT_INVALID	4
#define RIO_FAULT_TABLE_ACCESS		5
#define RIO_FAULT_RESERVED_BIT		6
#define RIO_FAULT_RING_BEYOND_DEVICE	7
#define RIO_FAULT_SLOT_BEYOND_RING	8
#define RIO_FAULT_NOT_VALID		9
#define RIO_FAULT_READ_DENIED		10
#define RIO_FAULT_WRITE_DENIED		11
#define RIO_FAULT_BEYOND_BUFFER		12
#define RIO_FAULT_BAD_LENGTH		13

#define RIO_SLOTS_MAX		((1U << 18) - 1)
#define RIO_BUFFER_MAX		((1ULL << 30) - 1)
#define RIO_READ		1
#define RIO_WRITE		2

/* An entry of any table or of the fault queue. */
struct rio_entry {
	__le64 first;
	__le64 second;
};

static inline __u64 rio_inv_ring(__u16 device, __u16 ring)
{
	return device | (__u64)ring << 16;
}

static inline __u64 rio_inv_device(__u16 device)
{
	return device | 1ULL << 32;
}

static inline __u64 rio_inv_all(void)
{
	return 2ULL << 32;
}

/* The queue has 2^size entries. */
static inline __u64 rio_fq(__u64 address, unsigned int size)
{
	return address | size;
}

static inline __u64 rio_root_first(__u64 contexts)
{
	return contexts | 1;
}

static inline __u64 rio_context_first(__u64 rdevice)
{
	return rdevice | 3 << 2 | 1;
}

static inline __u64 rio_context_second(__u16 domain)
{
	return (__u64)domain << 8;
}

/* direction is RIO_READ, RIO_WRITE or both. */
static inline __u64 rio_rpte_second(__u64 bytes, unsigned int direction)
{
	return bytes | (__u64)direction << 30 | 1ULL << 32;
}

static inline __u32 rio_rpte_bytes(__u64 second)
{
	return second & ((1U << 30) - 1);
}

#define RIO_IOVA_SLOT_SHIFT	30

static inline __u64 rio_iova(__u16 ring, __u32 slot, __u32 offset)
{
	return (__u64)ring << 48 | (__u64)slot << RIO_IOVA_SLOT_SHIFT | offset;
}

static inline __u16 rio_iova_ring(__u64 iova)
{
	return iova >> 48;
}

static inline __u32 rio_iova_slot(__u64 iova)
{
	return iova >> RIO_IOVA_SLOT_SHIFT & ((1U << 18) - 1);
}

static inline __u32 rio_iova_offset(__u64 iova)
{
	return iova & ((1U << 30) - 1);
}

static inline __u16 rio_fault_device(__u64 second)
{
	return second & 0xffff;
}

static inline int rio_fault_is_write(__u64 second)
{
	return second >> 16 & 1;
}

static inline __u8 rio_fault_reason(__u64 second)
{
	return second >> 24 & 0xff;
}

#endif
