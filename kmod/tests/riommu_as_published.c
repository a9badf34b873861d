// SPDX-License-Identifier: GPL-2.0-only
/* Runs the bursts of the module riommu-as-published in user space. */
#define RIO_AS_PUBLISHED
#include "riommu_burst.c"
