//! Inside a guest: what a read costs there.
//!
//! Under QEMU's `-icount` with one nanosecond an instruction, time that passes while the processor never rests is the number of instructions.
//! What an interrupt of the disk interrupts, and whether the processor has gone to rest before, is up to the host: so reads differ, and the
//! cheapest of many is what two runs have in common.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use std::os::unix::fs::FileExt;

/// Bytes of a read.
pub const READ_BYTES: usize = 4096;
/// Reads before those that count: the first ones fill caches of the kernel's.
const WARM_UP: usize = 64;

/// Reads the first blocks of `path` past all caches, one after the other, `count` of them; the nanoseconds of each.
///
/// # Errors
/// What opening and reading meet.
pub fn timed_reads(path: &Path, count: usize) -> io::Result<Vec<u64>> {
    let file = File::from(open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    // Direct reads need a buffer on a block boundary, and one that is no two pages.
    let mut memory = vec![0u8; 2 * READ_BYTES];
    let skip = memory.as_ptr().align_offset(READ_BYTES);
    let buffer = memory
        .get_mut(skip..skip.saturating_add(READ_BYTES))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let mut times = Vec::with_capacity(count);
    for read in 0..count.saturating_add(WARM_UP) {
        let offset = (read as u64).saturating_mul(READ_BYTES as u64);
        let begun = Instant::now();
        file.read_exact_at(buffer, offset)?;
        let took = begun.elapsed().as_nanos();
        if read >= WARM_UP {
            times.push(u64::try_from(took).unwrap_or(u64::MAX));
        }
    }
    Ok(times)
}
