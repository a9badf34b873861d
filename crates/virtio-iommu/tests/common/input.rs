//! Decodes the bytes of a session: options, endpoints, domains, addresses. The values are few, so
//! that requests collide.

use ringfence_types::{Iova, IovaRange, PhysAddr, PhysRange};
use ringfence_virtio_iommu::{
    BypassPolicy, DomainId, DomainRange, Options, ReservedRegionKind, VirtioIommuLimits,
};

/// The remaining bytes; zeroes after the end.
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

/// First and last address, and kind.
pub(crate) type Region = (u64, u64, ReservedRegionKind);

/// Initial endpoints of a session and their reserved regions.
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

/// Returns an address: low pages, reserved ones and the end of the address space, sometimes not
/// page-aligned.
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

/// Returns the first and last address of a range: some pages, up to the end of the address space,
/// or backwards.
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

/// Returns a domain: few of them, so that requests collide, and one out of range.
pub(crate) fn domain(byte: u8) -> u32 {
    match byte & 7 {
        7 => u32::MAX,
        low => u32::from(low),
    }
}

/// Returns an endpoint: an existing one or an unknown one.
pub(crate) fn endpoint(byte: u8) -> u32 {
    match byte & 7 {
        0 | 1 => 8,
        2 | 3 => 9,
        4 | 5 => 0x1_0000,
        6 => 77,
        _ => u32::MAX,
    }
}
