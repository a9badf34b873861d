// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the vectors of the wire format (crates/pviommu/vectors) against wire.h, in user space.
 *
 * Requests: a well-formed request is rebuilt from its fields and must be identical. wire.h must not
 * be able to build a malformed one. Configuration spaces and events must decode to the fields in
 * the vectors, or be rejected with the same fault.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

#define LINE_BYTES (4 << 20)
#define SPACE "\n "

/* Offsets from docs/PVIOMMU.md, independent of wire.h, which must agree. */
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

/* Returns true if wire.h can build a request with this header and this length. */
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

/* Opens a file of vectors. */
static FILE *vectors_in(const char *directory, const char *name)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	file = fopen(path, "r");
	if (!file) {
		perror(path);
		exit(2);
	}
	line_number = 0;
	return file;
}

/* Reads the next line that is neither empty nor a comment. */
static int next_line(FILE *file, char *line)
{
	while (fgets(line, LINE_BYTES, file)) {
		line_number++;
		if (*line != '#' && *line != '\n')
			return 1;
	}
	fclose(file);
	return 0;
}

/* Returns the next word of the line. */
static char *word(const char *name)
{
	char *found = strtok(NULL, SPACE);

	if (!found)
		fail(name, "fields are missing");
	return found;
}

/* Checks that the next word has this value. */
static void expect(const char *name, unsigned long long value)
{
	if (strtoull(word(name), NULL, 0) != value)
		fail(name, "says something else");
}

/* Checks that the next word is a list of these values, separated by commas; a dash is empty. */
static void expect_list(const char *name, const __u32 *values, __u32 count)
{
	char *at = word(name);
	__u32 i;

	if (!count && strcmp(at, "-"))
		fail(name, "lists devices");
	for (i = 0; i < count; i++) {
		if (strtoull(at, &at, 0) != values[i] || *at++ != (i + 1 < count ? ',' : 0))
			fail(name, "lists other devices");
	}
}

static void run_requests(const char *directory, char *line, unsigned char *bytes)
{
	FILE *file = vectors_in(directory, "requests.txt");
	unsigned long pages_max = 0, built = 0, malformed = 0;

	while (next_line(file, line)) {
		unsigned long status;
		char *name, *config;
		size_t count;

		if (!strncmp(line, "config ", 7)) {
			config = strstr(line, " pages_max=");
			pages_max = config ? strtoul(config + 11, NULL, 0) : 0;
			if (!pages_max || pages_max > PVI_PAGES_LIMIT)
				fail("config", "no pages_max");
			continue;
		}
		name = strtok(line, SPACE);
		word(name);
		count = bytes_of(name, word(name), bytes);
		status = strtoul(word(name), NULL, 0);
		if (status > PVI_FAILED)
			fail(name, "an unknown status");
		if (status == PVI_MALFORMED) {
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
}

static void run_configurations(const char *directory, char *line, unsigned char *bytes)
{
	static const char *const faults[] = {
		[PVI_CONFIG_OK] = "ok",
		[PVI_CONFIG_VERSION] = "version",
		[PVI_CONFIG_WINDOW] = "window",
		[PVI_CONFIG_PAGES_MAX] = "pages-max",
		[PVI_CONFIG_DEVICES] = "devices",
	};
	FILE *file = vectors_in(directory, "configurations.txt");
	unsigned long sound = 0, refused = 0;

	while (next_line(file, line)) {
		char *name = strtok(line, SPACE);
		static __u32 devices[PVI_DEVICES_LIMIT];
		const struct pvi_config *config = (const struct pvi_config *)bytes;
		size_t count = bytes_of(name, word(name), bytes);
		enum pvi_config_error fault;
		__u32 i, device_count;
		const char *says;

		if (count < sizeof(*config))
			fail(name, "another size");
		device_count = le32_to_cpu(config->device_count);
		fault = pvi_check_config(le64_to_cpu(config->giova_first),
					 le64_to_cpu(config->giova_last),
					 le32_to_cpu(config->pages_max), device_count,
					 le32_to_cpu(config->version));
		if (fault == PVI_CONFIG_OK) {
			if (count < sizeof(*config) + device_count * sizeof(*devices))
				fail(name, "another number of devices");
			for (i = 0; i < device_count; i++)
				devices[i] = le32_to_cpu(config->devices[i]);
			fault = pvi_check_devices(devices, device_count);
		}
		says = word(name);
		/* A valid space that no device writes must still be accepted. */
		if (strcmp(strcmp(says, "accepted") ? says : "ok", faults[fault]))
			fail(name, faults[fault]);
		if (fault != PVI_CONFIG_OK) {
			refused++;
			continue;
		}
		expect(name, le64_to_cpu(config->giova_first));
		expect(name, le64_to_cpu(config->giova_last));
		expect(name, le32_to_cpu(config->pages_max));
		expect_list(name, devices, device_count);
		sound++;
	}
	printf("%lu configurations read, %lu refused\n", sound, refused);
}

static void run_events(const char *directory, char *line, unsigned char *bytes)
{
	FILE *file = vectors_in(directory, "events.txt");
	unsigned long told = 0, dropped = 0;

	while (next_line(file, line)) {
		char *name = strtok(line, SPACE);
		size_t count = bytes_of(name, word(name), bytes);
		struct pvi_event event = { 0 };
		int known;

		if (count > sizeof(event))
			fail(name, "another size");
		/* Fields beyond the event's length keep these valid values. */
		event.access = cpu_to_le32(PVI_EVENT_READ);
		event.reason = cpu_to_le32(PVI_EVENT_NOT_MAPPED);
		memcpy(&event, bytes, count);
		known = pvi_event_is_known(&event, count);
		if (strcmp(word(name), known ? "ok" : "dropped"))
			fail(name, known ? "known" : "dropped");
		if (!known) {
			dropped++;
			continue;
		}
		expect(name, le64_to_cpu(event.devid));
		expect(name, le32_to_cpu(event.access));
		expect(name, le32_to_cpu(event.reason));
		expect(name, le64_to_cpu(event.giova));
		told++;
	}
	printf("%lu events read, %lu dropped\n", told, dropped);
}

int main(int argc, char **argv)
{
	unsigned char *bytes = malloc(LINE_BYTES);
	char *line = malloc(LINE_BYTES);

	if (argc != 2 || !line || !bytes) {
		fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
		return 2;
	}
	run_requests(argv[1], line, bytes);
	run_configurations(argv[1], line, bytes);
	run_events(argv[1], line, bytes);
	return 0;
}
