//! A30 on virtio-iommu: requests that no correct driver sends.

use ringfence_lab::LabError;
use ringfence_lab::modes::Owner;
use ringfence_types::{Access, Iova, IovaRange, PhysAddr, PhysRange};
use ringfence_virtio_iommu::lazy::{
    IOTLB_FLUSH_BYTES, VIRTIO_IOMMU_ATTACH_F_LAZY, VIRTIO_IOMMU_T_IOTLB_FLUSH,
};
use ringfence_virtio_iommu::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, PROBE_BYTES, UNMAP_BYTES, VIRTIO_IOMMU_ATTACH_F_BYPASS,
    VIRTIO_IOMMU_MAP_F_MMIO, VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE,
    VIRTIO_IOMMU_T_ATTACH, VIRTIO_IOMMU_T_DETACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_PROBE,
    VIRTIO_IOMMU_T_UNMAP,
};
use ringfence_virtio_iommu::{
    AccessTarget, Device, DomainId, DomainRange, EndpointId, Options, ReservedRegion,
    ReservedRegionKind,
};

use super::ScenarioResult;
use crate::evidence::{Evidence, Executed, Found};
use crate::guest_host::{GUEST_BYTES, PAGE, WINDOW};

/// Endpoints of the guest. Each is in the domain of its number.
const ATTACKER: u32 = 1;
const VICTIM: u32 = 2;
/// An endpoint of the host, and a domain that does not exist.
const UNKNOWN: u32 = 9;
/// The last domain that the device has.
const LAST_DOMAIN: u32 = 100;
/// Memory of the host outside the guest.
const SECRET: u64 = 0x1234_5000;
/// Window of message signaled interrupts, where no MAP may be.
const DOORBELLS: u64 = 0xfee0_0000;
const READ: u32 = VIRTIO_IOMMU_MAP_F_READ;
const BOTH: u32 = VIRTIO_IOMMU_MAP_F_READ | VIRTIO_IOMMU_MAP_F_WRITE;

const NO_HOST: LabError = LabError::Internal("a virtio-iommu device that cannot be built");

/// A device that answers the translations of its endpoints itself.
struct Host(Device<()>);

impl Host {
    /// Creates the device with both endpoints. The victim's has two pages for reading. The domains
    /// are in lazy mode if `lazy` is set.
    fn new(lazy: bool) -> Result<Self, LabError> {
        let physical = PhysRange::new(PhysAddr::ZERO, GUEST_BYTES).ok_or(NO_HOST)?;
        let doorbells = IovaRange::new(Iova::new(DOORBELLS), 1 << 20).ok_or(NO_HOST)?;
        let options = Options {
            physical,
            domains: DomainRange {
                first: DomainId::new(1),
                last: DomainId::new(LAST_DOMAIN),
            },
            lazy_domains: lazy,
            ..Options::default()
        };
        let mut device = Device::new(options, ()).map_err(|_| NO_HOST)?;
        device.accept_features(device.features());
        let reserved = [ReservedRegion {
            range: doorbells,
            kind: ReservedRegionKind::Msi,
        }];
        let mut host = Self(device);
        for endpoint in [ATTACKER, VICTIM] {
            let added = host.0.add_endpoint(EndpointId::new(endpoint), &reserved);
            added.map_err(|_| NO_HOST)?;
            host.expect(&attach(endpoint, endpoint, mode_flag(lazy)))?;
        }
        host.expect(&map(VICTIM, [WINDOW, WINDOW + 2 * PAGE - 1], 0, READ))?;
        Ok(host)
    }

    /// Handles a request. Returns true if the device executed it.
    fn handle(&mut self, request: &[u8]) -> bool {
        let mut reply = vec![0; self.0.max_reply_bytes()];
        let handled = self.0.handle(request, &mut reply);
        handled.is_ok_and(|outcome| outcome.result.is_ok())
    }

    fn expect(&mut self, request: &[u8]) -> Result<(), LabError> {
        match self.handle(request) {
            true => Ok(()),
            false => Err(LabError::Internal("a request that the host refuses")),
        }
    }

    /// Returns the memory that an endpoint reaches at `iova`.
    fn reach(&self, endpoint: u32, iova: u64, access: Access) -> Option<PhysAddr> {
        let range = IovaRange::new(Iova::new(iova), 1)?;
        let found = self.0.translate(EndpointId::new(endpoint), range, access);
        match found {
            Ok(AccessTarget::Memory { physical, .. }) => Some(physical.start()),
            _ => None,
        }
    }

