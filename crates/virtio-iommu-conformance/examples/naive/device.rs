//! A virtio-iommu device of its own: it shares no code with any other, and keeps lists that it
//! searches from the front. It stands for the device of a monitor.

/// Status of a request.
type Status = u8;
const OK: Status = 0;
const INVAL: Status = 4;
const RANGE: Status = 5;
const NOENT: Status = 6;

const PROPERTIES: usize = 64;
const PAGE: u64 = 4096;

/// Bits MAP_UNMAP, PROBE, BYPASS_CONFIG.
pub(crate) const FEATURES: u64 = 1 << 2 | 1 << 4 | 1 << 6;

/// A region that an endpoint cannot map, both ends included.
pub(crate) struct Reserved {
    pub(crate) endpoint: u32,
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) msi: bool,
}

struct Mapping {
    domain: u32,
    first: u64,
    last: u64,
    physical: u64,
    flags: u32,
}

struct Attachment {
    endpoint: u32,
    domain: u32,
    bypass: bool,
}

/// A report of a blocked access.
pub(crate) struct Fault {
    reason: u8,
    write: bool,
    endpoint: u32,
    address: u64,
}

impl Fault {
    /// Returns the bytes of the report.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let flags: u32 = 1 << 8 | if self.write { 2 } else { 1 };
        let mut bytes = vec![self.reason, 0, 0, 0];
        bytes.extend(flags.to_le_bytes());
        bytes.extend(self.endpoint.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.address.to_le_bytes());
        bytes
    }
}

pub(crate) struct Naive {
    endpoints: Vec<u32>,
    reserved: Vec<Reserved>,
    attached: Vec<Attachment>,
    mappings: Vec<Mapping>,
    first_bypass: u8,
    pub(crate) bypass: u8,
    pub(crate) negotiated: u64,
    pub(crate) faults: Vec<Fault>,
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    (0..4).fold(0, |sum, n| sum | u32::from(bytes[at + n]) << (8 * n))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    (0..8).fold(0, |sum, n| sum | u64::from(bytes[at + n]) << (8 * n))
}

impl Naive {
    pub(crate) fn new(endpoints: &[u32], reserved: Vec<Reserved>, bypass: bool) -> Self {
        Self {
            endpoints: endpoints.to_vec(),
            reserved,
            attached: Vec::new(),
            mappings: Vec::new(),
            first_bypass: bypass.into(),
            bypass: bypass.into(),
            negotiated: 0,
            faults: Vec::new(),
        }
    }

