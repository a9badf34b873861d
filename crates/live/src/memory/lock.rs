//! Keeping pages of a guest in the host's memory.
#![allow(unsafe_code)]

use std::io;

use rustix::mm::{mlock, munlock};
use rustix::param::page_size;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Reads a range in, if the host has taken it back, and keeps it. A range may be locked more than
/// once, and is kept until it is unlocked once, or until its mapping goes.
///
/// # Errors
/// If the range is not mapped as one piece, from the beginning of a page of the host's, or the host
/// has no room for it, as for locked memory.
pub(crate) fn lock(memory: &GuestMemoryMmap, start: u64, bytes: u64) -> io::Result<()> {
    let (at, bytes) = piece(memory, start, bytes)?;
    // SAFETY: the piece is mapped for as long as `memory` is borrowed, and locking changes nothing
    // that a program can see.
    unsafe { mlock(at.cast(), bytes) }?;
    Ok(())
}

/// The host may take the range back.
///
/// # Errors
/// If the range is not mapped as one piece.
pub(crate) fn unlock(memory: &GuestMemoryMmap, start: u64, bytes: u64) -> io::Result<()> {
    let (at, bytes) = piece(memory, start, bytes)?;
    // SAFETY: as above; nothing here depends on a page's being in memory.
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
    // The host rounds to its pages: the neighbours of one that lies askew would share its fate.
    let whole = at.addr().is_multiple_of(page_size());
    Ok((at, bytes.filter(|_| whole).ok_or_else(no)?))
}
