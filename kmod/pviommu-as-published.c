// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module pviommu-as-published: pviommu with the PVIOMMU paper's cache and its defects
 * (as_published.h), to show them. All other code is that of pviommu. It is built with the modules
 * for tests only, and it has no table of devices, so that nothing loads it for a device.
 */
#include <linux/module.h>

#define PVI_KEY_HEADER "as_published.h"
#define PVI_LOADED_BY_HAND

#include "queue.c"
#include "slots.c"
#include "iova.c"
#include "cache.c"
#include "evict.c"
#include "ops.c"
#include "core_bind.c"
#include "core_refuse.c"
#include "endpoint.c"
#include "events.c"
#include "debugfs.c"
#include "main.c"
