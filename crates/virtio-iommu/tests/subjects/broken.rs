//! Broken devices: this crate's device with one flaw each.

use std::collections::BTreeMap;

use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};

use super::direct::Direct;
use super::flaws::Flaw;

/// Offsets of the endpoint and the domain in requests.
pub(super) const ENDPOINT: usize = 8;
pub(super) const DOMAIN: usize = 4;

pub(super) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

pub(super) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub(crate) struct Broken {
    pub(super) inner: Direct,
    pub(super) flaw: Flaw,
    pub(super) setup: Setup,
    /// The value that `bypass`, or the whole configuration, reads as.
    pub(super) shadow: Option<[u8; CONFIG_BYTES]>,
    pub(super) features: u64,
    /// Domain of each endpoint.
    pub(super) attached: BTreeMap<u32, u32>,
    /// Endpoints that were attached at some time.
    pub(super) ever: Vec<u32>,
    /// Successful MAP requests by domain, except those that an UNMAP removed.
    pub(super) maps: BTreeMap<u32, Vec<Vec<u8>>>,
    /// Maps that an endpoint found when it joined.
    pub(super) hidden: BTreeMap<u32, Vec<(u64, u64)>>,
    /// Accesses that succeeded.
    pub(super) seen: BTreeMap<(u32, u64, bool), u64>,
    /// The device before the last request.
    pub(super) before: Option<Direct>,
    pub(super) faults: u64,
}

impl Broken {
    pub(crate) fn new(setup: &Setup, flaw: Flaw) -> Self {
        let mut inner = Direct::new(setup);
        inner.device.sink_mut().hasty = flaw == Flaw::DoesNotWait;
        Self {
            inner,
            flaw,
            setup: *setup,
            shadow: None,
            features: 0,
            attached: BTreeMap::new(),
            ever: Vec::new(),
            maps: BTreeMap::new(),
            hidden: BTreeMap::new(),
            seen: BTreeMap::new(),
            before: None,
            faults: 0,
        }
    }

    /// Sends a request of the flaw itself. Returns its status.
    pub(super) fn ask(&mut self, request: &[u8]) -> u8 {
        let mut reply = [0xff; 4];
        let _ = self.inner.request(request, &mut reply);
        reply[0]
    }

    fn config_bypass(&self) -> u8 {
        let mut byte = [0];
        self.inner.read_config(CONFIG_BYPASS, &mut byte);
        byte[0]
    }

    fn set_bypass(&mut self, value: u8) {
        self.inner.accept(u64::MAX);
        self.inner.write_config(CONFIG_BYPASS, &[value]);
        self.inner.accept(0);
    }
}

impl Subject for Broken {
    fn endpoints(&self) -> [u32; 3] {
        self.inner.endpoints()
    }

    fn offered(&self) -> u64 {
        let offered = self.inner.offered();
        match self.flaw {
            Flaw::OffersBothBypasses => offered | 1 << VIRTIO_IOMMU_F_BYPASS,
            Flaw::HidesMapUnmap => offered & !(1 << VIRTIO_IOMMU_F_MAP_UNMAP),
            _ => offered,
        }
    }

