//! Measures the CPU work of a read, inside a guest.
//!
//! Under QEMU's `-icount` with one nanosecond per instruction, time is the number of instructions.
//! The host decides when the disk's interrupt arrives, and so how long a read takes. The CPU work
//! of a read does not depend on the host once the read waits. The CPU therefore never halts
//! ([`IdleSpinner`]), and the time spent spinning is subtracted. Reads that completed without
//! waiting, because their interrupt arrived during submission, are reported separately.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
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
    /// Adds an operation that took `elapsed` nanoseconds, of which the CPU spun `turns` iterations.
    pub(super) fn add(&mut self, elapsed: u64, turns: u64, spinner: &IdleSpinner) {
        let times = if turns == 0 {
            &mut self.at_once
        } else {
            &mut self.waited
        };
        times.push(elapsed.saturating_sub(spinner.time(turns)));
    }
}

/// Makes the reads of `path` one after the other on one CPU from its beginning, bypassing all
/// caches. Returns their times and the number of requests, warm-up included.
///
/// # Errors
/// Opening or reading failed, the file is too small for the reads, or the spinning thread could not
/// be started.
pub fn bench_reads(path: &Path, reads: Reads) -> io::Result<(ReadTimes, usize)> {
    let file = File::from(open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty())?);
    bench_file(&file, reads)
}

/// Makes the reads of `file`; see [`bench_reads`].
fn bench_file(mut file: &File, reads: Reads) -> io::Result<(ReadTimes, usize)> {
    // The metadata of a block device do not contain its size.
    check_size(file.seek(SeekFrom::End(0))?, reads)?;
    let (mut small, mut large) = (Vec::new(), Vec::new());
    let buffer = aligned(&mut small, reads.bytes)?;
    let before = aligned(&mut large, reads.after.unwrap_or_default())?;
    let spinner = IdleSpinner::start()?;
    let mut times = ReadTimes::default();
    let count = reads.count.saturating_add(WARM_UP);
    for read in 0..count {
        if !before.is_empty() {
            file.read_exact_at(before, 0)?;
        }
        let offset = (read as u64).saturating_mul(reads.bytes as u64);
        let (begun, turns) = (Instant::now(), spinner.turns());
        file.read_exact_at(buffer, offset)?;
        let turns = spinner.turns().wrapping_sub(turns);
        let elapsed = nanoseconds(begun.elapsed());
        if read >= WARM_UP {
            times.add(elapsed, turns, &spinner);
        }
    }
    let requests = count.saturating_mul(1 + usize::from(!before.is_empty()));
    Ok((times, requests))
}

/// Fails if a file of `size` bytes is too small for the reads.
fn check_size(size: u64, reads: Reads) -> io::Result<()> {
    let (count, bytes) = (reads.count.saturating_add(WARM_UP), reads.bytes);
    let needed = (count as u64).saturating_mul(bytes as u64);
    if size < needed {
        return Err(too_small(format!(
            "has {size} bytes, but {count} reads of {bytes} bytes, {WARM_UP} of them before the \
            measurement, need {needed}: lower --count or --bytes"
        )));
    }
    match reads.after {
        Some(after) if size < after as u64 => Err(too_small(format!(
            "has {size} bytes, but a read before each measured one needs {after}: lower --after"
        ))),
        _ => Ok(()),
    }
}

fn too_small(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Returns the part of `memory` for a direct read of `bytes`, which needs a buffer that is aligned
/// to a page. Its pages are touched in turn with those of a second part. If they have no frames
/// before, and the kernel provides neighbouring frames one after the other, no two pages of the
/// buffer are neighbours in physical memory: the driver maps each page on its own. Nothing ensures
/// that. X29 counts the mappings of a read.
fn aligned(memory: &mut Vec<u8>, bytes: usize) -> io::Result<&mut [u8]> {
    let both = bytes.saturating_mul(2);
    *memory = vec![0; both.saturating_add(READ_BYTES)];
    let skip = memory.as_ptr().align_offset(READ_BYTES);
    let both = memory.get_mut(skip..skip.saturating_add(both));
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
    fn the_wait_is_no_work() {
        let spinner = IdleSpinner::of_turn(3);
        let mut times = ReadTimes::default();
        for (elapsed, turns) in [(100, 0), (100, 20), (100, 1), (100, 40)] {
            times.add(elapsed, turns, &spinner);
        }
        assert_eq!(times.at_once, [100]);
        // A measured iteration may be shorter than the calibrated one.
        assert_eq!(times.waited, [40, 97, 0]);
    }

    #[test]
    fn a_file_that_is_too_small_is_an_error_before_the_first_read() {
        let mut reads = Reads {
            count: 1000,
            bytes: 128 << 10,
            after: None,
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        let error = bench_file(&file, reads).unwrap_err().to_string();
        let expected = "has 67108864 bytes, but 1064 reads of 131072 bytes, 64 of them before the \
            measurement, need 139460608: lower --count or --bytes";
        assert_eq!(error, expected);
        assert!(check_size(139_460_607, reads).is_err());
        assert!(check_size(139_460_608, reads).is_ok());
        reads = Reads {
            count: 1,
            bytes: 512,
            after: Some(1 << 20),
        };
        let error = check_size((1 << 20) - 1, reads).unwrap_err().to_string();
        assert!(error.contains("needs 1048576: lower --after"), "{error}");
        assert!(check_size(1 << 20, reads).is_ok());
    }

    #[test]
    fn a_file_is_read_to_its_end() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(67 * 512).unwrap();
        for (after, requests) in [(None, 67), (Some(4096), 134)] {
            let reads = Reads {
                count: 3,
                bytes: 512,
                after,
            };
            let (times, found) = bench_file(&file, reads).unwrap();
            assert_eq!(times.waited.len() + times.at_once.len(), 3);
            assert_eq!(found, requests);
        }
    }

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