    /// Returns what the victim reaches: both pages, read and written.
    fn victim(&self) -> [Option<PhysAddr>; 4] {
        let at = |iova, access| self.reach(VICTIM, iova, access);
        [
            at(WINDOW, Access::Read),
            at(WINDOW + PAGE, Access::Read),
            at(WINDOW, Access::Write),
            at(WINDOW + PAGE, Access::Write),
        ]
    }
}

/// Encodes a request of `BYTES` bytes: its type, and 32-bit and 64-bit fields at their offsets.
fn request<const BYTES: usize>(kind: u8, half: &[(usize, u32)], full: &[(usize, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    bytes[0] = kind;
    for (at, field) in half {
        bytes[*at..at + 4].copy_from_slice(&field.to_le_bytes());
    }
    for (at, field) in full {
        bytes[*at..at + 8].copy_from_slice(&field.to_le_bytes());
    }
    bytes
}

fn attach(domain: u32, endpoint: u32, flags: u32) -> Vec<u8> {
    let fields = [(4, domain), (8, endpoint), (12, flags)];
    request::<ATTACH_BYTES>(VIRTIO_IOMMU_T_ATTACH, &fields, &[])
}

fn map(domain: u32, [start, last]: [u64; 2], physical: u64, flags: u32) -> Vec<u8> {
    let (half, full) = (
        [(4, domain), (32, flags)],
        [(8, start), (16, last), (24, physical)],
    );
    request::<MAP_BYTES>(VIRTIO_IOMMU_T_MAP, &half, &full)
}

fn unmap(domain: u32, [start, last]: [u64; 2]) -> Vec<u8> {
    let full = [(8, start), (16, last)];
    request::<UNMAP_BYTES>(VIRTIO_IOMMU_T_UNMAP, &[(4, domain)], &full)
}

/// Returns the flag of an ATTACH to a domain in lazy mode, or in strict mode.
const fn mode_flag(lazy: bool) -> u32 {
    if lazy { VIRTIO_IOMMU_ATTACH_F_LAZY } else { 0 }
}

/// A request that no correct driver sends, and one that a correct driver may send in its place.
struct Pair {
    forged: Vec<u8>,
    valid: Vec<u8>,
}

/// Attachments of an endpoint of the host, to a domain out of range, and with flags that were not
/// negotiated or contradict the domain.
fn attachments(lazy: bool) -> Vec<Pair> {
    let own = mode_flag(lazy);
    let valid = || attach(3, ATTACKER, own);
    let pair = |forged, valid| Pair { forged, valid };
    let mut pairs = vec![
        pair(attach(3, UNKNOWN, own), valid()),
        pair(attach(0, ATTACKER, own), valid()),
        pair(
            attach(LAST_DOMAIN + 1, ATTACKER, own),
            attach(LAST_DOMAIN, ATTACKER, own),
        ),
        pair(
            attach(3, ATTACKER, own | VIRTIO_IOMMU_ATTACH_F_BYPASS),
            valid(),
        ),
        pair(attach(3, ATTACKER, own | 1 << 30), valid()),
        pair(
            request::<DETACH_BYTES>(VIRTIO_IOMMU_T_DETACH, &[(4, VICTIM), (8, ATTACKER)], &[]),
            request::<DETACH_BYTES>(VIRTIO_IOMMU_T_DETACH, &[(4, ATTACKER), (8, ATTACKER)], &[]),
        ),
    ];
    // The other mode: of a domain that exists, or of any domain if it was not negotiated.
    let other = VIRTIO_IOMMU_ATTACH_F_LAZY ^ own;
    let domain = if lazy { VICTIM } else { 3 };
    pairs.push(pair(
        attach(domain, ATTACKER, other),
        attach(domain, ATTACKER, own),
    ));
    pairs
}

/// Maps of memory of the host, of ranges that are none, and with flags that were not negotiated.
fn maps() -> Vec<Pair> {
    let page = [WINDOW, WINDOW + PAGE - 1];
    let two = [WINDOW, WINDOW + 2 * PAGE - 1];
    let valid = || map(ATTACKER, page, 0, BOTH);
    let pair = |forged, valid| Pair { forged, valid };
    let mut short = valid();
    short.truncate(MAP_BYTES - 1);
    let mut unknown = valid();
    unknown[0] = 0x77;
    let end = GUEST_BYTES - PAGE;
    vec![
        // Memory of the host, also behind a valid page, and a range that wraps.
        pair(
            map(ATTACKER, page, SECRET, BOTH),
            map(ATTACKER, page, end, BOTH),
        ),
        pair(
            map(ATTACKER, two, end, BOTH),
            map(ATTACKER, two, end - PAGE, BOTH),
        ),
        pair(
            map(ATTACKER, two, u64::MAX - PAGE + 1, BOTH),
            map(ATTACKER, two, 0, BOTH),
        ),
        // A misaligned end, start and target; a range that ends before it begins; the doorbells.
        pair(map(ATTACKER, [WINDOW, WINDOW + 99], 0, BOTH), valid()),
        pair(
            map(ATTACKER, [WINDOW + 99, WINDOW + PAGE - 1], 0, BOTH),
            valid(),
        ),
        pair(map(ATTACKER, page, 99, BOTH), valid()),
        pair(
            map(ATTACKER, [WINDOW + PAGE, WINDOW - 1], 0, BOTH),
            map(ATTACKER, [WINDOW + PAGE, WINDOW + 2 * PAGE - 1], 0, BOTH),
        ),
        pair(
            map(ATTACKER, [DOORBELLS, DOORBELLS + PAGE - 1], 0, BOTH),
            map(ATTACKER, [DOORBELLS - PAGE, DOORBELLS - 1], 0, BOTH),
        ),
        // A domain without an endpoint, flags that were not negotiated, and a missing byte.
        pair(map(UNKNOWN, page, 0, BOTH), valid()),
        pair(
            map(ATTACKER, page, 0, BOTH | VIRTIO_IOMMU_MAP_F_MMIO),
            valid(),
        ),
        pair(map(ATTACKER, page, 0, BOTH | 1 << 31), valid()),
        pair(short, valid()),
        // More rights for a mapping, an unknown type, and no byte at all.
        pair(
            map(VICTIM, two, 0, BOTH),
            map(VICTIM, [WINDOW + 2 * PAGE, WINDOW + 4 * PAGE - 1], 0, BOTH),
        ),
        pair(unknown, valid()),
        pair(Vec::new(), valid()),
    ]
}

/// Unmaps of parts, and requests for domains and endpoints that the guest does not have.
fn others(lazy: bool) -> Vec<Pair> {
    let two = [WINDOW, WINDOW + 2 * PAGE - 1];
    let valid = || unmap(VICTIM, two);
    let pair = |forged, valid| Pair { forged, valid };
    let flush =
        |domain| request::<IOTLB_FLUSH_BYTES>(VIRTIO_IOMMU_T_IOTLB_FLUSH, &[(4, domain)], &[]);
    let probe = |endpoint| request::<PROBE_BYTES>(VIRTIO_IOMMU_T_PROBE, &[(4, endpoint)], &[]);
    vec![
        pair(unmap(VICTIM, [WINDOW, WINDOW + PAGE - 1]), valid()),
        pair(unmap(VICTIM, [WINDOW + PAGE, two[1]]), valid()),
        pair(unmap(VICTIM, [two[1], WINDOW]), valid()),
        pair(unmap(UNKNOWN, two), valid()),
        // A flush of a domain that does not exist, or that was not negotiated.
        match lazy {
            true => pair(flush(UNKNOWN), flush(VICTIM)),
            false => pair(flush(VICTIM), valid()),
        },
        // The properties of the host's endpoint.
        pair(probe(UNKNOWN), probe(ATTACKER)),
    ]
}

/// A30: the guest sends forged requests. The attack succeeds if the device executes one, the
/// attacker's endpoint reaches memory, or the victim's access changes. The device must execute the
/// valid request beside each.
pub(super) fn requests(owner: Owner) -> ScenarioResult {
    let lazy = owner == Owner::VirtioIommuLazy;
    let mut evidence = Evidence::default();
    for Pair { forged, valid } in attachments(lazy)
        .into_iter()
        .chain(maps())
        .chain(others(lazy))
    {
        Host::new(lazy)?.expect(&valid)?;
        let mut host = Host::new(lazy)?;
        let before = host.victim();
        let executed = host.handle(&forged);
        let reached = [WINDOW, WINDOW + PAGE, DOORBELLS]
            .into_iter()
            .any(|iova| host.reach(ATTACKER, iova, Access::Read).is_some());
        let changed = host.victim() != before;
        evidence.count_if(executed || reached || changed, u64::from(reached));
    }
    let mut executed = Executed::default();
    let name = match lazy {
        true => "device with lazy domains checks requests",
        false => "device checks requests",
    };
    executed.trial(name, evidence);
    Ok(Found::Executed(executed))
}
