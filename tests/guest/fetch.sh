#!/usr/bin/env bash
# Fetches and builds the components that scripts with cases need (see guests.sh).
# RINGFENCE, GUEST_KERNELS, GUEST_CACHE: see guests.sh
set -uo pipefail

. "$(dirname "$0")/guests.sh"

choose_kernels --iommu pviommu --module-source "$repo/kmod"
echo "kernels: $KERNELS"
