// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the cache of the module pviommu-as-published in user space, with the environment of host.c:
 * the device gets the accesses that the PVIOMMU paper's cache allows.
 */
#define PVI_KEY_HEADER "as_published.h"
#define AS_PUBLISHED true
#include "host.c"
#include "attacks.c"

int main(void)
{
	buffers = aligned_alloc(PAGE_SIZE, BUFFERS);
	if (!buffers)
		return 2;
	attacks();
	free(buffers);
	printf("all as it should be\n");
	return 0;
}
