//! Changes of the flaws to requests and replies.

use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu_conformance::{Access, Subject};

use super::broken::{Broken, DOMAIN, ENDPOINT, le32, le64};
use super::flaws::Flaw;

impl Broken {
    /// Applies the flaw to a request before the device sees it.
    pub(super) fn before(&mut self, request: &mut [u8]) {
        match (self.flaw, request[0]) {
            (Flaw::AttachIgnoresReserved, VIRTIO_IOMMU_T_ATTACH) => request[16..20].fill(0),
            (Flaw::AttachIgnoresFlags, VIRTIO_IOMMU_T_ATTACH) => {
                request[12] &= 1;
                request[13..16].fill(0);
            }
            (Flaw::ContradictionIsIgnored, VIRTIO_IOMMU_T_ATTACH) => {
                let domain = le32(request, DOMAIN);
                let bypasses = self.bypass_domain(domain);
                if let Some(bypasses) = bypasses
                    && request[12] <= 1
                    && request[13..16] == [0; 3]
                {
                    request[12] = u8::from(bypasses);
                }
            }
            (Flaw::RoundsMappings, VIRTIO_IOMMU_T_MAP) => {
                let start = le64(request, 8) & !0xfff;
                let last = le64(request, 16) | 0xfff;
                let to = le64(request, 24) & !0xfff;
                request[8..16].copy_from_slice(&start.to_le_bytes());
                request[16..24].copy_from_slice(&last.to_le_bytes());
                request[24..32].copy_from_slice(&to.to_le_bytes());
            }
            (Flaw::MapIgnoresFlags, VIRTIO_IOMMU_T_MAP) => {
                request[32] &= 7;
                request[33..36].fill(0);
            }
            (Flaw::MmioNeedsNoFeature, VIRTIO_IOMMU_T_MAP) => request[32] &= !4,
            (Flaw::MmioIsUnknown, VIRTIO_IOMMU_T_MAP) if request[32] & 4 != 0 => {
                request[35] = 0x80;
            }
            (Flaw::PhysicalWraps, VIRTIO_IOMMU_T_MAP) if le64(request, 24) > u64::MAX - 0x1000 => {
                request[24..32].fill(0);
            }
            (Flaw::OverlapReplaces, VIRTIO_IOMMU_T_MAP) => {
                let (start, last) = (le64(request, 8), le64(request, 16));
                if start < last {
                    let mut unmap = request[..28].to_vec();
                    unmap[0] = VIRTIO_IOMMU_T_UNMAP;
                    unmap[24..28].fill(0);
                    self.ask(&unmap);
                }
            }
            (Flaw::TopIsOutOfRange, VIRTIO_IOMMU_T_MAP) if le64(request, 16) == u64::MAX => {
                request[16] = 1;
            }
            _ => {}
        }
    }

    /// Returns true if a domain bypasses the IOMMU; `None` if it does not exist.
    pub(super) fn bypass_domain(&self, domain: u32) -> Option<bool> {
        let (endpoint, _) = self.attached.iter().find(|(_, at)| **at == domain)?;
        let reached = self.inner.peek(*endpoint, 0x7fff_f123, Access::Read);
        Some(reached == Some(0x7fff_f123))
    }

