//! The features that a unit reports in `IDR0`, `IDR1`, `IDR3` and `IDR5` (IHI 0070, section 6.3).

use ringfence_pgtable::Coherency;
use ringfence_types::{PageSize, Registers};

use crate::registers::{ABSENT, IDR0, IDR1, IDR3, IDR5};
use crate::stream_table::Shape;

/// Treatment of faulting transactions: a stalled one waits until software resumes or terminates it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StallModel {
    /// The context descriptor of stage 1 and the stream table entry select it.
    Selectable,
    /// Faulting transactions are terminated.
    Never,
    /// Faulting transactions stall. The reserved value is decoded as this one.
    Forced,
}

/// Decoded fields of the identification registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capabilities {
    /// Stage 1 is implemented (S1P).
    pub stage1: bool,
    /// Stage 2 is implemented (S2P).
    pub stage2: bool,
    /// Tables of VMSAv8-64 are supported (TTF).
    pub aarch64: bool,
    /// Tables of VMSAv8-32 are supported (TTF).
    pub aarch32: bool,
    /// Accesses of the unit to tables and queues snoop CPU caches (COHACC).
    pub coherent: bool,
    /// The unit takes part in broadcast TLB maintenance of the CPUs (BTM).
    pub broadcast: bool,
    /// Address translation services of PCI Express (ATS).
    pub ats: bool,
    /// Bits of an ASID (ASID16).
    pub asid_bits: u32,
    /// Bits of a VMID (VMID16).
    pub vmid_bits: u32,
    /// Message-signalled interrupts (MSI).
    pub msi: bool,
    /// Little-endian tables are supported (TTENDIAN).
    pub little_endian: bool,
    /// Treatment of faulting transactions (STALL_MODEL).
    pub stall_model: StallModel,
    /// Stream tables of two levels (ST_LEVEL).
    pub two_levels: bool,
    /// Bits of a stream id (SIDSIZE).
    pub stream_id_bits: u32,
    /// Binary logarithm of the most commands in the queue (CMDQS).
    pub command_queue: u32,
    /// Binary logarithm of the most records in the queue (EVENTQS).
    pub event_queue: u32,
    /// Hardware fixed the address of the queues (QUEUES_PRESET).
    pub queues_preset: bool,
    /// Hardware fixed the address of the stream table (TABLES_PRESET).
    pub tables_preset: bool,
    /// Stage 2 can force write-back (FWB).
    pub forced_write_back: bool,
    /// Invalidation of ranges of addresses (RIL).
    pub range_invalidation: bool,
    /// Bits of a physical address (OAS).
    pub address_bits: u32,
    /// Granule of 4 KiB.
    pub granule_4k: bool,
    /// Granule of 16 KiB.
    pub granule_16k: bool,
    /// Granule of 64 KiB.
    pub granule_64k: bool,
}

impl Capabilities {
    /// Reads the registers. `None` if no unit answers.
    pub fn read<R: Registers>(unit: &R) -> Option<Self> {
        let words = [IDR0, IDR1, IDR3, IDR5].map(|offset| unit.read32(offset));
        // Bits 29 to 31 of IDR0 are reserved.
        (words != [ABSENT; 4]).then(|| Self::decode(words))
    }

    /// Decodes the values of `IDR0`, `IDR1`, `IDR3` and `IDR5`.
    pub const fn decode([idr0, idr1, idr3, idr5]: [u32; 4]) -> Self {
        Self {
            stage1: bit(idr0, 1),
            stage2: bit(idr0, 0),
            aarch64: bit(idr0, 3),
            aarch32: bit(idr0, 2),
            coherent: bit(idr0, 4),
            broadcast: bit(idr0, 5),
            ats: bit(idr0, 10),
            asid_bits: if bit(idr0, 12) { 16 } else { 8 },
            vmid_bits: if bit(idr0, 18) { 16 } else { 8 },
            msi: bit(idr0, 13),
            little_endian: matches!(field(idr0, 21, 2), 0 | 2),
            stall_model: match field(idr0, 24, 2) {
                0 => StallModel::Selectable,
                1 => StallModel::Never,
                _ => StallModel::Forced,
            },
            two_levels: field(idr0, 27, 2) == 1,
            stream_id_bits: field(idr1, 0, 6),
            command_queue: field(idr1, 21, 5),
            event_queue: field(idr1, 16, 5),
            queues_preset: bit(idr1, 29),
            tables_preset: bit(idr1, 30),
            forced_write_back: bit(idr3, 8),
            range_invalidation: bit(idr3, 10),
            address_bits: match field(idr5, 0, 3) {
                0 => 32,
                1 => 36,
                2 => 40,
                3 => 42,
                4 => 44,
                5 => 48,
                6 => 52,
                _ => 56,
            },
            granule_4k: bit(idr5, 4),
            granule_16k: bit(idr5, 5),
            granule_64k: bit(idr5, 6),
        }
    }

    /// Returns the coherency of the unit's table walk, which a
    /// [`Table`](ringfence_pgtable::Table) needs.
    pub const fn coherency(&self) -> Coherency {
        match self.coherent {
            true => Coherency::Coherent,
            false => Coherency::NonCoherent,
        }
    }

    /// Returns true if the unit walks tables of this granule.
    pub const fn granule(&self, granule: PageSize) -> bool {
        match granule.shift() {
            12 => self.granule_4k,
            14 => self.granule_16k,
            16 => self.granule_64k,
            _ => false,
        }
    }

    /// Returns the bits of an intermediate physical address (IAS, section 3.4).
    pub const fn intermediate_address_bits(&self) -> u32 {
        if self.aarch32 && self.address_bits < 40 {
            40
        } else {
            self.address_bits
        }
    }

    /// Returns the bytes of the stream table's first or only level, for stream ids of
    /// `stream_id_bits` bits. The memory must be aligned to its size. `frame` is the size of the
    /// frames for tables of the second level.
    pub const fn stream_table_bytes(&self, stream_id_bits: u32, frame: PageSize) -> u64 {
        Shape::new(self.two_levels, stream_id_bits, frame).top_bytes()
    }

    /// Returns the largest size of an address that tables can output, as IPS and S2PS encode it.
    /// Tables of this crate's formats hold addresses of at most 48 bits.
    pub(crate) const fn output_size(&self) -> u64 {
        match self.address_bits {
            32 => 0,
            36 => 1,
            40 => 2,
            42 => 3,
            44 => 4,
            _ => 5,
        }
    }
}

const fn bit(raw: u32, index: u32) -> bool {
    raw >> index & 1 != 0
}

const fn field(raw: u32, shift: u32, bits: u32) -> u32 {
    raw >> shift & ((1 << bits) - 1)
}
