//! A driver that can send any request.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::cell::RefCell;

use crate::spec::*;
use crate::{Access, Make, Outcome, Region, Setup, Subject};

pub(crate) const READ: u32 = VIRTIO_IOMMU_MAP_F_READ;
pub(crate) const WRITE: u32 = VIRTIO_IOMMU_MAP_F_WRITE;
pub(crate) const BOTH: u32 = READ | WRITE;
/// An endpoint that does not exist.
pub(crate) const NOBODY: u32 = 0x99;
/// Fills replies before the device writes them.
pub(crate) const UNTOUCHED: u8 = 0xee;

const OK: u8 = VIRTIO_IOMMU_S_OK;

/// Regions that statements about regions want: an ordinary one, and the doorbells of x86.
const REGIONS: &[Region] = &[
    Region {
        first: 0x80_0000,
        last: 0x8f_ffff,
        msi: false,
    },
    Region {
        first: 0xfee0_0000,
        last: 0xfeef_ffff,
        msi: true,
    },
];

/// No access before attachment, bypass domains, PROBE, no MMIO, two regions.
pub(crate) const USUAL: Setup = Setup {
    bypass: Some(false),
    mmio: false,
    probe: true,
    regions: REGIONS,
    input: (0, u64::MAX),
    domains: (0, u32::MAX),
    limits: None,
};

/// Reason why a statement does not hold.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The violated requirement.
    Broken(&'static str),
    /// The reason why the statement does not apply to the device.
    NotApplicable(String),
}

/// Returns a failure that says why the statement does not apply.
pub(crate) fn not_applicable<T>(reason: &str) -> Result<T, Failure> {
    Err(Failure::NotApplicable(reason.into()))
}

/// Returns an error with the violated requirement unless `holds`.
pub(crate) const fn ensure(holds: bool, requirement: &'static str) -> Result<(), Failure> {
    if holds {
        Ok(())
    } else {
        Err(Failure::Broken(requirement))
    }
}

/// Source of devices, and the last observation of any of them.
pub(crate) struct TestContext<'a> {
    pub(crate) make: Make<'a>,
    pub(crate) seen: RefCell<String>,
}

/// The driver of one device.
pub(crate) struct Driver<'a> {
    pub(crate) subject: Box<dyn Subject>,
    seen: &'a RefCell<String>,
    /// The endpoints that statements attach and detach.
    pub(crate) one: u32,
    pub(crate) two: u32,
    pub(crate) three: u32,
    /// Size of the pages that statements map, at least the granule.
    pub(crate) page: u64,
    /// Address of the first page of memory.
    memory: u64,
}

impl<'a> Driver<'a> {
    /// Creates a driver of a device of which nothing is negotiated.
    pub(crate) fn reset(context: &'a TestContext<'_>, setup: &Setup) -> Result<Self, Failure> {
        let subject = (context.make)(setup).map_err(Failure::NotApplicable)?;
        let [one, two, three] = subject.endpoints();
        let mut driver = Self {
            seen: &context.seen,
            one,
            two,
            three,
            page: 4096,
            memory: subject.memory(),
            subject,
        };
        driver.page = driver.granule().max(4096);
        if driver.page > 1 << 16 {
            return not_applicable("the page granularity exceeds 64 KiB");
        }
        Ok(driver)
    }

    /// Creates a driver that has accepted all features. Unattached endpoints are not in bypass
    /// mode, if the device allows that.
    pub(crate) fn new(context: &'a TestContext<'_>, setup: &Setup) -> Result<Self, Failure> {
        let mut driver = Self::reset(context, setup)?;
        driver.accept_all();
        if setup.bypass == Some(false) && driver.offers(VIRTIO_IOMMU_F_BYPASS_CONFIG) {
            driver.set_bypass(0);
        }
        Ok(driver)
    }

    /// Creates a driver with endpoint `one` in domain 1.
    pub(crate) fn attached(context: &'a TestContext<'_>, setup: &Setup) -> Result<Self, Failure> {
        let mut driver = Self::new(context, setup)?;
        ensure(driver.attach(1, driver.one)? == OK, "ATTACH succeeds")?;
        Ok(driver)
    }

    fn granule(&self) -> u64 {
        let mask = self.config64(CONFIG_PAGE_SIZE_MASK);
        mask & mask.wrapping_neg()
    }

