// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A driver of a network device with the C library: it maps receive buffers, the device writes
// them, and the driver unmaps them. The IOMMU is a fake with an IOTLB of one entry, so that an
// unmap without an invalidation would leave the device its access.
//
//   cc nic.c $(pkg-config --cflags --libs ringfence) && ./a.out
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ringfence.h>

#define MEMORY_BYTES (1u << 20)
#define PAGE 4096u
#define NIC 0x18 // bus 0, device 3, function 0

// The machine: physical memory from address 0, with table frames in its upper half.
struct machine {
	unsigned char *memory;
	uint64_t next_frame;
	uint64_t free_frames[128];
	unsigned free_count;
	// The context entry of the device and the IOTLB.
	struct ringfence_dma_attachment nic;
	uint64_t cached_page, cached_phys;
	bool cached;
	unsigned invalidations;
	unsigned released;
};

static void check(const char *what, int32_t status)
{
	if (status == RINGFENCE_STATUS_OK)
		return;
	fprintf(stderr, "%s: %s (%" PRId32 ")\n", what, ringfence_status_text(status), status);
	exit(1);
}

static void expect(const char *what, bool holds)
{
	printf("%s: %s\n", what, holds ? "yes" : "NO");
	if (!holds)
		exit(1);
}

// The port to memory.

static void *address(void *context, uint64_t phys, uint64_t bytes)
{
	struct machine *machine = context;

	if (bytes > MEMORY_BYTES || phys > MEMORY_BYTES - bytes)
		return NULL;
	return machine->memory + phys;
}

static int32_t alloc_frame(void *context, uint64_t *frame)
{
	struct machine *machine = context;

	if (machine->free_count) {
		*frame = machine->free_frames[--machine->free_count];
		return 0;
	}
	if (machine->next_frame == MEMORY_BYTES)
		return -1;
	*frame = machine->next_frame;
	machine->next_frame += PAGE;
	return 0;
}

static void free_frame(void *context, uint64_t frame)
{
	struct machine *machine = context;

	machine->free_frames[machine->free_count++] = frame;
}

// The port to the IOMMU. A real one writes a descriptor to the invalidation queue.

static int32_t submit(void *context, const struct ringfence_invalidation *request, uint64_t *ticket)
{
	struct machine *machine = context;

	(void)request; // The fake drops its only entry at each request.
	machine->cached = false;
	*ticket = ++machine->invalidations;
	return 0;
}

static int32_t poll(void *context, uint64_t ticket)
{
	(void)context;
	(void)ticket;
	return 1;
}

static void disconnect(void *context, uint16_t requester)
{
	struct machine *machine = context;

	(void)requester;
	machine->nic.root = 0;
}

static void released(void *context, uint64_t cookie)
{
	struct machine *machine = context;

	(void)cookie;
	machine->released++;
}

// The device writes `bytes` bytes, and the IOMMU translates: the IOTLB first, then four levels.

static bool device_write(struct machine *machine, uint64_t iova, const void *bytes, size_t count)
{
	uint64_t entry, at = machine->nic.root;

	if (!at)
		return false;
	if (!machine->cached || machine->cached_page != iova / PAGE) {
		for (int level = 3; level >= 0; level--) {
			at += (iova >> (12 + 9 * level) & 511) * 8;
			memcpy(&entry, machine->memory + at, 8);
			if (!(entry & RINGFENCE_WRITE))
				return false;
			at = entry & 0xffffffffff000;
		}
		machine->cached = true;
		machine->cached_page = iova / PAGE;
		machine->cached_phys = at;
	}
	memcpy(machine->memory + machine->cached_phys + iova % PAGE, bytes, count);
	return true;
}

static void one_packet(struct machine *machine, struct ringfence_dma *dma)
{
	struct ringfence_dma_mapping mapping;
	const uint64_t buffer = 0x5040;
	uint64_t cookie = 0;

	check("map", ringfence_dma_map(dma, machine->nic.token, buffer, 1500,
				       RINGFENCE_DMA_DIRECTION_FROM_DEVICE, 7, &mapping));
	expect("the device writes the mapped buffer",
	       device_write(machine, mapping.iova, "packet", 6) &&
		       memcmp(machine->memory + buffer, "packet", 6) == 0);
	check("unmap", ringfence_dma_unmap(dma, mapping.token, &cookie));
	expect("the buffer is released", cookie == 7);
	expect("a late write is stopped", !device_write(machine, mapping.iova, "late", 4));
	expect("a second unmap is an error",
	       ringfence_dma_unmap(dma, mapping.token, NULL) == RINGFENCE_STATUS_STALE_TOKEN);
}

static void one_burst(struct machine *machine, struct ringfence_dma *dma)
{
	struct ringfence_dma_mapping mappings[32];
	unsigned before = machine->invalidations;

	for (unsigned i = 0; i < 32; i++)
		check("map", ringfence_dma_map(dma, machine->nic.token, i * PAGE, 1500,
					       RINGFENCE_DMA_DIRECTION_FROM_DEVICE, i,
					       &mappings[i]));
	for (unsigned i = 0; i < 32; i++)
		if (ringfence_dma_unmap(dma, mappings[i].token, NULL) != RINGFENCE_STATUS_WITHHELD)
			exit(1);
	expect("the layer withholds the burst's buffers", machine->released == 0);
	check("end of burst", ringfence_dma_end_burst(dma, machine->nic.token,
						      RINGFENCE_DMA_DIRECTION_FROM_DEVICE));
	printf("32 buffers released after %u invalidation(s)\n", machine->invalidations - before);
	if (machine->released != 32)
		exit(1);
}

int main(void)
{
	struct machine machine = { .next_frame = MEMORY_BYTES / 2 };
	struct ringfence_dma_ports ports = {
		.size = sizeof ports,
		.memory = {
			.size = sizeof ports.memory,
			.context = &machine,
			.address = address,
			.alloc_frame = alloc_frame,
			.free_frame = free_frame,
		},
		.context = &machine,
		.submit = submit,
		.poll = poll,
		.disconnect = disconnect,
		.released = released,
		.poll_limit = 1000,
	};
	struct ringfence_dma_options options = {
		.size = sizeof options,
		.levels = 4,
		.first_page = 1,
		.last_page = 0xfffff,
	};

	if (ringfence_abi_version() >> 16 != RINGFENCE_ABI_VERSION >> 16)
		return 1;
	machine.memory = calloc(1, MEMORY_BYTES);
	for (uint32_t policy = RINGFENCE_DMA_POLICY_STRICT; policy <= RINGFENCE_DMA_POLICY_BURST;
	     policy++) {
		struct ringfence_dma *dma;

		options.policy = policy;
		check("create", ringfence_dma_create(&ports, &options, &dma));
		check("attach", ringfence_dma_attach(dma, NIC, UINT32_MAX, &machine.nic));
		if (policy == RINGFENCE_DMA_POLICY_STRICT)
			one_packet(&machine, dma);
		else
			one_burst(&machine, dma);
		check("detach", ringfence_dma_detach(dma, machine.nic.token, false));
		check("destroy", ringfence_dma_destroy(&dma));
	}
	expect("all table frames are back",
	       machine.free_count == (machine.next_frame - MEMORY_BYTES / 2) / PAGE);
	free(machine.memory);
	return 0;
}
