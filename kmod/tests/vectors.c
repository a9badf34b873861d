// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the vectors of the wire format (crates/pviommu/vectors) against wire.h, in user space: what
 * is well formed is built anew from its fields and has to come out the same, byte for byte; what is
 * malformed must be nothing that wire.h builds.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

#define LINE_BYTES (4 << 20)
#define SPACE "\n "

/* The document's offsets, on their own: wire.h must agree. */
#define AT_TYPE 8
#define AT_LEN 12
#define AT_WORDS 16

static unsigned long line_number;

static void fail(const char *name, const char *why)
{
	fprintf(stderr, "line %lu: %s: %s\n", line_number, name, why);
	exit(1);
}

static unsigned long long number_at(const unsigned char *bytes, size_t at, int count)
{
	unsigned long long value = 0;

	while (count--)
		value = value << 8 | bytes[at + count];
	return value;
}

static int nibble(int digit)
{
	return isdigit(digit) ? digit - '0' : tolower(digit) - 'a' + 10;
}

static size_t bytes_of(const char *name, const char *hex, unsigned char *bytes)
{
	size_t count = strlen(hex) / 2;
	size_t i;

	if (!strcmp(hex, "-"))
		return 0;
	if (strlen(hex) % 2 || strspn(hex, "0123456789abcdef") != strlen(hex))
		fail(name, "no bytes");
	for (i = 0; i < count; i++)
		bytes[i] = nibble(hex[2 * i]) << 4 | nibble(hex[2 * i + 1]);
	return count;
}

/* Whether wire.h builds a request of such a header in so many bytes. */
static int is_built(const unsigned char *bytes, size_t count, unsigned long pages_max)
{
	unsigned long long type, pages;

	if (count < AT_WORDS)
		return 0;
	type = number_at(bytes, AT_TYPE, 4);
	pages = number_at(bytes, AT_LEN, 4);
	if (type > PVI_UNMAP || !pages || pages > pages_max ||
	    count != pvi_request_bytes(type, pages))
		return 0;
	return type == PVI_UNMAP || number_at(bytes, AT_WORDS, 8) <= PVI_FROM_DEVICE;
}

static void build_again(const char *name, const unsigned char *bytes, size_t count)
{
	struct pvi_request *request = calloc(1, count);
	enum pvi_type type = number_at(bytes, AT_TYPE, 4);
	__u32 pages = number_at(bytes, AT_LEN, 4);
	size_t giovas = AT_WORDS + (type == PVI_MAP ? 8 : 0);
	enum pvi_direction direction = type == PVI_MAP ? number_at(bytes, AT_WORDS, 8) : 0;
	__u32 i;

	if (!request || pvi_pages_in(type, count) != pages)
		fail(name, "another number of pages");
	pvi_begin(request, number_at(bytes, 0, 8), type, direction, pages);
	for (i = 0; i < pages; i++) {
		unsigned long long giova = number_at(bytes, giovas + 8 * i, 8);

		if (type == PVI_MAP)
			pvi_set_map(request, pages, i, giova,
				    number_at(bytes, giovas + 8 * (pages + i), 8));
		else
			pvi_set_unmap(request, i, giova);
	}
	if (memcmp(request, bytes, count))
		fail(name, "built with other bytes");
	free(request);
}

static void check_layouts(void)
{
	if (sizeof(struct pvi_config) != 32 || offsetof(struct pvi_config, giova_last) != 8 ||
	    offsetof(struct pvi_config, pages_max) != 16 ||
	    offsetof(struct pvi_config, device_first) != 20 ||
	    offsetof(struct pvi_config, device_last) != 24 ||
	    offsetof(struct pvi_config, version) != 28)
		fail("configuration", "another layout");
	if (sizeof(struct pvi_event) != 24 || offsetof(struct pvi_event, access) != 8 ||
	    offsetof(struct pvi_event, reason) != 12 || offsetof(struct pvi_event, giova) != 16)
		fail("event", "another layout");
}

int main(int argc, char **argv)
{
	unsigned long pages_max = 0, built = 0, malformed = 0;
	unsigned char *bytes = malloc(LINE_BYTES);
	char *line = malloc(LINE_BYTES);
	FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;

	if (!file || !line || !bytes) {
		fprintf(stderr, "usage: %s requests.txt\n", argv[0]);
		return 2;
	}
	check_layouts();
	while (fgets(line, LINE_BYTES, file)) {
		char *name, *hex, *status, *config;
		size_t count;

		line_number++;
		if (*line == '#' || *line == '\n')
			continue;
		if (!strncmp(line, "config ", 7)) {
			config = strstr(line, " pages_max=");
			pages_max = config ? strtoul(config + 11, NULL, 0) : 0;
			if (!pages_max || pages_max > PVI_PAGES_LIMIT)
				fail("config", "no pages_max");
			continue;
		}
		name = strtok(line, SPACE);
		config = strtok(NULL, SPACE);
		hex = strtok(NULL, SPACE);
		status = strtok(NULL, SPACE);
		if (!config || !hex || !status)
			fail(name, "fields are missing");
		count = bytes_of(name, hex, bytes);
		if (strtoul(status, NULL, 0) > PVI_FAILED)
			fail(name, "an unknown status");
		if (strtoul(status, NULL, 0) == PVI_MALFORMED) {
			if (is_built(bytes, count, pages_max))
				fail(name, "malformed, and yet built");
			malformed++;
		} else {
			if (!is_built(bytes, count, pages_max))
				fail(name, "not malformed, and yet never built");
			build_again(name, bytes, count);
			built++;
		}
	}
	printf("%lu requests built, %lu that nobody builds\n", built, malformed);
	return !built || !malformed;
}
