//! The ID mappings of IORT and RIMT: one layout, with two ways to count.

use crate::bytes::Bytes;
use crate::error::{FirmwareError, FirmwareErrorKind};

/// Length of a mapping.
pub(crate) const MAPPING_BYTES: usize = 20;

/// A range of input IDs, and the output IDs that a node passes on for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdMapping {
    /// First input ID.
    pub first: u32,
    /// Last input ID (inclusive).
    pub last: u32,
    /// Output ID of the first input ID.
    pub output: u32,
    /// Offset in the table of the node that receives the output IDs.
    pub reference: u32,
    /// Flags, which IORT and RIMT define differently.
    pub flags: u32,
}

impl IdMapping {
    /// Reads a mapping whose count field is the number of IDs less `missing`.
    fn parse(bytes: &Bytes<'_>, missing: u32) -> Result<Self, FirmwareError> {
        let [first, count, output] = [bytes.u32(0)?, bytes.u32(4)?, bytes.u32(8)?];
        let more = count.checked_sub(1_u32.saturating_sub(missing));
        let last = more.and_then(|more| first.checked_add(more));
        let fits = more.and_then(|more| output.checked_add(more));
        let (Some(last), Some(_)) = (last, fits) else {
            return Err(bytes.error(4, FirmwareErrorKind::Range));
        };
        Ok(Self {
            first,
            last,
            output,
            reference: bytes.u32(12)?,
            flags: bytes.u32(16)?,
        })
    }

    /// Returns the output ID of `input`. `None` if the mapping does not contain it.
    pub fn map(&self, input: u32) -> Option<u32> {
        if input > self.last {
            return None;
        }
        self.output.checked_add(input.checked_sub(self.first)?)
    }

    /// Returns true if an input ID leads to the output ID `output`.
    pub(crate) fn leads_to(&self, output: u32) -> bool {
        let distance = output.checked_sub(self.output);
        distance.is_some_and(|distance| distance <= self.last.saturating_sub(self.first))
    }
}

/// The mappings of a node. All have been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mappings<'a> {
    array: Bytes<'a>,
    missing: u32,
}

impl<'a> Mappings<'a> {
    /// Checks the `count` mappings at `at` of `node`, whose count fields are too low by `missing`.
    /// Their references must be in the first `end` bytes of the table.
    pub(crate) fn parse(
        node: &Bytes<'a>,
        at: u64,
        count: u64,
        missing: u32,
        end: usize,
    ) -> Result<Self, FirmwareError> {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let bytes = usize::try_from(count).unwrap_or(usize::MAX);
        let array = match bytes.saturating_mul(MAPPING_BYTES) {
            0 => Bytes::EMPTY,
            bytes => node.part(at, bytes)?,
        };
        let mappings = Self { array, missing };
        for (mapping, index) in mappings.checked().zip(0_usize..) {
            if usize::try_from(mapping?.reference).unwrap_or(usize::MAX) >= end {
                let at = index.saturating_mul(MAPPING_BYTES).saturating_add(12);
                return Err(array.error(at, FirmwareErrorKind::Reference));
            }
        }
        Ok(mappings)
    }

    fn checked(&self) -> impl Iterator<Item = Result<IdMapping, FirmwareError>> + use<'a> {
        let Self { array, missing } = *self;
        let count = array.len() / MAPPING_BYTES;
        (0..count).map(move |index| {
            let at = index.saturating_mul(MAPPING_BYTES);
            IdMapping::parse(&array.part(at, MAPPING_BYTES)?, missing)
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = IdMapping> + use<'a> {
        self.checked().flatten()
    }
}
