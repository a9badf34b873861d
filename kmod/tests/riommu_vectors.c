// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the encodings of crates/riommu-device/vectors/encodings.txt against riommu_regs.h, in user
 * space. Prints the number of encodings.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "riommu_regs.h"

#define FIELDS 4

static unsigned long long word_of(const char *text)
{
	return text ? strtoull(text, NULL, 0) : 0;
}

/* Encodes a line's fields. Returns the number of words, or 0 for an unknown kind. */
static int encode(const char *kind, const unsigned long long *field, unsigned long long *word)
{
	if (!strcmp(kind, "root")) {
		word[0] = rio_root_first(field[0]);
		return 2;
	}
	if (!strcmp(kind, "context")) {
		word[0] = rio_context_first(field[1]);
		word[1] = rio_context_second(field[0]);
		return 2;
	}
	if (!strcmp(kind, "rdevice") || !strcmp(kind, "rring")) {
		word[0] = field[0];
		word[1] = field[1];
		return 2;
	}
	if (!strcmp(kind, "rpte")) {
		word[0] = field[0];
		word[1] = rio_rpte_second(field[1], field[2]);
		return 2;
	}
	word[0] = 0;
	if (!strcmp(kind, "riova"))
		word[0] = rio_iova(field[0], field[1], field[2]);
	else if (!strcmp(kind, "invalidate-ring"))
		word[0] = rio_inv_ring(field[0], field[1]);
	else if (!strcmp(kind, "invalidate-device"))
		word[0] = rio_inv_device(field[0]);
	else if (!strcmp(kind, "invalidate-all"))
		word[0] = rio_inv_all();
	else if (!strcmp(kind, "fq"))
		word[0] = rio_fq(field[0], field[1]);
	else if (!strcmp(kind, "ctrl"))
		word[0] = field[0] * RIO_CTRL_TRANSLATE | field[1] * RIO_CTRL_FAULTS |
			  field[2] * RIO_CTRL_INTERRUPT;
	else
		return 0;
	return 1;
}

/* The driver decodes what it reads: CAP, the fault's fields, and ring and slot of an address. */
static int is_decoded(const char *kind, const unsigned long long *field,
		      const unsigned long long *word)
{
	if (!strcmp(kind, "fault"))
		return word[0] == field[1] && rio_fault_device(word[1]) == field[0] &&
		       (unsigned long long)rio_fault_is_write(word[1]) == field[2] &&
		       rio_fault_reason(word[1]) == field[3];
	if (!strcmp(kind, "cap"))
		return RIO_CAP_DEVICES(word[0]) == field[0] && RIO_CAP_QUEUE(word[0]) == field[1] &&
		       !(word[0] & RIO_CAP_PREFETCH) == !field[2];
	if (!strcmp(kind, "riova"))
		return rio_iova_ring(word[0]) == field[0] && rio_iova_slot(word[0]) == field[1];
	return 1;
}

/* Kinds of words that the driver only reads, or never writes. */
static int is_only_decoded(const char *kind)
{
	return !strcmp(kind, "fault") || !strcmp(kind, "cap") || !strcmp(kind, "not-invalidation");
}

static int is_right(char *line)
{
	unsigned long long field[FIELDS] = {}, want[2] = {}, word[2] = {};
	char *words = strstr(line, " = ");
	char *kind, *part;
	int count, i;

	if (!words)
		return 0;
	*words = '\0';
	kind = strtok(line, " ");
	for (i = 0; i < FIELDS && (part = strtok(NULL, " ")); i++)
		field[i] = word_of(part);
	words += 3;
	words[strcspn(words, "\n")] = '\0';
	want[0] = word_of(strtok(words, " "));
	want[1] = word_of(strtok(NULL, " "));
	if (!is_decoded(kind, field, want))
		return 0;
	if (is_only_decoded(kind))
		return 1;
	count = encode(kind, field, word);
	return count && word[0] == want[0] && word[1] == want[1];
}

int main(int argc, char **argv)
{
	FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;
	char line[256], copy[256];
	int count = 0;

	if (!file)
		return 2;
	while (fgets(line, sizeof(line), file)) {
		if (*line == '#' || *line == '\n')
			continue;
		memcpy(copy, line, sizeof(copy));
		if (!is_right(copy)) {
			fprintf(stderr, "differs: %s", line);
			return 1;
		}
		count++;
	}
	printf("%d encodings\n", count);
	return 0;
}
