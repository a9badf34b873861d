//! Inside a guest: what a read costs there.
//!
//! Under QEMU's `-icount` with one nanosecond an instruction, time is the number of instructions.
//! When the disk's interrupt comes is up to the host, so how long a read takes is as well; what the
//! processor works for it is not, once it has begun to wait. So the processor never rests
//! ([`IdleSpinner`]), what it does while the read waits is taken off, and reads that did not wait,
//! whose interrupt came in the middle of asking, stand apart.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use std::os::unix::fs::FileExt;

use super::idle_spinner::{IdleSpinner, nanoseconds};

/// Bytes of a read.
pub const READ_BYTES: usize = 4096;
/// Reads before those that count: the first ones fill caches of the kernel's.
const WARM_UP: usize = 64;

/// What reads took, in nanoseconds, without what they waited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadTimes {
    /// Of each read that waited for the disk.
    pub waited: Vec<u64>,
    /// Of each whose data was there before it had begun to.
    pub at_once: Vec<u64>,
}

impl ReadTimes {
    fn add(&mut self, took: u64, turns: u64, beside: &IdleSpinner) {
        let times = if turns == 0 {
            &mut self.at_once
        } else {
            &mut self.waited
        };
        times.push(took.saturating_sub(beside.time(turns)));
    }
}

/// Reads the first blocks of `path` past all caches, one after the other, `count` of them, on one
/// processor.
///
/// # Errors
/// What opening and reading meet, and what keeps the processor from its other thread.
pub fn bench_reads(path: &Path, count: usize) -> io::Result<ReadTimes> {
    let file = File::from(open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    // Direct reads need a buffer on a block boundary, and one that is no two pages.
    let mut memory = vec![0u8; 2 * READ_BYTES];
    let skip = memory.as_ptr().align_offset(READ_BYTES);
    let buffer = memory
        .get_mut(skip..skip.saturating_add(READ_BYTES))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let beside = IdleSpinner::start()?;
    let mut times = ReadTimes::default();
    for read in 0..count.saturating_add(WARM_UP) {
        let offset = (read as u64).saturating_mul(READ_BYTES as u64);
        let (begun, before) = (Instant::now(), beside.turns());
        file.read_exact_at(buffer, offset)?;
        let turns = beside.turns().wrapping_sub(before);
        let took = nanoseconds(begun.elapsed());
        if read >= WARM_UP {
            times.add(took, turns, &beside);
        }
    }
    Ok(times)
}
