//! Descriptors of the invalidation queue (VT-d specification, section 6.5.2).
//!
//! Software writes descriptors of 128 bits to a queue in memory and moves the tail register. A
//! driver encodes them; a virtual machine monitor that emulates a unit decodes them.

use ringfence_types::{
    CachedLevels, DomainId, Invalidation, IovaRange, Pasid, Pfn, PfnRange, PhysAddr, RequesterId,
};

/// Type of the descriptor, bits 0..=3.
const TYPE: u64 = 0xf;
const TYPE_CONTEXT: u64 = 0x1;
const TYPE_IOTLB: u64 = 0x2;
const TYPE_WAIT: u64 = 0x5;
const TYPE_PASID_IOTLB: u64 = 0x6;
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
/// PASID, bits 32..=51 of a PASID-based IOTLB descriptor.
const PASID_SHIFT: u32 = 32;
const PASID: u64 = 0xf_ffff;
/// AM, bits 0..=5 of the high word: address mask.
const AM: u64 = 0x3f;
/// IH, bit 6 of the high word: invalidation hint, leaves only.
const IH: u64 = 1 << 6;
const ADDR: u64 = !0xfff;
/// SW, bit 5 of a wait descriptor: status write.
const STATUS_WRITE: u64 = 1 << 5;
/// Status data, bits 32..=63 of a wait descriptor.
const DATA_SHIFT: u32 = 32;