    /// Returns the flaw's status in place of `status`.
    pub(super) fn after(&mut self, request: &[u8], status: u8) -> u8 {
        const OK: u8 = VIRTIO_IOMMU_S_OK;
        const INVAL: u8 = VIRTIO_IOMMU_S_INVAL;
        const RANGE: u8 = VIRTIO_IOMMU_S_RANGE;
        const NOENT: u8 = VIRTIO_IOMMU_S_NOENT;
        const NOMEM: u8 = VIRTIO_IOMMU_S_NOMEM;
        let kind = request[0];
        let absent = |this: &Self| this.bypass_domain(le32(request, DOMAIN)).is_none();
        match (self.flaw, kind, status) {
            (Flaw::DetachReportsFailure, VIRTIO_IOMMU_T_DETACH, OK) => VIRTIO_IOMMU_S_DEVERR,
            (Flaw::DomainRangeIgnored, VIRTIO_IOMMU_T_ATTACH, RANGE) => OK,
            (Flaw::AttachInventsEndpoints, VIRTIO_IOMMU_T_ATTACH, NOENT) => OK,
            (Flaw::UnknownEndpointIsInval, VIRTIO_IOMMU_T_ATTACH, NOENT) => INVAL,
            (Flaw::ContradictionDetaches, VIRTIO_IOMMU_T_ATTACH, INVAL)
                if request[12] <= 1 && request[13..20] == [0; 7] =>
            {
                let endpoint = le32(request, ENDPOINT);
                if let Some(domain) = self.attached.get(&endpoint).copied() {
                    let mut detach = vec![VIRTIO_IOMMU_T_DETACH, 0, 0, 0];
                    detach.extend(domain.to_le_bytes());
                    detach.extend(endpoint.to_le_bytes());
                    detach.extend([0; 8]);
                    self.ask(&detach);
                }
                status
            }
            (Flaw::DetachUnknownIsInval, VIRTIO_IOMMU_T_DETACH, NOENT) => INVAL,
            (Flaw::DetachFromAnyDomain, VIRTIO_IOMMU_T_DETACH, INVAL) => {
                let endpoint = le32(request, ENDPOINT);
                // Only for another domain: an unattached endpoint is still refused.
                match self.attached.get(&endpoint).copied() {
                    Some(_) => OK,
                    None => status,
                }
            }
            (Flaw::MisalignedIsInval, VIRTIO_IOMMU_T_MAP, RANGE)
                if le64(request, 16) > le64(request, 8) =>
            {
                INVAL
            }
            (Flaw::OverlapMapsTheRest, VIRTIO_IOMMU_T_MAP, INVAL)
                if request[32] & !3 == 0
                    && !self.covers_reserved(le64(request, 8), le64(request, 16)) =>
            {
                let (start, last) = (le64(request, 8), le64(request, 16));
                if start < last && last - start < 0x10_0000 {
                    for page in (start..last).step_by(0x1000) {
                        let mut map = request.to_vec();
                        map[8..16].copy_from_slice(&page.to_le_bytes());
                        map[16..24].copy_from_slice(&(page + 0xfff).to_le_bytes());
                        self.ask(&map);
                    }
                }
                status
            }
            (Flaw::MapInNoDomainIsInval, VIRTIO_IOMMU_T_MAP, NOENT)
                if !self.maps.contains_key(&le32(request, DOMAIN)) =>
            {
                INVAL
            }
            (Flaw::MapInBypassIsOk, VIRTIO_IOMMU_T_MAP, INVAL)
            | (Flaw::UnmapInBypassIsOk, VIRTIO_IOMMU_T_UNMAP, INVAL)
                if self.bypass_domain(le32(request, DOMAIN)) == Some(true) =>
            {
                OK
            }
            (Flaw::OutsideInputIsOk, VIRTIO_IOMMU_T_MAP, RANGE)
                if (le64(request, 8) | (le64(request, 16).wrapping_add(1)) | le64(request, 24))
                    & 0xfff
                    == 0
                    && le64(request, 16) > le64(request, 8) =>
            {
                OK
            }
            (Flaw::ReservedCanBeMapped, VIRTIO_IOMMU_T_MAP, INVAL)
                if request[32] & !3 == 0
                    && self.covers_reserved(le64(request, 8), le64(request, 16)) =>
            {
                OK
            }
            (Flaw::SplitRemovesTheRest, VIRTIO_IOMMU_T_UNMAP, RANGE) => {
                let (start, last) = (le64(request, 8), le64(request, 16));
                if start < last && last - start < 0x10_0000 {
                    for page in (start & !0xfff..last).step_by(0x1000) {
                        let mut unmap = request.to_vec();
                        unmap[8..16].copy_from_slice(&page.to_le_bytes());
                        unmap[16..24].copy_from_slice(&(page + 0xfff).to_le_bytes());
                        self.ask(&unmap);
                    }
                }
                status
            }
            (Flaw::SplitRemovesUntilFound, VIRTIO_IOMMU_T_UNMAP, RANGE) => {
                self.remove_until_split(request);
                status
            }
            (Flaw::SplitIsInval, VIRTIO_IOMMU_T_UNMAP, RANGE) => INVAL,
            (Flaw::UnmapInNoDomainIsOk, VIRTIO_IOMMU_T_UNMAP, NOENT)
                if absent(self) && le32(request, DOMAIN) == 0 =>
            {
                OK
            }
            (Flaw::BackwardsIsOk, VIRTIO_IOMMU_T_UNMAP, RANGE)
                if le64(request, 16) < le64(request, 8) && le64(request, 8) > 0x10_0000 =>
            {
                OK
            }
            (Flaw::CapIsOk, _, NOMEM) => OK,
            (Flaw::CapIsInval, _, NOMEM) => INVAL,
            _ => status,
        }
    }

