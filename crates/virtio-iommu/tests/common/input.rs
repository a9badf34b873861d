//! What the bytes of a session stand for: options, endpoints, domains, addresses. Chosen so that
//! requests meet.

use ringfence_types::{Iova, IovaRange, PhysAddr, PhysRange};
use ringfence_virtio_iommu::{
    BypassPolicy, DomainId, DomainRange, Options, ReservedRegionKind, VirtioIommuLimits,
};

/// Bytes that are used up; then zeroes.
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// First and last address.
pub(crate) type Region = (u64, u64, ReservedRegionKind);

/// The endpoints that a session begins with, and what is reserved for them.
pub(crate) const ENDPOINTS: [(u32, &[Region]); 3] = [
    (8, &[]),
    (
        9,
        &[
            (0xfee0_0000, 0xfeef_ffff, ReservedRegionKind::Msi),
            (0x2_0000, 0x2_ffff, ReservedRegionKind::Reserved),
        ],
    ),
    (
        0x1_0000,
        &[(0x5_0000, 0x5_ffff, ReservedRegionKind::Reserved)],
    ),
];

pub(crate) fn options(byte: u8) -> Options {
    let narrow = byte & 0x80 != 0;
    let mut options = Options {
        page_size_mask: [!0xfff, !0, 0x1_0000, 0x20_1000][usize::from(byte & 3)],
        probe_bytes: [512, 0, 48, 100][usize::from(byte >> 2 & 3)],
        unattached: match byte >> 4 & 3 {
            0 => BypassPolicy::Deny,
            1 => BypassPolicy::DriverDecides {
                bypass_at_first: true,
            },
            _ => BypassPolicy::DriverDecides {
                bypass_at_first: false,
            },
        },
        mmio: byte & 0x40 != 0,
        ..Options::default()
    };
    if narrow {
        options.input = IovaRange::new(Iova::new(0x1_0000), 1 << 40).expect("a range");
        options.physical = PhysRange::new(PhysAddr::new(0x1_0000), 1 << 32).expect("a range");
        options.domains = DomainRange {
            first: DomainId::new(1),
            last: DomainId::new(1000),
        };
        options.limits = VirtioIommuLimits {
            mappings: 6,
            domains: 2,
            endpoints: 3,
            events: 2,
        };
    }
    options
}

/// An address: low pages, reserved ones and the end of the space, now and then not at the beginning
/// of a page.
pub(crate) fn address(byte: u8, granule: u64) -> u64 {
    let low = u64::from(byte & 63);
    match byte >> 6 {
        0 => granule.wrapping_mul(low),
        1 => 0x1_0000_u64.wrapping_add(0x1000 * low),
        2 if low < 32 => 0xfee0_0000 - 0x1_0000 + 0x1000 * low,
        2 => (low - 32) << 59 | 0x800,
        _ => granule.wrapping_mul(low).wrapping_sub(64 * granule),
    }
}

/// First and last address: some pages, to the end of the space, or backwards.
pub(crate) fn range(bytes: &mut Bytes<'_>, granule: u64) -> (u64, u64) {
    let start = address(bytes.next(), granule);
    let last = match bytes.next() {
        255 => u64::MAX,
        254 => start.wrapping_sub(1),
        253 => start,
        252 => start.wrapping_add(5),
        pages => {
            let bytes = granule.wrapping_mul(u64::from(pages & 15) + 1);
            start.wrapping_add(bytes).wrapping_sub(1)
        }
    };
    (start, last)
}

/// Few domains, so that requests meet; one far outside.
pub(crate) fn domain(byte: u8) -> u32 {
    match byte & 7 {
        7 => u32::MAX,
        low => u32::from(low),
    }
}

/// The endpoints, and some that are not there.
pub(crate) fn endpoint(byte: u8) -> u32 {
    match byte & 7 {
        0 | 1 => 8,
        2 | 3 => 9,
        4 | 5 => 0x1_0000,
        6 => 77,
        _ => u32::MAX,
    }
}
