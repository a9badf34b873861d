// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The IOTLB of a vhost-user back-end with the C library: a miss, the front-end's update, an access,
// and an invalidation. The front-end is a fake in this file.
//
//   cc iotlb.c $(pkg-config --cflags --libs ringfence) && ./a.out
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ringfence.h>

#define PAGE 4096u
#define FRONT_END 0x7f0000000000u

enum { MISS = 1, UPDATE = 2, INVALIDATE = 3 };

static void check(const char *what, int32_t status)
{
	if (status == RINGFENCE_STATUS_OK)
		return;
	fprintf(stderr, "%s: %s (%" PRId32 ")\n", what, ringfence_status_text(status), status);
	exit(1);
}

// Encodes a struct vhost_iotlb_msg.
static void encode(uint8_t message[32], uint64_t iova, uint64_t bytes, uint64_t user, uint8_t kind)
{
	memset(message, 0, 32);
	memcpy(message, &iova, 8);
	memcpy(message + 8, &bytes, 8);
	memcpy(message + 16, &user, 8);
	message[24] = RINGFENCE_READ | RINGFENCE_WRITE;
	message[25] = kind;
}

int main(void)
{
	unsigned char *memory = aligned_alloc(PAGE, 4 * PAGE);
	struct ringfence_iotlb_region region = { FRONT_END, 4 * PAGE, memory };
	struct ringfence_iotlb *iotlb;
	struct ringfence_iotlb_reader *reader;
	struct ringfence_iotlb_miss_request miss;
	struct ringfence_fault fault;
	uint8_t message[32];
	uint32_t result;
	char text[6] = "";
	int32_t status;

	memset(memory, 0, 4 * PAGE);
	memcpy(memory + PAGE + 16, "hello", 6);
	check("create", ringfence_iotlb_create(&region, 1, &iotlb));
	check("reader", ringfence_iotlb_reader_create(iotlb, &reader));

	status = ringfence_iotlb_read(reader, 0x10010, text, 6, &fault);
	printf("first read: %s\n", ringfence_status_text(status));
	check("miss", ringfence_iotlb_miss(iotlb, &fault, &miss));
	if (miss.action != RINGFENCE_MISS_KIND_SEND || miss.message[25] != MISS)
		return 1;
	encode(message, 0x10000, PAGE, FRONT_END + PAGE, UPDATE);
	check("update", ringfence_iotlb_receive(iotlb, message));
	check("reply", ringfence_iotlb_replied(iotlb, miss.token, true, &result));
	check("read", ringfence_iotlb_read(reader, 0x10010, text, 6, &fault));
	printf("after the update: %s\n", text);

	encode(message, 0x10000, PAGE, 0, INVALIDATE);
	check("invalidate", ringfence_iotlb_receive(iotlb, message));
	status = ringfence_iotlb_write(reader, 0x10010, "late", 5, &fault);
	printf("after the invalidation: %s\n", ringfence_status_text(status));
	if (status != RINGFENCE_STATUS_FAULT || memcmp(memory + PAGE + 16, "hello", 6))
		return 1;
	check("destroy reader", ringfence_iotlb_reader_destroy(&reader));
	check("destroy", ringfence_iotlb_destroy(&iotlb));
	free(memory);
	return 0;
}
