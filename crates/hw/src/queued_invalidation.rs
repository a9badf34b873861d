//! Descriptors of the invalidation queue (VT-d specification, section 6.5.2).
//!
//! Software writes descriptors of 128 bits to a queue in memory and moves the tail register. A
//! driver encodes them; a virtual machine monitor that emulates a unit decodes them.

use ringfence_types::{
    CachedLevels, DomainId, Invalidation, IovaRange, Pfn, PfnRange, PhysAddr, RequesterId,
};

/// Type of the descriptor, bits 0..=3.
const TYPE: u64 = 0xf;
const TYPE_CONTEXT: u64 = 0x1;
const TYPE_IOTLB: u64 = 0x2;
const TYPE_WAIT: u64 = 0x5;
/// G, bits 4..=5: granularity.
const GRANULARITY_SHIFT: u32 = 4;
const GRANULARITY: u64 = 0b11;
const GLOBAL: u64 = 0b01;
const DOMAIN: u64 = 0b10;
const SELECTIVE: u64 = 0b11;
/// DW and DR, bits 6 and 7 of an IOTLB descriptor: drain writes and reads.
const DRAIN: u64 = 0b11 << 6;
/// DID, bits 16..=31.
const DID_SHIFT: u32 = 16;
/// SID, bits 32..=47 of a context descriptor.
const SID_SHIFT: u32 = 32;
/// AM, bits 0..=5 of the high word: address mask.
const AM: u64 = 0x3f;
/// IH, bit 6 of the high word: invalidation hint, leaves only.
const IH: u64 = 1 << 6;
const ADDR: u64 = !0xfff;
/// SW, bit 5 of a wait descriptor: status write.
const STATUS_WRITE: u64 = 1 << 5;
/// Status data, bits 32..=63 of a wait descriptor.
const DATA_SHIFT: u32 = 32;

/// A descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InvalidationDescriptor {
    /// Context-cache invalidate, for one device.
    Context(RequesterId),
    /// Context-cache invalidate, for all devices.
    AllContexts,
    /// IOTLB invalidate, global.
    IotlbGlobal,
    /// IOTLB invalidate, domain-selective.
    IotlbDomain(DomainId),
    /// IOTLB invalidate, page-selective within domain: an aligned power of two of pages.
    IotlbPages {
        /// The domain.
        domain: DomainId,
        /// The pages.
        range: PfnRange,
        /// The kinds of entries.
        levels: CachedLevels,
    },
    /// Invalidation wait with a status write: after all descriptors before it.
    Wait {
        /// Address of the status word, 4-byte aligned.
        status: PhysAddr,
        /// The value to write.
        data: u32,
    },
}

/// Error: a descriptor is malformed (Invalidation Queue Error, IQE). The queue stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadDescriptor(pub [u64; 2]);

impl core::fmt::Display for BadDescriptor {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [low, high] = self.0;
        write!(
            f,
            "malformed invalidation descriptor {high:016x} {low:016x}"
        )
    }
}

impl core::error::Error for BadDescriptor {}

impl InvalidationDescriptor {
    /// Largest address mask (MAMV): 2^18 pages, 1 GiB.
    pub const MAX_MASK: u32 = 18;