    fn accept(&mut self, features: u64) {
        self.features = features;
        self.inner.accept(match self.flaw {
            Flaw::BypassFlagNeedsNoFeature => features | 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG,
            Flaw::HidesMapUnmap => features | 1 << VIRTIO_IOMMU_F_MAP_UNMAP,
            _ => features,
        });
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        self.inner.read_config(offset, bytes);
        for (at, byte) in (offset..).zip(bytes) {
            match self.flaw {
                Flaw::NoPageSize if at < 8 => *byte = 0,
                Flaw::DomainRangeReversed if (24..28).contains(&at) => *byte = 0xff,
                Flaw::DomainRangeReversed if (28..32).contains(&at) => *byte = 0,
                Flaw::BypassReadsWhatWasWritten if at == CONFIG_BYPASS => {
                    if let Some(shadow) = self.shadow {
                        *byte = shadow[at];
                    }
                }
                Flaw::PageSizeIsWritable if at < 8 => {
                    if let Some(shadow) = self.shadow {
                        *byte = shadow[at];
                    }
                }
                _ => {}
            }
        }
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        self.inner.write_config(offset, bytes);
        let mut shadow = [0; CONFIG_BYTES];
        self.read_config(0, &mut shadow);
        if let Some(field) = shadow.get_mut(offset..offset.wrapping_add(bytes.len())) {
            let flag = bytes.iter().all(|byte| *byte <= 1) && offset == CONFIG_BYPASS;
            field.copy_from_slice(bytes);
            // A valid flag is stored as a flag.
            self.shadow = (!flag).then_some(shadow);
        }
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        if self.flaw == Flaw::PublishesFirst {
            let snapshot = self.inner.device.snapshot();
            let mut before = Direct::new(&self.setup);
            before.device.restore(&snapshot).expect("its own snapshot");
            self.before = Some(before);
        }
        if self.flaw == Flaw::FaultsStallRequests && self.faults > 200 {
            return Err(NotReturned::Kept);
        }
        let lengths = [
            0,
            ATTACH_BYTES,
            DETACH_BYTES,
            MAP_BYTES,
            UNMAP_BYTES,
            PROBE_BYTES,
        ];
        let kind = readable.first().map_or(0, |kind| usize::from(*kind));
        let known = lengths.get(kind).copied().filter(|length| *length > 0);
        let Some(length) = known.filter(|length| readable.len() >= *length && writable.len() >= 4)
        else {
            let cut_off = known.is_some() && !writable.is_empty();
            let unknown = known.is_none() && readable.len() >= 4 && writable.len() >= 4;
            return match self.flaw {
                Flaw::CutOffIsInval if cut_off => {
                    writable[0] = VIRTIO_IOMMU_S_INVAL;
                    Ok(writable.len().min(4))
                }
                Flaw::UnknownTypeIsUnsupp if unknown => {
                    writable[..4].copy_from_slice(&[VIRTIO_IOMMU_S_UNSUPP, 0, 0, 0]);
                    Ok(4)
                }
                _ => self.inner.request(readable, writable),
            };
        };
        if kind == usize::from(VIRTIO_IOMMU_T_PROBE) {
            return Ok(self.probe(readable, writable));
        }
        let mut request = readable[..length].to_vec();
        self.before(&mut request);

        let endpoint = le32(&request, ENDPOINT);
        let domain = le32(&request, DOMAIN);
        let elsewhere = self
            .attached
            .get(&endpoint)
            .is_some_and(|at| *at != domain && self.bypass_domain(domain).is_none());
        let (start, last) = if request.len() >= 24 {
            (le64(&request, 8), le64(&request, 16))
        } else {
            (0, 0)
        };
        // The flaw's replacement for the device's behaviour.
        let instead = match (self.flaw, request[0]) {
            (Flaw::HeadMustBeZero, _) if request[1..4] != [0; 3] => Some(VIRTIO_IOMMU_S_INVAL),
            (Flaw::ThirdIsNotAttached, VIRTIO_IOMMU_T_ATTACH)
                if endpoint == self.endpoints()[2] && request[12..20] == [0; 8] =>
            {
                Some(VIRTIO_IOMMU_S_OK)
            }
            (Flaw::UnmapMindsReserved, VIRTIO_IOMMU_T_UNMAP) if request[24..28] != [0; 4] => {
                Some(VIRTIO_IOMMU_S_UNSUPP)
            }
            (Flaw::EverythingIsRange, VIRTIO_IOMMU_T_UNMAP) if start == 0 && last == u64::MAX => {
                Some(VIRTIO_IOMMU_S_RANGE)
            }
            (Flaw::StaysWhereItWas, VIRTIO_IOMMU_T_ATTACH)
                if elsewhere && request[12..20] == [0; 8] =>
            {
                Some(VIRTIO_IOMMU_S_OK)
            }
            (Flaw::DetachMindsReserved, VIRTIO_IOMMU_T_DETACH) if request[12..20] != [0; 8] => {
                Some(VIRTIO_IOMMU_S_INVAL)
            }
            (Flaw::GapIsAnError, VIRTIO_IOMMU_T_UNMAP)
                if start < last
                    && last < 1 << 30
                    && self.bypass_domain(domain) == Some(false)
                    && self.maps.get(&domain).is_none_or(|maps| {
                        maps.iter()
                            .all(|map| le64(map, 16) < start || last < le64(map, 8))
                    }) =>
            {
                Some(VIRTIO_IOMMU_S_NOENT)
            }
            (Flaw::BackwardsIsOk, VIRTIO_IOMMU_T_MAP) if last < start && start > 0x10_0000 => {
                Some(VIRTIO_IOMMU_S_OK)
            }
            _ => None,
        };
        if self.flaw == Flaw::StopsAtGap
            && request[0] == VIRTIO_IOMMU_T_UNMAP
            && last < 1 << 30
            && let Some(maps) = self.maps.get(&domain)
            && !maps.iter().any(|map| {
                let (first, its_last) = (le64(map, 8), le64(map, 16));
                first <= last && start <= its_last && (first < start || its_last > last)
            })
        {
            // The end of the run of mappings that begins with the first one.
            let mut ranges: Vec<(u64, u64)> = maps
                .iter()
                .map(|map| (le64(map, 8), le64(map, 16)))
                .collect();
            ranges.sort_unstable();
            let mut end = None;
            for (first, its_last) in ranges {
                if first < start || first > last || end.is_some_and(|end| first != end + 1) {
                    continue;
                }
                end = Some(its_last);
            }
            if let Some(end) = end.filter(|end| *end < last) {
                request[16..24].copy_from_slice(&end.to_le_bytes());
            }
        }
        let status = match instead {
            Some(status) => status,
            None => {
                let status = self.ask(&request);
                if status == VIRTIO_IOMMU_S_OK {
                    self.note(&request);
                }
                self.after(&request, status)
            }
        };
        writable[..4].copy_from_slice(&[status, 0, 0, 0]);
        if self.flaw == Flaw::TailIsNotZero {
            writable[2] = 0xff;
        }
        if self.flaw == Flaw::FailureWithoutLength && status != VIRTIO_IOMMU_S_OK {
            return Ok(0);
        }
        // The status byte alone counts as written.
        if self.flaw == Flaw::FailureWithShortLength && status != VIRTIO_IOMMU_S_OK {
            return Ok(1);
        }
        Ok(4)
    }

