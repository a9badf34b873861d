/* SPDX-License-Identifier: GPL-2.0-only */
/* Ends a program at the first condition that does not hold. */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #what);             \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#endif
