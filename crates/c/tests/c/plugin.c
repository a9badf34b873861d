// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Drives examples/linux_iova.c as its benchmark does: no two ranges overlap, each is aligned to its
// size, and freed addresses are used again.
#include "../../examples/linux_iova.c"

#define LIVE 512

static unsigned char used[LAST_PAGE + 1];

static int mark(uint64_t pfn, unsigned pages, unsigned char value)
{
	for (uint64_t page = pfn; page < pfn + pages; page++) {
		if (page > LAST_PAGE || used[page] == value)
			return 1;
		used[page] = value;
	}
	return 0;
}

int main(void)
{
	const struct iova_impl *plugin = &iova_impl;
	uint64_t pfn[LIVE], lowest = UINT64_MAX, highest = 0, seed = 1;
	unsigned pages[LIVE] = { 0 };
	void *domain = plugin->create();

	if (!domain)
		return 1;
	plugin->thread_init(1);
	for (unsigned step = 0; step < 20000; step++) {
		unsigned slot;

		seed = seed * 6364136223846793005u + 1442695040888963407u;
		slot = seed >> 33 & (LIVE - 1);
		if (pages[slot]) {
			if (mark(pfn[slot], pages[slot], 0))
				return 2;
			plugin->free(domain, pfn[slot], pages[slot]);
			pages[slot] = 0;
			continue;
		}
		pages[slot] = 1 + (seed >> 48 & 15);
		pfn[slot] = plugin->alloc(domain, pages[slot]);
		if (!pfn[slot] || mark(pfn[slot], pages[slot], 1))
			return 3;
		for (unsigned size = 1; size < pages[slot]; size *= 2)
			if (pfn[slot] % (size * 2))
				return 4;
		if (pfn[slot] < lowest)
			lowest = pfn[slot];
		if (pfn[slot] > highest)
			highest = pfn[slot];
	}
	// 512 ranges of at most 16 pages, and what the caches keep.
	if (highest - lowest > 4 * LIVE * 16 + 65536)
		return 5;
	printf("%s\n", plugin->name);
	plugin->destroy(domain);
	return 0;
}
