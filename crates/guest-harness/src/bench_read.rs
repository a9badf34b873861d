//! Measures the CPU work of a read, inside a guest.
//!
//! Under QEMU's `-icount` with one nanosecond per instruction, time is the number of instructions.
//! The host decides when the disk's interrupt arrives, and so how long a read takes. The CPU work
//! of a read does not depend on the host once the read waits. The CPU therefore never halts
//! ([`IdleSpinner`]), and the time spent spinning is subtracted. Reads that completed without
//! waiting, because their interrupt arrived during submission, are reported separately.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{Mode, OFlags, open};
use std::os::unix::fs::FileExt;

use super::idle_spinner::{IdleSpinner, nanoseconds};

/// Bytes per read.
pub const READ_BYTES: usize = 4096;
/// Reads before the measurement: the first ones fill the kernel's caches.
const WARM_UP: usize = 64;

/// CPU time of the reads in nanoseconds, without the time spent waiting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadTimes {
    /// Times of reads that waited for the disk.
    pub waited: Vec<u64>,
    /// Times of reads whose data arrived before they waited.
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

/// Reads the first `count` blocks of `path` one after the other on one CPU, bypassing all caches.
///
/// # Errors
/// Opening or reading failed, or the spinning thread could not be started.
pub fn bench_reads(path: &Path, count: usize) -> io::Result<ReadTimes> {
    let file = File::from(open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    // A direct read needs a buffer that is block-aligned and does not cross a page.
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
