//! Brute-force model of the specification: linear searches of lists, and 128-bit numbers.

use std::collections::BTreeMap;

use ringfence_types::Access;
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{BypassPolicy, Options, ReservedRegionKind, SinkError};

use super::recorder::{Call, Failure};

/// A mapping: first byte, byte after the last, physical address, flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mapped {
    pub(crate) start: u128,
    pub(crate) end: u128,
    pub(crate) physical: u128,
    pub(crate) flags: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Domain {
    Bypass,
    Mapped(Vec<Mapped>),
    Blocked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// First byte, byte after the last, kind.
    pub(crate) reserved: Vec<(u128, u128, ReservedRegionKind)>,
    pub(crate) domain: Option<u32>,
    pub(crate) bypasses: bool,
}

/// Reply that the device must write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Unwritten,
    Tail(u8),
    /// Properties and tail.
    Probe(Vec<u8>),
}

/// Reference model of a device.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) options: Options,
    pub(crate) features: u64,
    pub(crate) bypass: bool,
    pub(crate) endpoints: BTreeMap<u32, Endpoint>,
    pub(crate) domains: BTreeMap<u32, Domain>,
}

/// Target of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpectedTarget {
    Nowhere,
    To(u64),
    Doorbell,
}

impl Model {
    pub(crate) fn new(options: Options) -> Self {
        Self {
            options,
            features: 0,
            bypass: first_bypass(&options),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
        }
    }

    fn has(&self, bit: u32) -> bool {
        self.features & 1 << bit != 0
    }

    pub(crate) fn mappings(&self) -> usize {
        self.domains
            .values()
            .map(|domain| match domain {
                Domain::Mapped(mappings) => mappings.len(),
                _ => 0,
            })
            .sum()
    }

