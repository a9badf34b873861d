#!/usr/bin/env bash
# Fetches and builds the components that the scripts that source guests.sh need before
# their cases. RINGFENCE, GUEST_KERNELS, GUEST_CACHE: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

choose_kernels --iommu pviommu --module-source "$repo/kmod"
echo "kernels: $KERNELS"
