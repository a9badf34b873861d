// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The binary interface, version 1.0, on 64-bit systems: sizes, offsets and numbers that a program
// has compiled in. A change here breaks programs: it needs another major number.
#include <stddef.h>
#include <stdio.h>

#include <ringfence.h>

#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)
#define AT(type, field, offset) \
	_Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
#define IS(name, number) _Static_assert((name) == (number), #name)

SIZE(ringfence_iova_stats, 32);
AT(ringfence_iova_stats, size, 0);
AT(ringfence_iova_stats, footprint, 8);
AT(ringfence_iova_stats, ranges, 16);
AT(ringfence_iova_stats, pages, 24);

SIZE(ringfence_memory, 56);
AT(ringfence_memory, size, 0);
AT(ringfence_memory, context, 8);
AT(ringfence_memory, address, 16);
AT(ringfence_memory, alloc_frame, 24);
AT(ringfence_memory, free_frame, 32);
AT(ringfence_memory, write_back, 40);
AT(ringfence_memory, drain, 48);

SIZE(ringfence_translation, 24);
AT(ringfence_translation, phys, 0);
AT(ringfence_translation, page_bytes, 8);
AT(ringfence_translation, permissions, 16);

SIZE(ringfence_invalidation, 24);
AT(ringfence_invalidation, kind, 0);
AT(ringfence_invalidation, domain, 4);
AT(ringfence_invalidation, requester, 6);
AT(ringfence_invalidation, iova, 8);
AT(ringfence_invalidation, bytes, 16);

SIZE(ringfence_dma_ports, 112);
AT(ringfence_dma_ports, size, 0);
AT(ringfence_dma_ports, memory, 8);
AT(ringfence_dma_ports, context, 64);
AT(ringfence_dma_ports, submit, 72);
AT(ringfence_dma_ports, poll, 80);
AT(ringfence_dma_ports, disconnect, 88);
AT(ringfence_dma_ports, released, 96);
AT(ringfence_dma_ports, poll_limit, 104);

SIZE(ringfence_dma_options, 40);
AT(ringfence_dma_options, size, 0);
AT(ringfence_dma_options, policy, 8);
AT(ringfence_dma_options, levels, 12);
AT(ringfence_dma_options, first_page, 16);
AT(ringfence_dma_options, last_page, 24);
AT(ringfence_dma_options, burst_longest, 32);
AT(ringfence_dma_options, burst_most, 36);

SIZE(ringfence_dma_attachment, 24);
AT(ringfence_dma_attachment, token, 0);
AT(ringfence_dma_attachment, root, 8);
AT(ringfence_dma_attachment, domain, 16);

SIZE(ringfence_dma_mapping, 16);
AT(ringfence_dma_mapping, token, 0);
AT(ringfence_dma_mapping, iova, 8);

SIZE(ringfence_iotlb_region, 24);
AT(ringfence_iotlb_region, user, 0);
AT(ringfence_iotlb_region, bytes, 8);
AT(ringfence_iotlb_region, host, 16);

SIZE(ringfence_fault, 16);
AT(ringfence_fault, iova, 0);
AT(ringfence_fault, access, 8);
AT(ringfence_fault, kind, 12);

SIZE(ringfence_iotlb_miss_request, 48);
AT(ringfence_iotlb_miss_request, token, 0);
AT(ringfence_iotlb_miss_request, action, 8);
AT(ringfence_iotlb_miss_request, message, 16);

_Static_assert(sizeof(ringfence_status) == 4, "a status has 32 bits");

