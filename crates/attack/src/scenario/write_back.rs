//! A21, A22: an IOMMU that does not snoop sees a table update late, or a part of it.

use std::sync::atomic::Ordering;

use ringfence_lab::LabError;
use ringfence_lab::modes::{FlushKind, Mode, TableKind};
use ringfence_memory::{Arena, DeviceView};
use ringfence_types::{Access, Direction, Iova, Nanos, PhysAddr, PhysMemory};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

const NO_TABLE: Found = Found::NotApplicable("the mode changes no table at a map or an unmap");
const SNOOPS: Found = Found::NotApplicable("walks of the rings always snoop");
const KEEPS: Found = Found::NotApplicable("the mode keeps the entry of a released buffer");

/// Returns true if the walks of the mode's table snoop on every platform.
fn snoops(mode: &Mode) -> bool {
    matches!(mode.table, TableKind::Ring | TableKind::RingAsPublished)
}

/// A21: the driver unmaps a buffer, and all caches of the IOMMU are invalidated. The walker then
/// reads memory, which holds the old entry if the cleared one was not written back. For comparison,
/// the platform loses all write-backs after the map.
pub(crate) fn stale_line(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(NO_TABLE);
    }
    if snoops(mode) {
        return Ok(SNOOPS);
    }
    if matches!(
        mode.flush,
        FlushKind::MapCache | FlushKind::NeverFree | FlushKind::PagePool
    ) {
        return Ok(KEEPS);
    }
    let mut executed = Executed::default();
    executed.trial("written back", after_unmap(mode, false)?);
    executed.comparison("write-backs lost", after_unmap(mode, true)?);
    Ok(Found::Executed(executed))
}

fn device_view(memory: &Arena) -> Result<&DeviceView, LabError> {
    let view = memory.device_view();
    view.ok_or(LabError::Internal("a testbed without a device view"))
}