/// A request in the queue, or the wait for earlier ones.
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
        /// Domain whose id tags the entries.
        domain: DomainId,
        /// Pages to invalidate, as many as the address mask says.
        range: PfnRange,
        /// The kinds of entries.
        levels: CachedLevels,
    },
    /// PASID-based IOTLB invalidate, PASID-selective: a whole first stage.
    FirstStage {
        /// Domain of the second stage.
        domain: DomainId,
        /// Tag of the first stage.
        pasid: Pasid,
    },
    /// PASID-based IOTLB invalidate, page-selective within PASID: an aligned power of two of pages.
    FirstStagePages {
        /// Domain of the second stage.
        domain: DomainId,
        /// Tag of the first stage.
        pasid: Pasid,
        /// Pages to invalidate, as many as the address mask says.
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

    /// Returns the descriptor that covers `request` in the first stage `pasid`, as the owner of the
    /// stage chooses it. A request for several domains has that of [`covering`](Self::covering).
    pub fn covering_first_stage(request: &Invalidation, pasid: Pasid) -> Option<Self> {
        let descriptor = Self::covering(request)?;
        Some(match descriptor {
            Self::IotlbDomain(domain) => Self::FirstStage { domain, pasid },
            Self::IotlbPages {
                domain,
                range,
                levels,
            } => Self::FirstStagePages {
                domain,
                pasid,
                range,
                levels,
            },
            other => other,
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
                let low = iotlb(SELECTIVE, domain.get().into());
                [low, address_word(range, *levels)]
            }
            Self::FirstStage { domain, pasid } => [first_stage(DOMAIN, *domain, *pasid), 0],
            Self::FirstStagePages {
                domain,
                pasid,
                range,
                levels,
            } => {
                let low = first_stage(SELECTIVE, *domain, *pasid);
                [low, address_word(range, *levels)]
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
    /// [`MAX_MASK`](Self::MAX_MASK). Also for a wait without a status write, which this model
    /// lacks.
    pub fn decode([low, high]: [u64; 2]) -> Result<Self, BadDescriptor> {
        let bad = BadDescriptor([low, high]);
        let domain = DomainId::new((low >> DID_SHIFT) as u16);
        let pasid = Pasid::new((low >> PASID_SHIFT & PASID) as u32).ok_or(bad)?;
        match (low & TYPE, low >> GRANULARITY_SHIFT & GRANULARITY) {
            (TYPE_CONTEXT, SELECTIVE) => {
                Ok(Self::Context(RequesterId::new((low >> SID_SHIFT) as u16)))
            }
            // Domain-selective: the model keeps no domain for each context, so it drops all.
            (TYPE_CONTEXT, GLOBAL | DOMAIN) => Ok(Self::AllContexts),
            (TYPE_IOTLB, GLOBAL) => Ok(Self::IotlbGlobal),
            (TYPE_IOTLB, DOMAIN) => Ok(Self::IotlbDomain(domain)),
            (TYPE_IOTLB, SELECTIVE) => {
                let (range, levels) = pages(high).ok_or(bad)?;
                Ok(Self::IotlbPages {
                    domain,
                    range,
                    levels,
                })
            }
            (TYPE_PASID_IOTLB, DOMAIN) => Ok(Self::FirstStage { domain, pasid }),
            (TYPE_PASID_IOTLB, SELECTIVE) => {
                let (range, levels) = pages(high).ok_or(bad)?;
                Ok(Self::FirstStagePages {
                    domain,
                    pasid,
                    range,
                    levels,
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

/// Returns the low word of a PASID-based IOTLB descriptor.
fn first_stage(granularity: u64, domain: DomainId, pasid: Pasid) -> u64 {
    TYPE_PASID_IOTLB
        | granularity << GRANULARITY_SHIFT
        | u64::from(domain.get()) << DID_SHIFT
        | u64::from(pasid.get()) << PASID_SHIFT
}

/// Returns the high word of a page-selective descriptor: ADDR, IH and AM.
fn address_word(range: &PfnRange, levels: CachedLevels) -> u64 {
    let hint = match levels {
        CachedLevels::Leaves => IH,
        CachedLevels::All => 0,
    };
    let mask = u64::from(range.pages().trailing_zeros()) & AM;
    range.lo().iova().get() | hint | mask
}

/// Decodes the high word of a page-selective descriptor; `None` if the mask is too large.
fn pages(high: u64) -> Option<(PfnRange, CachedLevels)> {
    let mask = (high & AM) as u32;
    if mask > InvalidationDescriptor::MAX_MASK {
        return None;
    }
    let levels = if high & IH == 0 {
        CachedLevels::All
    } else {
        CachedLevels::Leaves
    };
    Some((aligned((high & ADDR) >> 12, mask), levels))
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

    fn request(lo: u64, hi: u64, levels: CachedLevels) -> Invalidation {
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
            (request(5, 5, leaves), [0x7_00f2, 0x5040]),
            (request(4, 5, CachedLevels::All), [0x7_00f2, 0x4001]),
            (request(7, 8, leaves), [0x7_00f2, 0x44]),
            (request(0, (1 << 18) - 1, leaves), [0x7_00f2, 0x52]),
            // Beyond the largest mask.
            (request(0, 1 << 18, leaves), [0x7_00e2, 0]),
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

    /// The descriptors of a first stage carry its PASID. Global requests have no PASID.
    #[test]
    fn golden_bits_of_a_first_stage() {
        let pasid = Pasid::new(0xa_bcde).unwrap();
        let leaves = CachedLevels::Leaves;
        for (request, words) in [
            (request(5, 5, leaves), [0xa_bcde_0007_0036, 0x5040]),
            (
                request(4, 5, CachedLevels::All),
                [0xa_bcde_0007_0036, 0x4001],
            ),
            (request(0, 1 << 18, leaves), [0xa_bcde_0007_0026, 0]),
            (
                Invalidation::Domain(DomainId::new(9)),
                [0xa_bcde_0009_0026, 0],
            ),
            (Invalidation::Global, [0xd2, 0]),
        ] {
            let descriptor = InvalidationDescriptor::covering_first_stage(&request, pasid);
            let descriptor = descriptor.unwrap();
            assert_eq!(descriptor.encode(), words, "{request:?}");
            assert_eq!(InvalidationDescriptor::decode(words), Ok(descriptor));
        }
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
            // The same for a first stage, and its reserved granularities.
            [0x36, 19],
            [0x6, 0],
            [0x16, 0],
            // No status write, and a misaligned status.
            [0x5, 0x1000],
            [0x25, 0x1002],
        ] {
            let found = InvalidationDescriptor::decode(words);
            assert_eq!(found, Err(BadDescriptor(words)), "{words:x?}");
        }
    }
}
