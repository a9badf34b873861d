#!/usr/bin/env bash
# What live.sh, pviommu.sh and handover.sh fetch and build before their cases, and nothing else. RINGFENCE, GUEST_KERNELS, GUEST_CACHE: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

choose_kernels --module pviommu --module-source "$repo/kmod"
echo "kernels: $KERNELS"
