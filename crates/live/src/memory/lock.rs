//! Locking of guest pages in the host's memory.
#![allow(unsafe_code)]

use std::io;

use rustix::mm::{mlock, munlock};
use rustix::param::page_size;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Reads a range in, if necessary, and locks it. Locks do not nest: one unlock ends all locks of
/// the range, and so does unmapping it.
///
/// # Errors
/// The range is not mapped as one piece or does not begin on a host page boundary, or the host
/// cannot lock that much memory.
pub(crate) fn lock(memory: &GuestMemoryMmap, start: u64, bytes: u64) -> io::Result<()> {
    let (at, bytes) = piece(memory, start, bytes)?;
    // SAFETY: the piece is mapped for as long as `memory` is borrowed, and locking has no effect
    // that a program can observe.
    unsafe { mlock(at.cast(), bytes) }?;
    Ok(())
}

/// Unlocks a range, so that the host may reclaim its pages.
///
/// # Errors
/// The range is not mapped as one piece or does not begin on a host page boundary.
pub(crate) fn unlock(memory: &GuestMemoryMmap, start: u64, bytes: u64) -> io::Result<()> {
    let (at, bytes) = piece(memory, start, bytes)?;
    // SAFETY: as above; no code here depends on a page being resident.
    unsafe { munlock(at.cast(), bytes) }?;
    Ok(())
}

fn piece(memory: &GuestMemoryMmap, start: u64, bytes: u64) -> io::Result<(*mut u8, usize)> {
    let no = || io::Error::from(io::ErrorKind::InvalidInput);
    let region = memory.find_region(GuestAddress(start)).ok_or_else(no)?;
    let offset = start - region.start_addr().raw_value();
    let bytes_left = region.len() - offset;
    let at = memory.get_host_address(GuestAddress(start));
    let at = at.map_err(|_| no())?;
    let bytes = usize::try_from(bytes).ok().filter(|_| bytes <= bytes_left);
    // The host rounds to its pages: locking an unaligned piece would affect neighbouring data.
    let whole = at.addr().is_multiple_of(page_size());
    Ok((at, bytes.filter(|_| whole).ok_or_else(no)?))
}
