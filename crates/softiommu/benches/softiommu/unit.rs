//! Test fixtures: units, vm-memory's `Iotlb`, and addresses mapped in both.

use ringfence_softiommu::{DomainMut, SoftIommu, SoftIommuLimits};
use ringfence_types::{DomainId, Iova, IovaRange, Permissions, PhysAddr, RequesterId};
use std::hint::black_box;
use vm_memory::iommu::Iotlb;
use vm_memory::{GuestAddress, GuestMemoryMmap, Permissions as Wanted};

use crate::ACCESSES;

pub(crate) const DISK: RequesterId = RequesterId::new(0x20);
pub(crate) const DOMAIN: DomainId = DomainId::new(1);
pub(crate) const PAGE: u64 = 1 << 12;
pub(crate) const MEMORY: u64 = 64 << 20;
/// The highest page number: Linux allocates IOVAs below 4 GiB, descending.
const TOP: u64 = 0xf_ffff;

/// Returns the frame that live page `n` is mapped to.
pub(crate) fn frame(n: u64) -> u64 {
    (n * 7919) % (MEMORY / PAGE)
}

pub(crate) fn page(n: u64) -> IovaRange {
    IovaRange::new(Iova::new((TOP - n) * PAGE), PAGE).expect("no wrap")
}

pub(crate) fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).expect("memory")
}

pub(crate) fn unit(live: u64) -> SoftIommu<GuestMemoryMmap> {
    let mut unit = SoftIommu::new(SoftIommuLimits::default(), memory());
    unit.add_endpoint(DISK).expect("room");
    let mut domain = unit.create_domain(DOMAIN).expect("room");
    for n in 0..live {
        let to = PhysAddr::new(frame(n) * PAGE);
        domain
            .map(page(n), to, Permissions::READ_WRITE)
            .expect("room");
    }
    unit.attach(DISK, DOMAIN).expect("there");
    unit
}

pub(crate) fn iotlb(live: u64) -> Iotlb {
    let mut iotlb = Iotlb::new();
    for n in 0..live {
        let (at, to) = (
            GuestAddress(page(n).start().get()),
            GuestAddress(frame(n) * PAGE),
        );
        iotlb
            .set_mapping(at, to, PAGE as usize, Wanted::ReadWrite)
            .expect("set");
    }
    iotlb
}

/// Returns live addresses of 8-byte objects in random order, each within a page.
pub(crate) fn addresses(live: u64) -> Vec<u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    (0..ACCESSES)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            page(state % live).start().get() + (state >> 40) % 511 * 8
        })
        .collect()
}

pub(crate) fn eight(at: u64) -> IovaRange {
    IovaRange::new(Iova::new(at), 8).expect("no wrap")
}

pub(crate) fn again(domain: &mut DomainMut<'_, GuestMemoryMmap>, range: IovaRange) {
    let unmapped = domain.unmap(range);
    let mapped = domain.map(range, PhysAddr::new(PAGE), Permissions::READ_WRITE);
    black_box((unmapped.is_ok(), mapped.is_ok()));
}

pub(crate) fn pages_of(addresses: &[u64]) -> Vec<IovaRange> {
    addresses
        .iter()
        .filter_map(|at| IovaRange::new(Iova::new(at & !(PAGE - 1)), PAGE))
        .collect()
}
