// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the vectors of the cache (crates/pviommu/vectors/cache.txt) against cache.c and evict.c,
 * with the environment of host.c. tests/cache.c includes this file.
 */

/* Buffers that the vectors have mapped. */
static struct {
	u64 page;
	u32 pages;
	unsigned int direction;
	dma_addr_t address;
} held[64];

static unsigned int held_count;

static void vector_map(const char *line, u64 page, u32 pages, unsigned int direction,
		       const char *outcome)
{
	u64 hits = COUNTS->hits, full = COUNTS->full;
	const char *found = "miss";
	dma_addr_t address = map(page * PAGE_SIZE, (size_t)pages * PAGE_SIZE, direction);

	if (COUNTS->hits != hits)
		found = "hit";
	else if (COUNTS->full != full)
		found = "full";
	if (strcmp(found, outcome) || address == DMA_MAPPING_ERROR) {
		fprintf(stderr, "%s: %s\n", line, found);
		exit(1);
	}
	CHECK(held_count < 64);
	held[held_count].page = page;
	held[held_count].pages = pages;
	held[held_count].direction = direction;
	held[held_count++].address = address;
}

static void vector_unmap(u64 page, u32 pages, unsigned int direction)
{
	unsigned int i;

	/* Take the last match, because uncached mappings were made later. */
	for (i = held_count; i--;) {
		if (held[i].page == page && held[i].pages == pages &&
		    held[i].direction == direction)
			break;
	}
	CHECK(i < held_count);
	unmap(held[i].address);
	held[i] = held[--held_count];
}

/*
 * Checks that all mappings in the list were cached and have left, and that no other has. left is
 * the increase of the counter.
 */
static void vector_evicted(const char *line, char *list, u64 left)
{
	char *one;

	for (one = strtok(list, ",\n"); one && *one != '-'; one = strtok(NULL, ",\n")) {
		u64 page = strtoull(one, &one, 10);
		u32 pages = strtoul(one + 1, NULL, 10);
		struct pvi_mapping *mapping;

		left--;
		list_for_each_entry(mapping, &endpoint->shards[0].unused, list) {
			if (mapping->gpa == virt_to_phys(buffers) + page * PAGE_SIZE &&
			    mapping->pages == pages) {
				fprintf(stderr, "%s: still there\n", line);
				exit(1);
			}
		}
	}
	if (left) {
		fprintf(stderr, "%s: others left\n", line);
		exit(1);
	}
}

static void vectors(const char *directory)
{
	char line[256], words[256], list[128], outcome[16], path[4096];
	unsigned long long page, kept;
	unsigned int pages, direction;
	bool begun = false;
	FILE *file;

	snprintf(path, sizeof(path), "%s/cache.txt", directory);
	file = fopen(path, "r");
	if (!file) {
		perror(path);
		exit(2);
	}
	while (fgets(line, sizeof(line), file)) {
		u64 before = endpoint && begun ? COUNTS->forced + COUNTS->expired : 0;

		if (*line == '#' || *line == '\n')
			continue;
		if (sscanf(line, "case %255s limit=%u cycles=%u", words, &pages, &direction) == 3) {
			if (begun)
				end();
			begin_with_queue("vectors", true, 64);
			pvi_cache_pages = pages;
			pvi_cycles = direction;
			held_count = 0;
			begun = true;
		} else if (sscanf(line, "map %llu %u %u %15s", &page, &pages, &direction,
				  outcome) == 4) {
			vector_map(line, page, pages, direction, outcome);
		} else if (sscanf(line, "unmap %llu %u %u", &page, &pages, &direction) == 3) {
			vector_unmap(page, pages, direction);
		} else if (sscanf(line, "tick %127s", list) == 1) {
			pvi.cycle++;
			pvi_cache_expire(endpoint, pvi.cycle);
			vector_evicted(line, list, COUNTS->forced + COUNTS->expired - before);
		} else if (sscanf(line, "evict %127s", list) == 1) {
			pvi_cache_evict_share(endpoint);
			vector_evicted(line, list, COUNTS->forced + COUNTS->expired - before);
		} else if (sscanf(line, "holds %llu %llu", &kept, &page) == 2) {
			if (COUNTS->kept != kept || CACHED_PAGES != page) {
				fprintf(stderr, "%s: %llu, %llu\n", line,
					(unsigned long long)COUNTS->kept,
					(unsigned long long)CACHED_PAGES);
				exit(1);
			}
		} else {
			fprintf(stderr, "%s: unknown\n", line);
			exit(1);
		}
	}
	CHECK(begun);
	end();
	pvi_cycles = 3;
	fclose(file);
}
