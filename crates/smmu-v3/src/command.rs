//! The commands (IHI 0070, chapter 4).

use ringfence_types::PageSize;

const CFGI_STE: u64 = 0x03;
const CFGI_STE_RANGE: u64 = 0x04;
const CFGI_CD: u64 = 0x05;
const TLBI_NH_ALL: u64 = 0x10;
const TLBI_NH_ASID: u64 = 0x11;
const TLBI_NH_VA: u64 = 0x12;
const TLBI_S12_VMALL: u64 = 0x28;
const TLBI_S2_IPA: u64 = 0x2a;
const TLBI_NSNH_ALL: u64 = 0x30;
const SYNC: u64 = 0x46;

/// Range of `CMD_CFGI_STE_RANGE` that makes it `CMD_CFGI_ALL`.
const ALL_STREAMS: u64 = 31;
const LEAF: u64 = 1;
const NUM_SHIFT: u32 = 12;
const SCALE_SHIFT: u32 = 20;
const STREAM_SHIFT: u32 = 32;
const VMID_SHIFT: u32 = 32;
const ASID_SHIFT: u32 = 48;
const TG_SHIFT: u32 = 10;
const ADDRESS: u64 = 0xffff_ffff_ffff_f000;
/// An intermediate physical address has bits 12 to 55.
const INTERMEDIATE: u64 = 0x00ff_ffff_ffff_f000;

/// The addresses of an invalidation, and the kinds of entries (section 4.4.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) span: Span,
    /// Entries of the last level only.
    pub(crate) leaf: bool,
}

/// Addresses that one command can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first byte, aligned to the granule.
    pub(crate) first: u64,
    /// `None`: the entries that translate `first`, whatever their size.
    pub(crate) range: Option<Range>,
}

/// `(num + 1) << scale` granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) num: u32,
    pub(crate) scale: u32,
    pub(crate) granule: PageSize,
}

impl Addresses {
    const fn low(&self) -> u64 {
        match self.span.range {
            Some(range) => (range.num as u64) << NUM_SHIFT | (range.scale as u64) << SCALE_SHIFT,
            None => 0,
        }
    }

    /// TTL is zero: the leaves may lie at any level.
    const fn high(&self) -> u64 {
        let granule = match self.span.range {
            Some(range) => match range.granule.shift() {
                14 => 2,
                16 => 3,
                _ => 1,
            },
            None => 0,
        };
        let leaf = if self.leaf { LEAF } else { 0 };
        leaf | granule << TG_SHIFT
    }
}

/// A command of the queue (chapter 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    /// `CMD_CFGI_STE`: the entry of a stream and the context descriptors cached through it; without
    /// `leaf` also the descriptor of the first level.
    StreamEntry { stream: u32, leaf: bool },
    /// Invalidates all configuration: `CMD_CFGI_ALL`.
    AllStreams,
    /// `CMD_CFGI_CD`: the only context descriptor of a stream.
    Context { stream: u32 },
    /// `CMD_TLBI_NH_ALL`: all entries of stage 1 of a VMID.
    Stage1 { vmid: u16 },
    /// Invalidates the entries of an ASID: `CMD_TLBI_NH_ASID`.
    Stage1Space { vmid: u16, asid: u16 },
    /// `CMD_TLBI_NH_VA`, for VMID 0.
    Stage1Pages { asid: u16, addresses: Addresses },
    /// `CMD_TLBI_S12_VMALL`: all entries of both stages of a VMID.
    BothStages { vmid: u16 },
    /// Invalidates intermediate addresses of a VMID: `CMD_TLBI_S2_IPA`.
    Stage2Pages { vmid: u16, addresses: Addresses },
    /// `CMD_TLBI_NSNH_ALL`: all entries of the streams of this driver.
    AllTranslations,
    /// `CMD_SYNC` without a signal: later commands wait until earlier ones are complete.
    Sync,
}

impl Command {
    pub(crate) const fn encode(&self) -> [u64; 2] {
        match self {
            Self::StreamEntry { stream, leaf } => {
                let leaf = if *leaf { LEAF } else { 0 };
                [CFGI_STE | (*stream as u64) << STREAM_SHIFT, leaf]
            }
            Self::AllStreams => [CFGI_STE_RANGE, ALL_STREAMS],
            Self::Context { stream } => [CFGI_CD | (*stream as u64) << STREAM_SHIFT, LEAF],
            Self::Stage1 { vmid } => [TLBI_NH_ALL | tag(*vmid, 0), 0],
            Self::Stage1Space { vmid, asid } => [TLBI_NH_ASID | tag(*vmid, *asid), 0],
            Self::Stage1Pages { asid, addresses } => [
                TLBI_NH_VA | tag(0, *asid) | addresses.low(),
                addresses.high() | addresses.span.first & ADDRESS,
            ],
            Self::BothStages { vmid } => [TLBI_S12_VMALL | tag(*vmid, 0), 0],
            Self::Stage2Pages { vmid, addresses } => [
                TLBI_S2_IPA | tag(*vmid, 0) | addresses.low(),
                addresses.high() | addresses.span.first & INTERMEDIATE,
            ],
            Self::AllTranslations => [TLBI_NSNH_ALL, 0],
            Self::Sync => [SYNC, 0],
        }
    }
}

const fn tag(vmid: u16, asid: u16) -> u64 {
    (vmid as u64) << VMID_SHIFT | (asid as u64) << ASID_SHIFT
}