fn after_unmap(mode: &Mode, lost: bool) -> Result<Evidence, LabError> {
    let mut bench = Bench::without_snooping(mode)?;
    let mut evidence = Evidence::default();
    let mut mapped = Vec::new();
    for round in 0..16 {
        // Buffers of one and of several pages, and more than one line of entries.
        let buffer = memory(0x10_0000 + round * 0x1_0000, 64 + (round % 3) * 6000)?;
        let id = bench.map(0, buffer, Direction::FromDevice)?;
        // The entry must be visible when the map returns.
        bench.use_buffer(id)?;
        mapped.push(id);
    }
    if lost {
        device_view(&bench.machine().memory())?.lose_write_backs();
    }
    for id in &mapped {
        bench.release(*id)?;
    }
    // Deferred flushes, and expiries of caches, end by their timers.
    for cycle in 1..=10 {
        bench.advance_to(Nanos(cycle * 10_000_000_000));
    }
    bench.machine().invalidate_all()?;
    for id in &mapped {
        let range = bench.range(*id)?;
        for iova in [range.start(), range.last()] {
            bench.attack(&mut evidence, 0, iova, 1, Access::Write)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

/// A22: memory of new table pages holds old words that look like entries. The walker reads them if
/// a table page is linked before its zeros are written back. A flat table is one level, which the
/// host bridge gets at the attach. For comparison, the platform skips the write-backs of lines of
/// zeros.
pub(crate) fn early_link(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(NO_TABLE);
    }
    if mode.has_rings() {
        return Ok(Found::NotExecuted(
            "needs reads between two stores of an entry; crates/pgtable/src/ring.rs executes it",
        ));
    }
    let scenario = match mode.table {
        TableKind::Flat => flat_table,
        _ => beside_the_map,
    };
    let mut executed = Executed::default();
    executed.trial("zeros before the link", scenario(mode, false)?);
    executed.comparison("zeros not written back", scenario(mode, true)?);
    Ok(Found::Executed(executed))
}

/// Frames whose old words look like entries. A map allocates fewer.
const STALE_FRAMES: u64 = 16;
const FRAME: u64 = 4096;

/// Returns an old word: readable and writable in both stages of VT-d (bit 2 is U/S in the first,
/// and ignored in the second), to the frame itself.
fn radix_word(frame: PhysAddr) -> u64 {
    frame.get() | 7
}

/// Returns an old word that is an entry of a flat table. Calgary's entries are big-endian.
fn flat_word(frame: PhysAddr) -> u64 {
    (frame.get() | 3).to_be()
}

/// Stores old words in the device view's copy of the line at `line`.
fn spoil(memory: &Arena, line: PhysAddr, word: fn(PhysAddr) -> u64) -> Result<(), LabError> {
    let words = device_view(memory)?.memory().words(line, 8);
    let words = words.map_err(|_| LabError::Internal("a line of a frame"))?;
    for cell in words {
        cell.store(word(line.align_down(FRAME)), Ordering::Relaxed);
    }
    Ok(())
}

fn is_zero(memory: &Arena, line: PhysAddr) -> Result<bool, LabError> {
    let words = memory.words(line, 8);
    let words = words.map_err(|_| LabError::Internal("a line of a frame"))?;
    Ok(words.iter().all(|word| word.load(Ordering::Relaxed) == 0))
}

fn beside_the_map(mode: &Mode, skips_zeros: bool) -> Result<Evidence, LabError> {
    let mut bench = Bench::without_snooping(mode)?;
    let mut evidence = Evidence::default();
    let first = bench.machine().alloc_frame()?.wrapping_add(FRAME);
    for line in (0..STALE_FRAMES * FRAME).step_by(64) {
        let memory = bench.machine().memory();
        spoil(&memory, first.wrapping_add(line), radix_word)?;
    }
    let id = bench.map(0, memory(0x10_0000, 64)?, Direction::Bidirectional)?;
    bench.use_buffer(id)?;
    let end = bench.machine().alloc_frame()?;
    if skips_zeros {
        for line in (first.get()..end.get()).step_by(64).map(PhysAddr::new) {
            let memory = bench.machine().memory();
            if is_zero(&memory, line)? {
                spoil(&memory, line, radix_word)?;
            }
        }
    }
    let mapped = bench.range(id)?.start().get();
    // Other entries of the leaf table, and of the tables above it.
    let pages = (1..512).step_by(7).map(|page| mapped ^ (page * FRAME));
    let above = [21, 30, 39].map(|bit| mapped ^ (1 << bit));
    for iova in pages.chain(above) {
        bench.attack(&mut evidence, 0, Iova::new(iova), 8, Access::Read)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

/// Tries pages of a flat table whose memory held old words before the attach.
fn flat_table(mode: &Mode, skips_zeros: bool) -> Result<Evidence, LabError> {
    let unknown = LabError::Internal("a device without a flat table");
    // Frames are allocated in the same order in each bench, so the table is at the same address.
    let (_, root) = Bench::new(mode)?.table(0).ok_or(unknown)?;
    // One page of each line that it tries, over all of the table.
    let pages: Vec<u64> = (0..76).map(|step| step * 13_007 + 9).collect();
    let line_of = |page: u64| root.wrapping_add(page * 8).align_down(64);
    let spoil_lines = |memory: &Arena| {
        let mut lines = pages.iter().map(|page| line_of(*page));
        lines.try_for_each(|line| match is_zero(memory, line)? {
            true => spoil(memory, line, flat_word),
            false => Ok(()),
        })
    };
    let mut bench = Bench::over_memory(mode, spoil_lines)?;
    let mut evidence = Evidence::default();
    if bench.table(0).map(|(_, root)| root) != Some(root) {
        return Err(LabError::Internal("a flat table at another address"));
    }
    let id = bench.map(0, memory(0x10_0000, 64)?, Direction::Bidirectional)?;
    bench.use_buffer(id)?;
    if skips_zeros {
        spoil_lines(&bench.machine().memory())?;
    }
    let mapped = bench.range(id)?.start().get() / FRAME;
    for page in pages.iter().filter(|page| **page != mapped) {
        bench.attack(&mut evidence, 0, Iova::new(page * FRAME), 8, Access::Read)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}