    /// Removes the covered mappings that a search tree finds before one that would be split.
    fn remove_until_split(&mut self, request: &[u8]) {
        let (start, last) = (le64(request, 8), le64(request, 16));
        let maps = self.maps.get(&le32(request, DOMAIN));
        let mut maps = maps.cloned().unwrap_or_default();
        maps.sort_by_key(|map| le64(map, 8));
        // The first mapping on the path from the root of a balanced tree.
        let find = |maps: &[Vec<u8>]| {
            let (mut low, mut high) = (0, maps.len());
            while low < high {
                let middle = usize::midpoint(low, high);
                if le64(&maps[middle], 16) < start {
                    low = middle + 1;
                } else if last < le64(&maps[middle], 8) {
                    high = middle;
                } else {
                    return Some(middle);
                }
            }
            None
        };
        while let Some(found) = find(&maps) {
            let map = maps.remove(found);
            if le64(&map, 8) < start || last < le64(&map, 16) {
                return;
            }
            let mut unmap = request.to_vec();
            unmap[8..24].copy_from_slice(&map[8..24]);
            self.ask(&unmap);
        }
    }

    pub(super) fn covers_reserved(&self, start: u64, last: u64) -> bool {
        let mut regions = self.setup.regions.iter();
        regions.any(|region| region.first <= last && start <= region.last)
    }

    /// Updates the state that some flaws need.
    pub(super) fn note(&mut self, request: &[u8]) {
        let domain = le32(request, DOMAIN);
        match request[0] {
            VIRTIO_IOMMU_T_ATTACH => {
                let endpoint = le32(request, ENDPOINT);
                let joins = self.attached.values().any(|at| *at == domain);
                self.attached.insert(endpoint, domain);
                self.ever.push(endpoint);
                let maps = self.maps.get(&domain).cloned().unwrap_or_default();
                if self.flaw == Flaw::DomainsLiveOn && !joins {
                    for map in &maps {
                        self.ask(map);
                    }
                }
                if joins {
                    let ranges = maps.iter().map(|map| (le64(map, 8), le64(map, 16)));
                    self.hidden.insert(endpoint, ranges.collect());
                } else if self.flaw != Flaw::DomainsLiveOn {
                    self.maps.remove(&domain);
                }
            }
            VIRTIO_IOMMU_T_DETACH => {
                self.attached.remove(&le32(request, ENDPOINT));
            }
            VIRTIO_IOMMU_T_MAP => {
                self.maps.entry(domain).or_default().push(request.to_vec());
            }
            VIRTIO_IOMMU_T_UNMAP => {
                let (start, last) = (le64(request, 8), le64(request, 16));
                if let Some(maps) = self.maps.get_mut(&domain) {
                    maps.retain(|map| le64(map, 8) > last || le64(map, 16) < start);
                }
                if self.flaw == Flaw::ReachesAfterDetach {
                    self.seen
                        .retain(|(_, iova, _), _| *iova < start || *iova > last);
                }
            }
            _ => {}
        }
    }

    pub(super) fn probe(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        let used = self.inner.request(request, reply).unwrap_or_default();
        let wanted = if self.setup.probe { 512 } else { 0 };
        match self.flaw {
            Flaw::ProbeOfNobodyIsOk
                if used == wanted + 4 && reply[used - 4] == VIRTIO_IOMMU_S_NOENT =>
            {
                reply[used - 4] = VIRTIO_IOMMU_S_OK;
            }
            Flaw::ProbeAnswersUnoffered if wanted == 0 => {
                reply[..4].copy_from_slice(&[VIRTIO_IOMMU_S_UNSUPP, 0, 0, 0]);
                return 4;
            }
            Flaw::ProbeShortIsOk if used >= 4 && used < wanted + 4 => {
                reply[used - 4] = VIRTIO_IOMMU_S_OK
            }
            Flaw::ProbeLeavesGarbage if used > 4 => reply[used - 5] = 0xee,
            Flaw::ProbeLengthWithHead if used >= 28 && reply[0] == 1 => reply[2] += 4,
            Flaw::ProbeMindsReserved if used >= 4 && request[8..72] != [0; 64] => {
                reply[used - 4] = VIRTIO_IOMMU_S_INVAL;
            }
            Flaw::PropertyReservedSet if used >= 28 && reply[0] == 1 => reply[1] |= 0x80,
            Flaw::RegionReservedSet if used >= 28 && reply[0] == 1 => reply[6] = 1,
            Flaw::TwoMsiRegions if used >= 52 && reply[24] == 1 => {
                reply[4] = VIRTIO_IOMMU_RESV_MEM_T_MSI
            }
            Flaw::RegionsOverlap if used >= 52 && reply[24] == 1 => reply.copy_within(8..24, 32),
            _ => {}
        }
        used
    }
}
