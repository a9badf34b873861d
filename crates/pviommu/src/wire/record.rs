//! Migration records: the guest's view of a run of mappings (Table 4 of the PVIOMMU paper).

use ringfence_types::{Direction, Iova};

use super::words::Reader;
use super::{Devid, Gpa, Gpas, PAGE_BYTES, StreamErrorKind, direction};

/// Mappings of consecutive GIOVAs with one device and one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Device that owns the mappings.
    pub device: Devid,
    /// Direction of the mappings.
    pub direction: Direction,
    /// GIOVA of the first page.
    pub first: Iova,
    /// GPA of each page, in order.
    pub gpas: Gpas<'a>,
}

impl Record<'_> {
    /// Returns the mappings in order.
    pub fn pairs(&self) -> impl Iterator<Item = (Iova, Gpa)> + Clone + '_ {
        let first = self.first;
        self.gpas.iter().zip(0_u64..).map(move |(gpa, page)| {
            // `take` has checked `giova_end`, so no page of the record wraps.
            let bytes = page.wrapping_mul(PAGE_BYTES);
            (first.wrapping_add(bytes), gpa)
        })
    }

    /// Returns the address after the last page.
    pub fn end(&self) -> Iova {
        let bytes = (self.gpas.len() as u64).wrapping_mul(PAGE_BYTES);
        self.first.wrapping_add(bytes)
    }
}

impl<'a> Record<'a> {
    /// Decodes a record from the front of `reader`.
    pub(super) fn take(reader: &mut Reader<'a>) -> Result<Self, StreamErrorKind> {
        let short = StreamErrorKind::TooShort;
        let device = Devid::new(reader.le64().ok_or(short)?);
        let pages = reader.le32().ok_or(short)?;
        let raw = reader.le32().ok_or(short)?;
        let first = reader.iova().ok_or(short)?;
        let end = reader.iova().ok_or(short)?;
        // The sender chose `pages`: check it against the available bytes before any use.
        let gpas = Gpas::new(reader.words(pages as usize).ok_or(short)?);
        let direction = direction::decode(raw.into()).ok_or(StreamErrorKind::Direction(raw))?;
        let bytes = u64::from(pages).wrapping_mul(PAGE_BYTES);
        if pages == 0 || !first.is_aligned(PAGE_BYTES) || first.checked_add(bytes) != Some(end) {
            return Err(StreamErrorKind::Range);
        }
        Ok(Self {
            device,
            direction,
            first,
            gpas,
        })
    }
}