    fn idle(&mut self) {
        self.before = None;
    }

    fn reset(&mut self) {
        let bypass = self.config_bypass();
        if self.flaw == Flaw::ResetKeepsAttachments {
            self.inner.accept(0);
            return;
        }
        self.inner.reset();
        self.attached.clear();
        self.maps.clear();
        if self.flaw == Flaw::ReachesUntilAcceptance {
            self.features = 0;
        } else {
            self.seen.clear();
        }
        if self.flaw == Flaw::ResetRevertsBypass {
            let first = Direct::new(&self.setup);
            let mut byte = [0];
            first.read_config(CONFIG_BYPASS, &mut byte);
            if byte[0] != bypass {
                self.set_bypass(byte[0]);
            }
        }
    }

    fn reset_system(&mut self) -> bool {
        let bypass = self.config_bypass();
        self.inner.reset_system();
        if self.flaw == Flaw::SystemResetKeepsBypass {
            self.set_bypass(bypass);
        }
        true
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        if let Some(before) = &mut self.before {
            return before.access(endpoint, iova, access);
        }
        let found = match self.inner.access(endpoint, iova, access) {
            Outcome::Reached(at) => Some(at),
            _ => None,
        };
        if found.is_none() {
            self.faults += 1;
        }
        let write = access == Access::Write;
        let found = match self.flaw {
            Flaw::OpenBeforeAttachment if !self.ever.contains(&endpoint) => Some(iova),
            Flaw::BypassNeedsAcceptance
                if self.features & 1 << VIRTIO_IOMMU_F_BYPASS_CONFIG == 0
                    && self.ever.is_empty()
                    && self.shadow.is_none()
                    && self.setup.bypass == Some(true)
                    && iova != 4096 =>
            {
                None
            }
            Flaw::JoinersSeeOnlyWhatIsNew => {
                let hidden = self.hidden.get(&endpoint);
                found.filter(|_| {
                    hidden.is_none_or(|ranges| {
                        ranges
                            .iter()
                            .all(|(start, last)| iova < *start || *last < iova)
                    })
                })
            }
            Flaw::LeaksToOthers if self.attached.contains_key(&endpoint) => found.or_else(|| {
                let mut others = self.attached.keys();
                others.find_map(|other| self.inner.peek(*other, iova, access))
            }),
            Flaw::BypassDomainBlocks => {
                let domain = self.attached.get(&endpoint);
                let bypasses = domain.and_then(|domain| self.bypass_domain(*domain));
                found.filter(|_| bypasses != Some(true))
            }
            Flaw::ByteBelowLands if iova & 0xfff == 0xfff => found.or_else(|| {
                let above = self.inner.peek(endpoint, iova.checked_add(1)?, access)?;
                Some(above - 1)
            }),
            Flaw::ReservedIsReached if self.covers_reserved(iova, iova) => Some(iova),
            Flaw::WriteNeedsOnlyRead if write => {
                found.or_else(|| self.inner.peek(endpoint, iova, Access::Read))
            }
            Flaw::ReadNeedsOnlyWrite if !write => {
                found.or_else(|| self.inner.peek(endpoint, iova, Access::Write))
            }
            Flaw::ReachesAfterDetach | Flaw::ReachesUntilAcceptance => match found {
                Some(at) => {
                    self.seen.insert((endpoint, iova, write), at);
                    found
                }
                None if self.flaw == Flaw::ReachesUntilAcceptance && self.features != 0 => None,
                None if self.attached.contains_key(&endpoint) => None,
                None => self.seen.get(&(endpoint, iova, write)).copied(),
            },
            _ => found,
        };
        found.map_or(Outcome::Blocked, Outcome::Reached)
    }

