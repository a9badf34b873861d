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

/// Bytes per read unless the caller names another number.
pub const READ_BYTES: usize = 4096;
/// Reads before the measurement: the first ones fill the kernel's caches.
const WARM_UP: usize = 64;

/// Direct reads of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    /// Number of measured reads.
    pub count: usize,
    /// Bytes of each, a multiple of the block size.
    pub bytes: usize,
    /// Bytes of a read without a measurement before each one.
    pub after: Option<usize>,
}

/// CPU time of the reads in nanoseconds, without the time spent waiting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadTimes {
    /// Times of reads that waited for the disk.
    pub waited: Vec<u64>,
    /// Times of reads whose data arrived before they waited.
    pub at_once: Vec<u64>,
}

impl ReadTimes {
    pub(super) fn add(&mut self, took: u64, turns: u64, beside: &IdleSpinner) {
        let times = if turns == 0 {
            &mut self.at_once
        } else {
            &mut self.waited
        };
        times.push(took.saturating_sub(beside.time(turns)));
    }
}

/// Makes the reads of `path` one after the other on one CPU from its beginning, bypassing all
/// caches. Returns their times and the number of requests, warm-up included.
///
/// # Errors
/// Opening or reading failed, or the spinning thread could not be started.
pub fn bench_reads(path: &Path, reads: Reads) -> io::Result<(ReadTimes, usize)> {
    let file = File::from(open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    let (mut small, mut large) = (Vec::new(), Vec::new());
    let buffer = aligned(&mut small, reads.bytes)?;
    let before = aligned(&mut large, reads.after.unwrap_or_default())?;
    let beside = IdleSpinner::start()?;
    let mut times = ReadTimes::default();
    let all = reads.count.saturating_add(WARM_UP);
    for read in 0..all {
        if !before.is_empty() {
            file.read_exact_at(before, 0)?;
        }
        let offset = (read as u64).saturating_mul(reads.bytes as u64);
        let (begun, turns) = (Instant::now(), beside.turns());
        file.read_exact_at(buffer, offset)?;
        let turns = beside.turns().wrapping_sub(turns);
        let took = nanoseconds(begun.elapsed());
        if read >= WARM_UP {
            times.add(took, turns, &beside);
        }
    }
    let requests = all.saturating_mul(1 + usize::from(!before.is_empty()));
    Ok((times, requests))
}

/// Returns the part of `memory` for a direct read of `bytes`, which needs a buffer that is aligned
/// to a page. Its pages get memory in turn with those of a second part, so that no two of them are
/// neighbours in physical memory, whatever memory is free: the driver maps each page on its own.
fn aligned(memory: &mut Vec<u8>, bytes: usize) -> io::Result<&mut [u8]> {
    // The allocator zeroes memory without writing to it.
    *memory = vec![0; bytes.saturating_mul(2).saturating_add(READ_BYTES)];
    let skip = memory.as_ptr().align_offset(READ_BYTES);
    let both = memory.get_mut(skip..skip.saturating_add(2 * bytes));
    let both = both.ok_or(io::ErrorKind::OutOfMemory)?;
    for page in touched(bytes) {
        if let Some(byte) = both.get_mut(page) {
            *byte = 1;
        }
    }
    both.get_mut(..bytes)
        .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Returns a byte of each page of two parts of `bytes`, in turn.
fn touched(bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes)
        .step_by(READ_BYTES)
        .flat_map(move |page| [page, page.saturating_add(bytes)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_direct_reads_are_aligned_to_a_page() {
        for bytes in [0, 512, READ_BYTES, 32 * READ_BYTES] {
            let mut memory = Vec::new();
            let buffer = aligned(&mut memory, bytes).unwrap();
            assert_eq!(buffer.len(), bytes);
            assert_eq!(buffer.as_ptr().align_offset(READ_BYTES), 0, "{bytes}");
        }
    }

    #[test]
    fn pages_of_two_parts_are_touched_in_turn() {
        let pages = touched(3 * READ_BYTES).map(|byte| byte / READ_BYTES);
        assert_eq!(pages.collect::<Vec<_>>(), [0, 3, 1, 4, 2, 5]);
    }
}
