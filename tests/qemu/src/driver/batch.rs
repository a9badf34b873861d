//! Accesses that share a message, because neither changes what the others do.

use ringfence_types::{PageSize, PhysAddr};

use super::Driver;
use super::accesses::Attempt;
use super::judge::Part;
use crate::family::Family;
use crate::qtest::{Commands, Prefetch, Prefetched};
use crate::test_device::TestDevice;

/// Most accesses of a message.
const ACCESSES: usize = 16;
/// Most stopped bytes of a message. A unit records at most one fault for each, and the smallest
/// queue holds 127.
const STOPPED: u64 = 64;

/// Writes of devices that QEMU has not seen yet.
///
/// Nothing but accesses happens between them: changes of tables, units and RAM judge the batch
/// first. No two of them touch the same page, so the bytes of one are still there, and no others,
/// when all have taken place.
#[derive(Debug, Default)]
pub(super) struct Batch {
    commands: Commands,
    writes: Vec<Write>,
    stopped_bytes: u64,
}

#[derive(Debug)]
struct Write {
    device: TestDevice,
    attempt: Attempt,
    parts: Vec<Part>,
    is_stopped: bool,
    verdict: usize,
    registers: Prefetch,
}

impl Batch {
    /// Returns true if a write of the batch touches a page that one of `parts` touches too.
    fn touches(&self, parts: &[Part]) -> bool {
        let known = self.writes.iter().flat_map(|write| &write.parts);
        known
            .filter_map(page)
            .any(|known| parts.iter().filter_map(page).any(|page| page == known))
    }
}

/// Returns the page where a part lands, or would land if the unit still translated.
fn page(part: &Part) -> Option<PhysAddr> {
    let at = part.granted.or(part.removed)?;
    Some(at.align_down(PageSize::Size4K.bytes()))
}

impl<F: Family> Driver<'_, F> {
    /// Adds a write to the batch. Judges the batch before if the write depends on it, and
    /// afterwards if the next one depends on this.
    pub(super) fn add_write(&mut self, device: TestDevice, attempt: Attempt) -> anyhow::Result<()> {
        let parts = self.parts(&attempt);
        let is_stopped = parts.iter().any(|part| part.granted.is_none());
        let stopped = if is_stopped { attempt.bytes } else { 0 };
        if self.batch.touches(&parts) || self.batch.stopped_bytes + stopped > STOPPED {
            self.judge_batch()?;
        }
        let reads = match is_stopped {
            true => self.unit.fault_registers(),
            false => Vec::new(),
        };
        let batch = &mut self.batch;
        if let Some(last) = batch.writes.last_mut()
            && last.is_stopped
        {
            let reads = self.unit.remove_fault(&mut batch.commands);
            last.registers.append(batch.commands.prefetch(&reads));
        }
        let bytes = u32::try_from(attempt.bytes)?;
        let verdict = device.add_write(&mut batch.commands, attempt.iova, bytes);
        let registers = batch.commands.prefetch(&reads);
        batch.stopped_bytes += stopped;
        batch.writes.push(Write {
            device,
            attempt,
            parts,
            is_stopped,
            verdict,
            registers,
        });
        let is_alone = is_stopped && !self.unit.queues_faults();
        if is_alone || self.batch.writes.len() == ACCESSES {
            self.judge_batch()?;
        }
        Ok(())
    }

    /// Makes all accesses of the batch, and compares each.
    pub(super) fn judge_batch(&mut self) -> anyhow::Result<()> {
        let batch = std::mem::take(&mut self.batch);
        if batch.writes.is_empty() {
            return Ok(());
        }
        let replies = self.qtest.send(&batch.commands)?;
        for write in &batch.writes {
            let verdict = write.device.verdict(&replies, write.verdict)?;
            let values = replies.prefetched(&write.registers, self.unit.queues_faults())?;
            self.qtest.prefetched(values);
            self.judge_write(&write.attempt, &write.parts, verdict)?;
        }
        self.qtest.prefetched(Prefetched::default());
        Ok(())
    }
}