    /// Handles a request. `failure` is the sink's failure in this request, if any.
    pub(crate) fn request(&mut self, bytes: &[u8], room: usize, failure: Option<Failure>) -> Reply {
        if room < 4 || bytes.len() < 4 {
            return Reply::Unwritten;
        }
        let lengths = [0, 20, 20, 36, 28, 72];
        let kind = usize::from(bytes[0]);
        if kind == 0 || kind > 5 || bytes.len() < lengths[kind] {
            return Reply::Unwritten;
        }
        let le32 = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4"));
        let le64 =
            |at: usize| u128::from(u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8")));
        let result = match kind {
            1 => self.attach(le32(4), le32(8), le32(12), le32(16), failure),
            2 => self.detach(le32(4), le32(8), failure),
            3 => {
                let mapped = Mapped {
                    start: le64(8),
                    end: le64(16) + 1,
                    physical: le64(24),
                    flags: le32(32),
                };
                self.map(le32(4), mapped, failure)
            }
            4 => self.unmap(le32(4), le64(8), le64(16) + 1, failure),
            _ => return self.probe(le32(4), room),
        };
        Reply::Tail(result.err().unwrap_or(VIRTIO_IOMMU_S_OK))
    }

    fn attach(
        &mut self,
        domain: u32,
        endpoint: u32,
        flags: u32,
        reserved: u32,
        failure: Option<Failure>,
    ) -> Result<(), u8> {
        let bypass = flags == 1 && self.has(VIRTIO_IOMMU_F_BYPASS_CONFIG);
        if reserved != 0 || flags != 0 && !bypass {
            return Err(VIRTIO_IOMMU_S_INVAL);
        }
        let Some(joining) = self.endpoints.get(&endpoint) else {
            return Err(VIRTIO_IOMMU_S_NOENT);
        };
        let range = self.options.domains;
        if domain < range.first.get() || domain > range.last.get() {
            return Err(VIRTIO_IOMMU_S_RANGE);
        }
        match (self.domains.get(&domain), bypass) {
            (Some(Domain::Blocked), _) => return Err(VIRTIO_IOMMU_S_DEVERR),
            (Some(Domain::Bypass), false) | (Some(Domain::Mapped(_)), true) => {
                return Err(VIRTIO_IOMMU_S_INVAL);
            }
            (Some(Domain::Mapped(mappings)), false) => {
                let hits = |mapped: &Mapped| {
                    joining
                        .reserved
                        .iter()
                        .any(|(start, end, _)| *start < mapped.end && mapped.start < *end)
                };
                if mappings.iter().any(hits) {
                    return Err(VIRTIO_IOMMU_S_UNSUPP);
                }
            }
            _ => {}
        }
        let left = joining.domain;
        let alone = left.is_some_and(|left| self.members(left) == 1);
        let again = alone && left == Some(domain);
        let remaining = self.domains.len() - usize::from(alone);
        if !(again || self.domains.contains_key(&domain))
            && remaining >= self.options.limits.domains
        {
            return Err(VIRTIO_IOMMU_S_NOMEM);
        }
        // If the sink refuses the bypass of an endpoint that leaves its domain, the request still
        // succeeds.
        let on_leaving = again
            && self.bypass
            && failure.is_some_and(|failure| failure.call == Call::Bypass && failure.earlier == 0);
        if again {
            self.leave(endpoint, on_leaving);
        }
        if let Some(failure) = failure
            && !on_leaving
        {
            return Err(status(failure.error));
        }
        if !again && left.is_some() {
            self.leave(endpoint, false);
        }
        let fresh = if bypass {
            Domain::Bypass
        } else {
            Domain::Mapped(Vec::new())
        };
        self.domains.entry(domain).or_insert(fresh);
        let joining = self.endpoints.get_mut(&endpoint).expect("it is there");
        joining.domain = Some(domain);
        joining.bypasses = false;
        Ok(())
    }

    fn detach(&mut self, domain: u32, endpoint: u32, failure: Option<Failure>) -> Result<(), u8> {
        let Some(endpoint_state) = self.endpoints.get(&endpoint) else {
            return Err(VIRTIO_IOMMU_S_NOENT);
        };
        if endpoint_state.domain != Some(domain) {
            return Err(VIRTIO_IOMMU_S_INVAL);
        }
        self.leave(endpoint, failure.is_some());
        Ok(())
    }

    /// Detaches the endpoint. `refused` is true if the sink refuses its bypass.
    pub(crate) fn leave(&mut self, endpoint: u32, refused: bool) {
        let endpoint_state = self.endpoints.get_mut(&endpoint).expect("it is there");
        endpoint_state.bypasses = self.bypass && !refused;
        if let Some(domain) = endpoint_state.domain.take()
            && self.members(domain) == 0
        {
            self.domains.remove(&domain);
        }
    }

    fn members(&self, domain: u32) -> usize {
        self.endpoints
            .values()
            .filter(|endpoint| endpoint.domain == Some(domain))
            .count()
    }

    fn map(&mut self, domain: u32, mapped: Mapped, failure: Option<Failure>) -> Result<(), u8> {
        if !self.has(VIRTIO_IOMMU_F_MAP_UNMAP) {
            return Err(VIRTIO_IOMMU_S_UNSUPP);
        }
        let known = if self.has(VIRTIO_IOMMU_F_MMIO) { 7 } else { 3 };
        if mapped.flags & !known != 0 {
            return Err(VIRTIO_IOMMU_S_INVAL);
        }
        let total = self.mappings();
        let reserved: Vec<_> = self
            .endpoints
            .values()
            .filter(|endpoint| endpoint.domain == Some(domain))
            .flat_map(|endpoint| endpoint.reserved.iter())
            .collect();
        let mappings = match self.domains.get_mut(&domain) {
            None => return Err(VIRTIO_IOMMU_S_NOENT),
            Some(Domain::Bypass) => return Err(VIRTIO_IOMMU_S_INVAL),
            Some(Domain::Blocked) => return Err(VIRTIO_IOMMU_S_DEVERR),
            Some(Domain::Mapped(mappings)) => mappings,
        };
        if mapped.end <= mapped.start {
            return Err(VIRTIO_IOMMU_S_RANGE);
        }
        let granule = 1_u128 << self.options.page_size_mask.trailing_zeros();
        let aligned = |address: u128| address.is_multiple_of(granule);
        let input = self.options.input;
        if !aligned(mapped.start)
            || !aligned(mapped.end)
            || !aligned(mapped.physical)
            || mapped.start < u128::from(input.start().get())
            || mapped.end - 1 > u128::from(input.last().get())
        {
            return Err(VIRTIO_IOMMU_S_RANGE);
        }
        let physical = self.options.physical;
        let last = mapped.physical + (mapped.end - mapped.start) - 1;
        if mapped.physical < u128::from(physical.start().get())
            || last > u128::from(physical.last().get())
        {
            return Err(VIRTIO_IOMMU_S_FAULT);
        }
        let hits = |start: u128, end: u128| start < mapped.end && mapped.start < end;
        if reserved.iter().any(|region| hits(region.0, region.1)) {
            return Err(VIRTIO_IOMMU_S_INVAL);
        }
        if total >= self.options.limits.mappings {
            return Err(VIRTIO_IOMMU_S_NOMEM);
        }
        if mappings.iter().any(|other| hits(other.start, other.end)) {
            return Err(VIRTIO_IOMMU_S_INVAL);
        }
        if let Some(failure) = failure {
            return Err(status(failure.error));
        }
        mappings.push(mapped);
        Ok(())
    }

    fn unmap(
        &mut self,
        domain: u32,
        start: u128,
        end: u128,
        failure: Option<Failure>,
    ) -> Result<(), u8> {
        if !self.has(VIRTIO_IOMMU_F_MAP_UNMAP) {
            return Err(VIRTIO_IOMMU_S_UNSUPP);
        }
        let target = self.domains.get_mut(&domain);
        let mappings = match target {
            None => return Err(VIRTIO_IOMMU_S_NOENT),
            Some(Domain::Bypass) => return Err(VIRTIO_IOMMU_S_INVAL),
            Some(Domain::Blocked) => return Err(VIRTIO_IOMMU_S_DEVERR),
            Some(Domain::Mapped(mappings)) => mappings,
        };
        if end <= start {
            return Err(VIRTIO_IOMMU_S_RANGE);
        }
        let touched = |mapped: &Mapped| mapped.start < end && start < mapped.end;
        let split = |mapped: &Mapped| mapped.start < start || mapped.end > end;
        if mappings
            .iter()
            .any(|mapped| touched(mapped) && split(mapped))
        {
            return Err(VIRTIO_IOMMU_S_RANGE);
        }
        if failure.is_some() {
            self.domains.insert(domain, Domain::Blocked);
            return Err(VIRTIO_IOMMU_S_DEVERR);
        }
        mappings.retain(|mapped| !touched(mapped));
        Ok(())
    }

    fn probe(&self, endpoint: u32, room: usize) -> Reply {
        let wanted = self.options.probe_bytes as usize;
        if wanted == 0 {
            return Reply::Unwritten;
        }
        let mut bytes = vec![0; wanted.min(room - 4)];
        let status = if room - 4 < wanted {
            VIRTIO_IOMMU_S_INVAL
        } else if let Some(endpoint) = self.endpoints.get(&endpoint) {
            let mut sorted = endpoint.reserved.clone();
            sorted.sort_by_key(|region| region.0);
            let mut at = 0;
            for (start, end, kind) in sorted {
                let mut property = vec![1, 0, 20, 0, 0, 0, 0, 0];
                property[4] = u8::from(kind == ReservedRegionKind::Msi);
                property.extend((start as u64).to_le_bytes());
                property.extend(((end - 1) as u64).to_le_bytes());
                bytes[at..at + 24].copy_from_slice(&property);
                at += 24;
            }
            VIRTIO_IOMMU_S_OK
        } else {
            VIRTIO_IOMMU_S_NOENT
        };
        bytes.extend([status, 0, 0, 0]);
        Reply::Probe(bytes)
    }

    /// Returns the target of an access to one byte.
    pub(crate) fn access(&self, endpoint: u32, iova: u64, access: Access) -> ExpectedTarget {
        let Some(endpoint) = self.endpoints.get(&endpoint) else {
            return ExpectedTarget::Nowhere;
        };
        let Some(domain) = endpoint.domain else {
            return if endpoint.bypasses {
                ExpectedTarget::To(iova)
            } else {
                ExpectedTarget::Nowhere
            };
        };
        let address = u128::from(iova);
        let mappings = match &self.domains[&domain] {
            Domain::Bypass => return ExpectedTarget::To(iova),
            Domain::Blocked => return ExpectedTarget::Nowhere,
            Domain::Mapped(mappings) => mappings,
        };
        let region = endpoint
            .reserved
            .iter()
            .find(|region| region.0 <= address && address < region.1);
        if let Some((_, _, kind)) = region {
            return if *kind == ReservedRegionKind::Msi && access == Access::Write {
                ExpectedTarget::Doorbell
            } else {
                ExpectedTarget::Nowhere
            };
        }
        let needed = match access {
            Access::Read => 1,
            Access::Write => 2,
        };
        mappings
            .iter()
            .find(|mapped| mapped.start <= address && address < mapped.end)
            .filter(|mapped| mapped.flags & needed != 0)
            .map_or(ExpectedTarget::Nowhere, |mapped| {
                ExpectedTarget::To((address - mapped.start + mapped.physical) as u64)
            })
    }
}

pub(crate) fn first_bypass(options: &Options) -> bool {
    options.unattached
        == BypassPolicy::DriverDecides {
            bypass_at_first: true,
        }
}

/// Returns the status that the driver sees for a sink's error.
fn status(error: SinkError) -> u8 {
    match error {
        SinkError::OutOfMemory => VIRTIO_IOMMU_S_NOMEM,
        SinkError::BadAddress(_) => VIRTIO_IOMMU_S_FAULT,
        SinkError::Unsupported => VIRTIO_IOMMU_S_UNSUPP,
        _ => VIRTIO_IOMMU_S_DEVERR,
    }
}