    fn begin_access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<bool> {
        self.inner.begin_access(endpoint, iova, access)
    }

    fn access_is_outstanding(&self) -> bool {
        self.inner.access_is_outstanding()
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        if self.flaw == Flaw::FaultIsSplit && buffer.len() < FAULT_BYTES {
            let mut whole = [0; FAULT_BYTES];
            let snapshot = self.inner.device.snapshot();
            self.inner.next_event(&mut whole)?;
            let length = buffer.len();
            buffer.copy_from_slice(&whole[..length]);
            // The next buffer would get the rest.
            let mut again = Direct::new(&self.setup);
            again.device.restore(&snapshot).expect("its own snapshot");
            self.inner = again;
            return Some(length);
        }
        let used = self.inner.next_event(buffer);
        if used == Some(FAULT_BYTES) {
            match self.flaw {
                Flaw::FaultOfAnyone => buffer[8..12].fill(0xff),
                Flaw::FaultReservedSet => buffer[13] = 1,
                Flaw::FaultFlagsSet => buffer[7] = 0x80,
                Flaw::FaultReasonSwapped => buffer[0] ^= 3,
                Flaw::FaultOfAnotherAddress => buffer[18] ^= 1,
                Flaw::FaultIsARead => buffer[4] |= 1,
                _ => {}
            }
        }
        used
    }

    fn dropped_events(&self) -> Option<u64> {
        match self.flaw {
            Flaw::DropsAreNotCounted => Some(0),
            _ => self.inner.dropped_events(),
        }
    }
}