    pub(crate) fn config(&self) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&(!(PAGE - 1)).to_le_bytes());
        bytes[32] = PROPERTIES as u8;
        bytes[36] = self.bypass;
        bytes
    }

    pub(crate) fn reset(&mut self) {
        self.negotiated = 0;
        self.attached.clear();
        self.mappings.clear();
        self.faults.clear();
    }

    pub(crate) fn reset_system(&mut self) {
        self.reset();
        self.bypass = self.first_bypass;
    }

    /// Returns true if the domain exists and bypasses the IOMMU; `None` if it does not exist.
    fn bypasses(&self, domain: u32) -> Option<bool> {
        let found = self.attached.iter().find(|one| one.domain == domain)?;
        Some(found.bypass)
    }

    fn leave(&mut self, endpoint: u32) {
        self.attached.retain(|one| one.endpoint != endpoint);
        let attached = &self.attached;
        let exists = |map: &Mapping| attached.iter().any(|one| one.domain == map.domain);
        self.mappings.retain(exists);
    }

    fn attach(&mut self, request: &[u8]) -> Status {
        let (domain, endpoint) = (le32(request, 4), le32(request, 8));
        let flags = le32(request, 12);
        let known = (self.negotiated >> 6 & 1) as u32;
        if flags & !known != 0 || le32(request, 16) != 0 {
            return INVAL;
        }
        if !self.endpoints.contains(&endpoint) {
            return NOENT;
        }
        let bypass = flags == 1;
        if self.bypasses(domain).is_some_and(|other| other != bypass) {
            return INVAL;
        }
        self.leave(endpoint);
        self.attached.push(Attachment {
            endpoint,
            domain,
            bypass,
        });
        OK
    }

    fn detach(&mut self, request: &[u8]) -> Status {
        let (domain, endpoint) = (le32(request, 4), le32(request, 8));
        if !self.endpoints.contains(&endpoint) {
            return NOENT;
        }
        let is_it = |one: &Attachment| (one.endpoint, one.domain) == (endpoint, domain);
        if !self.attached.iter().any(is_it) {
            return INVAL;
        }
        self.leave(endpoint);
        OK
    }

    fn map(&mut self, request: &[u8]) -> Status {
        let (domain, flags) = (le32(request, 4), le32(request, 32));
        let (first, last) = (le64(request, 8), le64(request, 16));
        let physical = le64(request, 24);
        match self.bypasses(domain) {
            None => return NOENT,
            Some(true) => return INVAL,
            Some(false) if flags & !3 != 0 => return INVAL,
            Some(false) => {}
        }
        let misaligned = !(first | last.wrapping_add(1) | physical).is_multiple_of(PAGE);
        if misaligned || last < first || physical.checked_add(last - first).is_none() {
            return RANGE;
        }
        let overlaps = |start: u64, end: u64| first <= end && start <= last;
        let mut mappings = self.mappings.iter();
        let mut reserved = self.reserved.iter();
        let is_inside = |endpoint: u32| {
            let mut attached = self.attached.iter();
            attached.any(|one| (one.endpoint, one.domain) == (endpoint, domain))
        };
        if mappings.any(|map| map.domain == domain && overlaps(map.first, map.last))
            || reserved.any(|one| is_inside(one.endpoint) && overlaps(one.first, one.last))
        {
            return INVAL;
        }
        self.mappings.push(Mapping {
            domain,
            first,
            last,
            physical,
            flags,
        });
        OK
    }

    fn unmap(&mut self, request: &[u8]) -> Status {
        let domain = le32(request, 4);
        let (first, last) = (le64(request, 8), le64(request, 16));
        match self.bypasses(domain) {
            None => return NOENT,
            Some(true) => return INVAL,
            Some(false) if last < first => return RANGE,
            Some(false) => {}
        }
        let touches =
            |map: &Mapping| map.domain == domain && map.first <= last && first <= map.last;
        let splits = |map: &Mapping| touches(map) && (map.first < first || last < map.last);
        if self.mappings.iter().any(splits) {
            return RANGE;
        }
        self.mappings.retain(|map| !touches(map));
        OK
    }

    /// Fills the properties of an endpoint.
    fn probe(&self, endpoint: u32, properties: &mut [u8]) -> Status {
        properties.fill(0);
        if !self.endpoints.contains(&endpoint) {
            return NOENT;
        }
        if properties.len() < PROPERTIES {
            return INVAL;
        }
        let regions = self.reserved.iter().filter(|one| one.endpoint == endpoint);
        for (region, property) in regions.zip(properties.chunks_exact_mut(24)) {
            property[..5].copy_from_slice(&[1, 0, 20, 0, region.msi.into()]);
            property[8..16].copy_from_slice(&region.first.to_le_bytes());
            property[16..24].copy_from_slice(&region.last.to_le_bytes());
        }
        OK
    }

    /// Handles one chain. Returns the used length.
    pub(crate) fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> usize {
        let Some(kind) = readable.first() else {
            return 0;
        };
        let bytes = [usize::MAX, 20, 20, 36, 28, 72].get(usize::from(*kind));
        if bytes.is_none_or(|bytes| readable.len() < *bytes) || writable.len() < 4 {
            return 0;
        }
        let room = writable.len();
        let (properties, tail) = writable.split_at_mut(if *kind == 5 { room - 4 } else { 0 });
        let status = match kind {
            1 => self.attach(readable),
            2 => self.detach(readable),
            3 => self.map(readable),
            4 => self.unmap(readable),
            _ => self.probe(le32(readable, 4), properties),
        };
        tail[..4].copy_from_slice(&[status, 0, 0, 0]);
        properties.len() + 4
    }

    /// Returns the address that an access reaches. Reports a blocked one.
    pub(crate) fn access(&mut self, endpoint: u32, iova: u64, write: bool) -> Option<u64> {
        let attached = self.attached.iter().find(|one| one.endpoint == endpoint);
        let reason = match attached {
            None if self.bypass == 1 => return Some(iova),
            None => 1,
            Some(one) if one.bypass => return Some(iova),
            Some(one) => {
                let needed = if write { 2 } else { 1 };
                let mut mappings = self.mappings.iter();
                let found = mappings.find(|map| {
                    map.domain == one.domain
                        && (map.first..=map.last).contains(&iova)
                        && map.flags & needed != 0
                });
                if let Some(map) = found {
                    return Some(map.physical + (iova - map.first));
                }
                2
            }
        };
        // A monitor bounds the reports that wait.
        if self.faults.len() < 100 {
            self.faults.push(Fault {
                reason,
                write,
                endpoint,
                address: iova,
            });
        }
        None
    }
}