    /// Returns the address of a page of memory, from 0 on. Only the first 16 are accessed.
    pub(crate) const fn at(&self, page: u64) -> u64 {
        self.memory.wrapping_add(page.wrapping_mul(self.page))
    }

    pub(crate) fn note(&self, text: String) {
        self.seen.replace(text);
    }

    pub(crate) fn offers(&self, bit: u32) -> bool {
        self.subject.offered() >> bit & 1 != 0
    }

    /// Requires a feature of the device.
    pub(crate) fn needs(&self, bit: u32, name: &str) -> Result<(), Failure> {
        if self.offers(bit) {
            return Ok(());
        }
        not_applicable(&format!("the device does not offer {name}"))
    }

    pub(crate) fn accept_all(&mut self) {
        let offered = self.subject.offered();
        self.subject.accept(offered);
    }

    /// Sends one request. Returns the used length and the content of the reply buffer.
    pub(crate) fn send(&mut self, readable: &[u8], room: usize) -> Sent {
        let reply = self.send_at_once(readable, room);
        self.subject.idle();
        reply
    }

    /// Like [`send`](Self::send), but does not wait for the device to become idle.
    pub(crate) fn send_at_once(&mut self, readable: &[u8], room: usize) -> Sent {
        let mut reply = vec![UNTOUCHED; room];
        let result = self.subject.request(readable, &mut reply);
        let outcome = match &result {
            Err(reason) => reason.to_string(),
            Ok(used) => outcome(*used, &reply),
        };
        self.note(format!("{}: {outcome}", show(readable)));
        let used = result.map_err(|_| Failure::Broken("the device returns every request"))?;
        Ok((used, reply))
    }

    /// Sends a request with a buffer for a tail only. Returns the status.
    pub(crate) fn status(&mut self, readable: &[u8]) -> Result<u8, Failure> {
        let (_, reply) = self.send(readable, TAIL_BYTES)?;
        Ok(reply.first().copied().unwrap_or(UNTOUCHED))
    }

    pub(crate) fn attach(&mut self, domain: u32, endpoint: u32) -> Result<u8, Failure> {
        self.status(&attach(domain, endpoint, 0, 0))
    }

    pub(crate) fn attach_bypass(&mut self, domain: u32, endpoint: u32) -> Result<u8, Failure> {
        self.status(&attach(domain, endpoint, VIRTIO_IOMMU_ATTACH_F_BYPASS, 0))
    }

    /// Creates a bypass domain with an endpoint.
    pub(crate) fn bypass_domain(&mut self, domain: u32, endpoint: u32) -> Result<(), Failure> {
        self.needs(VIRTIO_IOMMU_F_BYPASS_CONFIG, "BYPASS_CONFIG")?;
        let status = self.attach_bypass(domain, endpoint)?;
        ensure(status == OK, "ATTACH with the bypass flag succeeds")
    }

    pub(crate) fn detach(&mut self, domain: u32, endpoint: u32) -> Result<u8, Failure> {
        self.status(&detach(domain, endpoint, 0))
    }

    /// Maps bytes `start` to `last` of a domain.
    pub(crate) fn map(
        &mut self,
        domain: u32,
        (start, last): (u64, u64),
        to: u64,
        flags: u32,
    ) -> Result<u8, Failure> {
        self.status(&map(domain, start, last, to, flags))
    }

    /// Returns the bytes of `count` pages from page `first`.
    pub(crate) const fn pages(&self, first: u64, count: u64) -> (u64, u64) {
        let start = first * self.page;
        (start, start + count * self.page - 1)
    }

    /// Maps one page of domain 1, given by its number, to a page of memory.
    pub(crate) fn map_page(&mut self, page: u64, to: u64) -> Result<(), Failure> {
        let status = self.map(1, self.pages(page, 1), self.at(to), BOTH)?;
        ensure(status == OK, "MAP of a page succeeds")
    }

    pub(crate) fn unmap(&mut self, domain: u32, (start, last): (u64, u64)) -> Result<u8, Failure> {
        self.status(&unmap(domain, start, last, 0))
    }

    pub(crate) fn read(&mut self, endpoint: u32, iova: u64) -> Result<Option<u64>, Failure> {
        self.access(endpoint, iova, Access::Read)
    }