    /// Returns the descriptor that covers `request`, as a driver chooses it: a range beyond the
    /// largest mask becomes domain-selective. `None` for a ring, which VT-d does not have.
    pub fn covering(request: &Invalidation) -> Option<Self> {
        Some(match request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => {
                let differing = range.lo().get() ^ range.hi().get();
                let mask = u64::BITS.wrapping_sub(differing.leading_zeros());
                if mask > Self::MAX_MASK {
                    Self::IotlbDomain(*domain)
                } else {
                    Self::IotlbPages {
                        domain: *domain,
                        range: aligned(range.lo().get(), mask),
                        levels: *levels,
                    }
                }
            }
            Invalidation::Domain(domain) => Self::IotlbDomain(*domain),
            Invalidation::Global => Self::IotlbGlobal,
            Invalidation::Context(device) => Self::Context(*device),
            Invalidation::Ring { .. } => return None,
        })
    }

    /// Encodes the descriptor, low word first. IOTLB descriptors drain reads and writes.
    pub fn encode(&self) -> [u64; 2] {
        let iotlb = |granularity: u64, domain: u64| {
            TYPE_IOTLB | granularity << GRANULARITY_SHIFT | DRAIN | domain << DID_SHIFT
        };
        match self {
            Self::Context(device) => [
                TYPE_CONTEXT
                    | SELECTIVE << GRANULARITY_SHIFT
                    | u64::from(device.get()) << SID_SHIFT,
                0,
            ],
            Self::AllContexts => [TYPE_CONTEXT | GLOBAL << GRANULARITY_SHIFT, 0],
            Self::IotlbGlobal => [iotlb(GLOBAL, 0), 0],
            Self::IotlbDomain(domain) => [iotlb(DOMAIN, domain.get().into()), 0],
            Self::IotlbPages {
                domain,
                range,
                levels,
            } => {
                let hint = match levels {
                    CachedLevels::Leaves => IH,
                    CachedLevels::All => 0,
                };
                let mask = u64::from(range.pages().trailing_zeros()) & AM;
                [
                    iotlb(SELECTIVE, domain.get().into()),
                    range.lo().iova().get() | hint | mask,
                ]
            }
            Self::Wait { status, data } => [
                TYPE_WAIT | STATUS_WRITE | u64::from(*data) << DATA_SHIFT,
                status.get(),
            ],
        }
    }

    /// Decodes a descriptor as the hardware does.
    ///
    /// # Errors
    /// [`BadDescriptor`] for an unknown type, a reserved granularity, or a mask beyond
    /// [`MAX_MASK`](Self::MAX_MASK). Also for a wait without a status write, which this model lacks.
    pub fn decode([low, high]: [u64; 2]) -> Result<Self, BadDescriptor> {
        let bad = BadDescriptor([low, high]);
        let domain = DomainId::new((low >> DID_SHIFT) as u16);
        match (low & TYPE, low >> GRANULARITY_SHIFT & GRANULARITY) {
            (TYPE_CONTEXT, SELECTIVE) => {
                Ok(Self::Context(RequesterId::new((low >> SID_SHIFT) as u16)))
            }
            // Domain-selective: the model keeps no domain for each context, so it drops all.
            (TYPE_CONTEXT, GLOBAL | DOMAIN) => Ok(Self::AllContexts),
            (TYPE_IOTLB, GLOBAL) => Ok(Self::IotlbGlobal),
            (TYPE_IOTLB, DOMAIN) => Ok(Self::IotlbDomain(domain)),
            (TYPE_IOTLB, SELECTIVE) => {
                let mask = (high & AM) as u32;
                if mask > Self::MAX_MASK {
                    return Err(bad);
                }
                Ok(Self::IotlbPages {
                    domain,
                    range: aligned((high & ADDR) >> 12, mask),
                    levels: if high & IH == 0 {
                        CachedLevels::All
                    } else {
                        CachedLevels::Leaves
                    },
                })
            }
            (TYPE_WAIT, _) if low & STATUS_WRITE != 0 && high & 0b11 == 0 => Ok(Self::Wait {
                status: PhysAddr::new(high),
                data: (low >> DATA_SHIFT) as u32,
            }),
            _ => Err(bad),
        }
    }
}

/// Returns the aligned run of 2^mask pages that contains `page`.
fn aligned(page: u64, mask: u32) -> PfnRange {
    let low_bits = 1_u64.wrapping_shl(mask).wrapping_sub(1);
    let first = Pfn::new(page & !low_bits);
    let last = Pfn::new(page | low_bits);
    // `last` is not below `first`.
    PfnRange::inclusive(first, last).unwrap_or(PfnRange::covering(&IovaRange::ALL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(lo: u64, hi: u64, levels: CachedLevels) -> Invalidation {
        Invalidation::Pages {
            domain: DomainId::new(7),
            range: PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).unwrap(),
            levels,
        }
    }

    #[test]
    fn golden_bits() {
        let leaves = CachedLevels::Leaves;
        for (request, words) in [
            (pages(5, 5, leaves), [0x7_00f2, 0x5040]),
            (pages(4, 5, CachedLevels::All), [0x7_00f2, 0x4001]),
            (pages(7, 8, leaves), [0x7_00f2, 0x44]),
            (pages(0, (1 << 18) - 1, leaves), [0x7_00f2, 0x52]),
            // Beyond the largest mask.
            (pages(0, 1 << 18, leaves), [0x7_00e2, 0]),
            (
                Invalidation::Domain(DomainId::new(0xffff)),
                [0xffff_00e2, 0],
            ),
            (Invalidation::Global, [0xd2, 0]),
            (
                Invalidation::Context(RequesterId::new(0x3afd)),
                [0x3afd_0000_0031, 0],
            ),
        ] {
            let descriptor = InvalidationDescriptor::covering(&request).unwrap();
            assert_eq!(descriptor.encode(), words, "{request:?}");
            assert_eq!(InvalidationDescriptor::decode(words), Ok(descriptor));
        }
        let wait = InvalidationDescriptor::Wait {
            status: PhysAddr::new(0x1000),
            data: 9,
        };
        assert_eq!(wait.encode(), [0x9_0000_0025, 0x1000]);
        assert_eq!(InvalidationDescriptor::decode(wait.encode()), Ok(wait));
    }

    #[test]
    fn malformed_descriptors_are_refused() {
        for words in [
            [0, 0],
            [0xf, 0],
            // Reserved granularity.
            [0x2, 0],
            [0x1, 0],
            // A mask of 2^19 pages.
            [0x32, 19],
            // No status write, and a misaligned status.
            [0x5, 0x1000],
            [0x25, 0x1002],
        ] {
            let found = InvalidationDescriptor::decode(words);
            assert_eq!(found, Err(BadDescriptor(words)), "{words:x?}");
        }
    }
}