IS(RINGFENCE_ABI_VERSION, 0x10000);
IS(RINGFENCE_READ, 1);
IS(RINGFENCE_WRITE, 2);
IS(RINGFENCE_IOVA_TRUSTED, 1);
IS(RINGFENCE_STATUS_OK, 0);
IS(RINGFENCE_STATUS_WITHHELD, 1);
IS(RINGFENCE_STATUS_NULL_POINTER, -1);
IS(RINGFENCE_STATUS_STRUCT_SIZE, -2);
IS(RINGFENCE_STATUS_INVALID_ARGUMENT, -3);
IS(RINGFENCE_STATUS_MISALIGNED, -4);
IS(RINGFENCE_STATUS_STALE_TOKEN, -5);
IS(RINGFENCE_STATUS_BUSY, -6);
IS(RINGFENCE_STATUS_INTERNAL, -7);
IS(RINGFENCE_STATUS_OUT_OF_MEMORY, -8);
IS(RINGFENCE_STATUS_EXHAUSTED, -16);
IS(RINGFENCE_STATUS_NEEDS_FLUSH, -17);
IS(RINGFENCE_STATUS_NOT_ALLOCATED, -18);
IS(RINGFENCE_STATUS_OUT_OF_FRAMES, -32);
IS(RINGFENCE_STATUS_TABLE_MEMORY, -33);
IS(RINGFENCE_STATUS_ALREADY_MAPPED, -34);
IS(RINGFENCE_STATUS_NOT_MAPPED, -35);
IS(RINGFENCE_STATUS_BEYOND_WIDTH, -36);
IS(RINGFENCE_STATUS_WOULD_SPLIT, -37);
IS(RINGFENCE_STATUS_CORRUPT, -38);
IS(RINGFENCE_STATUS_INVALIDATION, -48);
IS(RINGFENCE_STATUS_ALREADY_UNMAPPED, -49);
IS(RINGFENCE_STATUS_BURST_FULL, -50);
IS(RINGFENCE_STATUS_NOT_ATTACHED, -51);
IS(RINGFENCE_STATUS_ALREADY_ATTACHED, -52);
IS(RINGFENCE_STATUS_MAPPINGS_LIVE, -53);
IS(RINGFENCE_STATUS_TOO_MANY, -54);
IS(RINGFENCE_STATUS_ROLLBACK_FAILED, -55);
IS(RINGFENCE_STATUS_FAULT, -64);
IS(RINGFENCE_STATUS_BAD_MESSAGE, -65);
IS(RINGFENCE_STATUS_NOT_SHARED, -66);
IS(RINGFENCE_STATUS_NOT_A_MISS, -67);
IS(RINGFENCE_IOVA_KIND_MAGAZINES, 0);
IS(RINGFENCE_IOVA_KIND_LINUX_RCACHE, 1);
IS(RINGFENCE_IOVA_KIND_CACHED_TREE, 2);
IS(RINGFENCE_IOVA_KIND_EIOVAR, 3);
IS(RINGFENCE_IOVA_KIND_FREEBSD_TREE, 4);
IS(RINGFENCE_IOVA_KIND_BITMAP, 5);
IS(RINGFENCE_INVALIDATION_KIND_LEAVES, 0);
IS(RINGFENCE_INVALIDATION_KIND_PAGES, 1);
IS(RINGFENCE_INVALIDATION_KIND_DOMAIN, 2);
IS(RINGFENCE_INVALIDATION_KIND_GLOBAL, 3);
IS(RINGFENCE_INVALIDATION_KIND_CONTEXT, 4);
IS(RINGFENCE_DMA_POLICY_STRICT, 0);
IS(RINGFENCE_DMA_POLICY_BURST, 1);
IS(RINGFENCE_DMA_DIRECTION_TO_DEVICE, 0);
IS(RINGFENCE_DMA_DIRECTION_FROM_DEVICE, 1);
IS(RINGFENCE_DMA_DIRECTION_BIDIRECTIONAL, 2);
IS(RINGFENCE_FAULT_KIND_NOT_PRESENT, 0);
IS(RINGFENCE_FAULT_KIND_READ_DENIED, 1);
IS(RINGFENCE_FAULT_KIND_WRITE_DENIED, 2);
IS(RINGFENCE_FAULT_KIND_BEYOND_WIDTH, 3);
IS(RINGFENCE_FAULT_KIND_BAD_LENGTH, 4);
IS(RINGFENCE_FAULT_KIND_BLOCKED, 5);
IS(RINGFENCE_MISS_KIND_SEND, 0);
IS(RINGFENCE_MISS_KIND_WAIT, 1);
IS(RINGFENCE_MISS_KIND_PRESENT, 2);
IS(RINGFENCE_MISS_RESULT_PRESENT, 0);
IS(RINGFENCE_MISS_RESULT_INVALIDATED, 1);
IS(RINGFENCE_MISS_RESULT_REFUSED, 2);

int main(void)
{
	if (ringfence_abi_version() != RINGFENCE_ABI_VERSION)
		return 1;
	for (int status = -70; status <= 3; status++)
		printf("%d %s\n", status, ringfence_status_text(status));
	return 0;
}