    pub(crate) fn write(&mut self, endpoint: u32, iova: u64) -> Result<Option<u64>, Failure> {
        self.access(endpoint, iova, Access::Write)
    }

    /// Returns the address that an access reaches; `None` if it is blocked.
    pub(crate) fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        access: Access,
    ) -> Result<Option<u64>, Failure> {
        let name = match access {
            Access::Read => "read",
            Access::Write => "write",
        };
        let outcome = self.subject.access(endpoint, iova, access);
        let (text, result) = match outcome {
            Outcome::Reached(at) => (format!("reaches {at:#x}"), Ok(Some(at))),
            Outcome::Blocked => ("is blocked".into(), Ok(None)),
            Outcome::Unobservable(why) => (why.into(), not_applicable(why)),
        };
        self.note(format!("{name} of {endpoint:#x} at {iova:#x} {text}"));
        result
    }

    /// Returns true if reads and writes of `endpoint` at page `page` reach page `to` of memory; if
    /// `to` is `None`, true if both are blocked.
    pub(crate) fn reaches(
        &mut self,
        endpoint: u32,
        page: u64,
        to: Option<u64>,
    ) -> Result<bool, Failure> {
        let iova = page * self.page;
        let to = to.map(|page| self.at(page));
        Ok(self.read(endpoint, iova)? == to && self.write(endpoint, iova)? == to)
    }

    /// Returns true if accesses of an endpoint that is not attached are blocked. An adapter may be
    /// unable to observe its reads.
    pub(crate) fn is_blocked(&mut self, endpoint: u32, iova: u64) -> Result<bool, Failure> {
        let read = match self.read(endpoint, iova) {
            Err(Failure::NotApplicable(_)) => None,
            read => read?,
        };
        Ok(read.is_none() && self.write(endpoint, iova)?.is_none())
    }

    /// Returns true if an endpoint reaches a page of memory at its own address.
    pub(crate) fn reaches_itself(&mut self, endpoint: u32, page: u64) -> Result<bool, Failure> {
        let at = self.at(page);
        Ok(self.read(endpoint, at)? == Some(at) && self.write(endpoint, at)? == Some(at))
    }

    pub(crate) fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        self.subject.read_config(0, &mut bytes);
        self.note(format!("the configuration reads {bytes:02x?}"));
        bytes
    }

    pub(crate) fn config64(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.subject.read_config(offset, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    pub(crate) fn config32(&self, offset: usize) -> u32 {
        let mut bytes = [0; 4];
        self.subject.read_config(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn bypass(&self) -> u8 {
        let mut byte = [0];
        self.subject.read_config(CONFIG_BYPASS, &mut byte);
        let [value] = byte;
        self.note(format!("bypass reads {value:#x}"));
        value
    }

    pub(crate) fn set_bypass(&mut self, value: u8) {
        self.subject.write_config(CONFIG_BYPASS, &[value]);
    }

    /// Returns the input range; all addresses without the feature.
    pub(crate) fn input_range(&self) -> (u64, u64) {
        if !self.offers(VIRTIO_IOMMU_F_INPUT_RANGE) {
            return (0, u64::MAX);
        }
        let start = self.config64(CONFIG_INPUT_RANGE);
        let end = self.config64(CONFIG_INPUT_RANGE + 8);
        // Another statement checks the range.
        match start < end && end - start >= self.page {
            true => (start, end),
            false => (0, u64::MAX),
        }
    }

    /// Returns valid numbers of domains that do not exist.
    pub(crate) fn absent_domains(&self) -> impl Iterator<Item = u32> + use<> {
        let (mut first, mut last) = (0, u32::MAX);
        if self.offers(VIRTIO_IOMMU_F_DOMAIN_RANGE) {
            first = self.config32(CONFIG_DOMAIN_RANGE);
            last = self.config32(CONFIG_DOMAIN_RANGE + 4);
        }
        let all = [0, 9, u32::MAX].into_iter();
        all.filter(move |domain| (first..=last).contains(domain))
    }

    /// Returns the size of the list of properties, at most 64 KiB.
    pub(crate) fn probe_size(&self) -> usize {
        self.config32(CONFIG_PROBE_SIZE).min(1 << 16) as usize
    }
}

/// The used length and the content of a reply.
pub(crate) type Sent = Result<(usize, Vec<u8>), Failure>;

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u32::from_le_bytes)
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from(le32(bytes, at)) | u64::from(le32(bytes, at + 4)) << 32
}

/// Returns the text of a request.
fn show(request: &[u8]) -> String {
    let kind = request.first().copied().unwrap_or_default();
    let domain = le32(request, 4);
    match (kind, request.len()) {
        (VIRTIO_IOMMU_T_ATTACH, ATTACH_BYTES) => format!(
            "ATTACH {:#x} to {domain} flags {:#x} reserved {:#x}",
            le32(request, 8),
            le32(request, 12),
            le32(request, 16)
        ),
        (VIRTIO_IOMMU_T_DETACH, DETACH_BYTES) => {
            format!("DETACH {:#x} from {domain}", le32(request, 8))
        }
        (VIRTIO_IOMMU_T_MAP, MAP_BYTES) => format!(
            "MAP {:#x} to {:#x} in {domain} at {:#x} flags {:#x}",
            le64(request, 8),
            le64(request, 16),
            le64(request, 24),
            le32(request, 32)
        ),
        (VIRTIO_IOMMU_T_UNMAP, UNMAP_BYTES) => format!(
            "UNMAP {:#x} to {:#x} in {domain}",
            le64(request, 8),
            le64(request, 16)
        ),
        (VIRTIO_IOMMU_T_PROBE, PROBE_BYTES) => format!("PROBE {domain:#x}"),
        (_, length) => format!("type {kind} of {length} bytes"),
    }
}

/// Returns the text of a reply.
fn outcome(used: usize, reply: &[u8]) -> String {
    const NAMES: [&str; 9] = [
        "OK", "IOERR", "UNSUPP", "DEVERR", "INVAL", "RANGE", "NOENT", "FAULT", "NOMEM",
    ];
    if reply.iter().all(|byte| *byte == UNTOUCHED) {
        return format!("nothing written, used length {used}");
    }
    let room = reply.len();
    let status = room.checked_sub(TAIL_BYTES).filter(|_| used == room);
    let status = status.and_then(|at| reply.get(at)).copied();
    match status.and_then(|status| NAMES.get(usize::from(status))) {
        Some(name) if room == TAIL_BYTES => (*name).into(),
        Some(name) => format!("{name}, {used} bytes used"),
        None => {
            let shown = reply.get(..8).unwrap_or(reply);
            format!("{used} of {room} bytes used, the first are {shown:02x?}")
        }
    }
}

fn request(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    for field in fields {
        bytes.extend_from_slice(field);
    }
    bytes
}

pub(crate) fn attach(domain: u32, endpoint: u32, flags: u32, reserved: u32) -> Vec<u8> {
    let fields = [domain, endpoint, flags, reserved].map(u32::to_le_bytes);
    let [domain, endpoint, flags, reserved] = &fields;
    request(VIRTIO_IOMMU_T_ATTACH, &[domain, endpoint, flags, reserved])
}

pub(crate) fn detach(domain: u32, endpoint: u32, reserved: u64) -> Vec<u8> {
    let (domain, endpoint) = (domain.to_le_bytes(), endpoint.to_le_bytes());
    let reserved = reserved.to_le_bytes();
    request(VIRTIO_IOMMU_T_DETACH, &[&domain, &endpoint, &reserved])
}

pub(crate) fn map(domain: u32, start: u64, last: u64, to: u64, flags: u32) -> Vec<u8> {
    let (domain, flags) = (domain.to_le_bytes(), flags.to_le_bytes());
    let [start, last, to] = &[start, last, to].map(u64::to_le_bytes);
    request(VIRTIO_IOMMU_T_MAP, &[&domain, start, last, to, &flags])
}

pub(crate) fn unmap(domain: u32, start: u64, last: u64, reserved: u32) -> Vec<u8> {
    let (domain, reserved) = (domain.to_le_bytes(), reserved.to_le_bytes());
    let [start, last] = &[start, last].map(u64::to_le_bytes);
    request(VIRTIO_IOMMU_T_UNMAP, &[&domain, start, last, &reserved])
}

pub(crate) fn probe(endpoint: u32, reserved: u8) -> Vec<u8> {
    request(
        VIRTIO_IOMMU_T_PROBE,
        &[&endpoint.to_le_bytes(), &[reserved; 64]],
    )
}
