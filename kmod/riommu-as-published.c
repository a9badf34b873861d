// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module riommu-as-published: riommu with the bursts of the rIOMMU paper (mode burst-paper), in
 * which devices reach freed pages, to show them. All other code is that of riommu. It is built with
 * the modules for tests only, and it has no table of devices, so nothing loads it for a device.
 */
#define RIO_AS_PUBLISHED

#include "riommu_tables.c"
#include "riommu_ring.c"
#include "riommu_ops.c"
#include "riommu_endpoint.c"
#include "riommu_faults.c"
#include "riommu_debugfs.c"
#include "riommu_burst.c"
#include "riommu_shadow.c"
#include "core_bind.c"
#include "core_refuse.c"
#include "riommu_main.c"
