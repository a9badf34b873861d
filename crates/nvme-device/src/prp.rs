//! Physical region pages (base specification, section 4.3): the host's buffer of a command.

use alloc::vec::Vec;

use ringfence_types::Iova;

use crate::{Memory, NvmeStatus, PAGE_BYTES};

const ENTRY_BYTES: u64 = 8;

/// A contiguous part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First address of the part.
    pub start: Iova,
    /// Length in bytes.
    pub bytes: u64,
}

/// Returns the segments of a buffer of `bytes` bytes. Adjacent pages become one segment.
///
/// The caller bounds `bytes`. Each page of a list has an entry for at least one page of data, so a
/// chain of lists cannot be longer than the data.
///
/// # Errors
/// - [`NvmeStatus::PrpOffsetInvalid`]: an entry is not aligned as section 4.3 requires.
/// - [`NvmeStatus::DataTransferError`]: a list is not accessible.
pub(crate) fn segments(
    memory: &mut impl Memory,
    [first, second]: [Iova; 2],
    bytes: u64,
) -> Result<Vec<Segment>, NvmeStatus> {
    let mut found = Vec::new();
    if !first.is_aligned(4) {
        return Err(NvmeStatus::PrpOffsetInvalid);
    }
    let length = bytes.min(PAGE_BYTES - first.offset_in(PAGE_BYTES));
    push(&mut found, first, length);
    let left = bytes - length;
    match left {
        0 => {}
        1..=PAGE_BYTES => push_page(&mut found, second, left)?,
        _ => list(memory, second, left, &mut found)?,
    }
    Ok(found)
}

/// Adds the pages of the list at `list`, which describe `left` bytes.
fn list(
    memory: &mut impl Memory,
    mut list: Iova,
    mut left: u64,
    found: &mut Vec<Segment>,
) -> Result<(), NvmeStatus> {
    // Only the first list may begin within a page.
    if !list.is_aligned(ENTRY_BYTES) {
        return Err(NvmeStatus::PrpOffsetInvalid);
    }
    let mut raw = [0; PAGE_BYTES as usize];
    loop {
        let slots = (PAGE_BYTES - list.offset_in(PAGE_BYTES)) / ENTRY_BYTES;
        let needed = left.div_ceil(PAGE_BYTES);
        // If the list continues, its last entry points to the next list.
        let is_last = needed <= slots;
        let count = if is_last { needed } else { slots };
        let entries = raw.get_mut(..(count * ENTRY_BYTES) as usize);
        let entries = entries.unwrap_or_default();
        let read = memory.read(list, entries);
        read.map_err(|_| NvmeStatus::DataTransferError)?;
        let mut pages = entries.as_chunks().0.iter();
        let next = if is_last { None } else { pages.next_back() };
        for page in pages {
            let length = left.min(PAGE_BYTES);
            push_page(found, Iova::new(u64::from_le_bytes(*page)), length)?;
            left -= length;
        }
        let Some(next) = next else {
            return Ok(());
        };
        list = Iova::new(u64::from_le_bytes(*next));
        if !list.is_aligned(PAGE_BYTES) {
            return Err(NvmeStatus::PrpOffsetInvalid);
        }
    }
}

fn push_page(found: &mut Vec<Segment>, page: Iova, bytes: u64) -> Result<(), NvmeStatus> {
    if !page.is_aligned(PAGE_BYTES) {
        return Err(NvmeStatus::PrpOffsetInvalid);
    }
    push(found, page, bytes);
    Ok(())
}

fn push(found: &mut Vec<Segment>, start: Iova, bytes: u64) {
    match found.last_mut() {
        Some(last) if last.start.checked_add(last.bytes) == Some(start) => last.bytes += bytes,
        _ => found.push(Segment { start, bytes }),
    }
}

/// Writes `data` to the segments, which are as long.
pub(crate) fn scatter(
    memory: &mut impl Memory,
    segments: &[Segment],
    mut data: &[u8],
) -> Result<(), NvmeStatus> {
    for segment in segments {
        let (part, rest) = data
            .split_at_checked(segment.bytes as usize)
            .unwrap_or((data, &[]));
        let written = memory.write(segment.start, part);
        written.map_err(|_| NvmeStatus::DataTransferError)?;
        data = rest;
    }
    Ok(())
}

/// Reads `data` from the segments, which are as long.
pub(crate) fn gather(
    memory: &mut impl Memory,
    segments: &[Segment],
    mut data: &mut [u8],
) -> Result<(), NvmeStatus> {
    for segment in segments {
        let bytes = data.len().min(segment.bytes as usize);
        let (part, rest) = data.split_at_mut(bytes);
        let read = memory.read(segment.start, part);
        read.map_err(|_| NvmeStatus::DataTransferError)?;
        data = rest;
    }
    Ok(())
}
