//! Compares QEMU's verdict, the bytes in RAM and the fault records with the oracle.

use ringfence_types::{Access, Iova, PageSize, Pfn, PfnRange, PhysAddr};

use super::Driver;
use super::accesses::Attempt;
use crate::family::{Family, Reported};
use crate::oracle::{Mapping, pages_of};
use crate::qtest::{Commands, Prefetched};
use crate::ram::GuestRam;
use crate::read_device::ReadDevice;
use crate::report::Disagreement;
use crate::test_device::{TestDevice, Verdict};

const PAGE: u64 = PageSize::Size4K.bytes();
/// Most fault records that one access makes: one for each two bytes of a page.
const RECORDS: usize = 2048;

/// Stopped accesses per look for further fault records.
const LOOKS: u64 = 4;

/// One page of an access: the address that the oracle grants, or that of a removed mapping.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    iova: Iova,
    /// Offset from the first byte of the access.
    offset: u64,
    pub(super) bytes: u64,
    pub(super) granted: Option<PhysAddr>,
    pub(super) removed: Option<PhysAddr>,
}

impl<F: Family> Driver<'_, F> {
    /// Compares a write. All bytes of the buffers were zero before and are zero afterwards.
    pub(super) fn judge_write(
        &mut self,
        attempt: &Attempt,
        parts: &[Part],
        verdict: Verdict,
    ) -> anyhow::Result<()> {
        self.compare(attempt, parts, verdict)?;
        for part in parts {
            if let Some(at) = part.granted {
                self.compare_landed(attempt, part, at, verdict)?;
                self.ram.fill(at, part.bytes, 0)?;
            } else if let Some(at) = part.removed
                && !is_filled(&self.ram, at, part.bytes, |_| 0)
            {
                return self.disagree(attempt, format!("bytes landed in the unmapped page {at}"));
            }
        }
        Ok(())
    }

    /// Lets a device read, and shows the bytes in the window of its domain.
    pub(super) fn judge_read(
        &mut self,
        device: &ReadDevice,
        attempt: &Attempt,
    ) -> anyhow::Result<()> {
        self.judge_batch()?;
        let parts = self.parts(attempt);
        // No byte is the one that an earlier read left in the device's buffer, nor the zero that a
        // stopped one leaves.
        let first = 1 + self.report.reads % 240;
        let secret: [u8; 8] = std::array::from_fn(|index| (first as usize + index) as u8);
        for part in &parts {
            if let Some(at) = part.granted.or(part.removed) {
                for index in 0..part.bytes {
                    let byte = secret[(part.offset + index) as usize % 8];
                    self.ram.fill(at.wrapping_add(index), 1, byte)?;
                }
            }
        }
        let domain = attempt.domain.and_then(|domain| self.domains.get(domain));
        let window = domain.map(|domain| domain.window);
        let is_stopped = parts.iter().any(|part| part.granted.is_none());
        self.let_read(device, attempt, window.as_ref(), is_stopped)?;
        self.report.reads += 1;
        // No window shows the bytes of a blocked device; its fault record is compared.
        let is_shown = window.map(|window| {
            is_filled(&self.ram, window.pa, attempt.bytes, |index| {
                secret[index as usize % 8]
            })
        });
        let addresses = parts.iter().filter_map(|part| {
            let at = part.granted.or(part.removed)?;
            Some((at, part.bytes))
        });
        let shown = window.map(|window| (window.pa, attempt.bytes));
        for (at, bytes) in addresses.chain(shown) {
            self.ram.fill(at, bytes, 0)?;
        }
        let expected = match is_stopped {
            true => Verdict::Stopped,
            false => Verdict::Landed,
        };
        self.compare(attempt, &parts, expected)?;
        self.qtest.prefetched(Prefetched::default());
        if is_shown == Some(is_stopped) {
            return self.disagree(attempt, format!("read: expected {expected:?}"));
        }
        Ok(())
    }

    /// Lets a device read, and then write what it read to the window. The fault registers are read
    /// in between.
    fn let_read(
        &mut self,
        device: &ReadDevice,
        attempt: &Attempt,
        window: Option<&Mapping>,
        is_stopped: bool,
    ) -> anyhow::Result<()> {
        let mut commands = Commands::default();
        device.add_read(&mut commands, attempt.iova, attempt.bytes);
        let reads = match is_stopped {
            true => self.unit.fault_registers(),
            false => Vec::new(),
        };
        let prefetch = commands.prefetch(&reads);
        if let Some(window) = window {
            device.add_write(&mut commands, window.range.lo().iova(), attempt.bytes);
        }
        let replies = self.qtest.send(&commands)?;
        let values = replies.prefetched(&prefetch, self.unit.queues_faults())?;
        self.qtest.prefetched(values);
        Ok(())
    }

    pub(super) fn parts(&self, attempt: &Attempt) -> Vec<Part> {
        let domain = attempt.domain.and_then(|domain| self.domains.get(domain));
        let mut offset = 0;
        pages_of(attempt.iova, attempt.bytes)
            .map(|(iova, bytes)| {
                let granted = domain.and_then(|d| d.granted.translate(iova, attempt.access));
                let removed = domain.and_then(|domain| {
                    let page = Pfn::containing(iova);
                    let inside = |range: &PfnRange| range.lo() <= page && page <= range.hi();
                    let mut removed = domain.removed.iter();
                    let found = removed.find(|mapping| inside(&mapping.range))?;
                    let offset = iova.offset_from(&found.range.lo().iova())?;
                    Some(found.pa.wrapping_add(offset))
                });
                let part = Part {
                    iova,
                    offset,
                    bytes,
                    granted,
                    removed: removed.filter(|_| granted.is_none()),
                };
                offset += bytes;
                part
            })
            .collect()
    }

    /// Compares the verdict and the fault records.
    fn compare(
        &mut self,
        attempt: &Attempt,
        parts: &[Part],
        verdict: Verdict,
    ) -> anyhow::Result<()> {
        let mut stopped = parts.iter().filter(|part| part.granted.is_none());
        let first = stopped.next();
        let expected = first.map_or(Verdict::Landed, |_| Verdict::Stopped);
        if verdict != expected {
            return self.disagree(attempt, format!("{verdict:?}, expected {expected:?}"));
        }
        match first {
            Some(first) => self.compare_faults(attempt, parts, first),
            None => {
                self.report.landed += 1;
                Ok(())
            }
        }
    }

    /// Returns true if a record tells of the first stopped page, false if it tells of another one,
    /// and `None` if it tells of none.
    fn matches(
        &self,
        attempt: &Attempt,
        parts: &[Part],
        first: &Part,
        reported: Reported,
    ) -> Option<bool> {
        let (device, page, access) = match reported {
            Reported::Lost => return None,
            // Any stopped page may have made the record.
            Reported::Stopped { device, .. } => return (device == attempt.device).then_some(true),
            Reported::Fault {
                device,
                iova,
                access,
            } => (device, iova.align_down(PAGE), access),
        };
        let is_stopped = |part: &Part| part.granted.is_none() && part.iova.align_down(PAGE) == page;
        let is_right = device == attempt.device
            && access.is_none_or(|access| access == attempt.access)
            && parts.iter().any(is_stopped);
        is_right.then(|| page == first.iova.align_down(PAGE))
    }

    /// Compares fault records. A false record of an earlier access appears here too.
    fn compare_faults(
        &mut self,
        attempt: &Attempt,
        parts: &[Part],
        first: &Part,
    ) -> anyhow::Result<()> {
        let mut has_first = false;
        let repeats = self.unit.repeats_faults();
        let is_single = !repeats && parts.iter().filter(|part| part.granted.is_none()).count() == 1;
        for _ in 0..RECORDS {
            let Some(reported) = self.unit.next_fault()? else {
                if !has_first && !self.may_be_silent(attempt, first) {
                    return self.disagree(attempt, "no fault record".into());
                }
                return Ok(());
            };
            if reported == Reported::Lost {
                self.report.lost += 1;
                continue;
            }
            let Some(is_first) = self.matches(attempt, parts, first, reported) else {
                return self.disagree(attempt, format!("wrong fault record {reported:?}"));
            };
            has_first |= is_first;
            self.report.faults += 1;
            // The next stopped access finds a further record, which this one should not have. A
            // unit whose records hold no address makes one for each part of an access on its bus.
            let is_only = match reported {
                Reported::Stopped { is_last, .. } => is_last,
                _ => is_single,
            };
            if is_only && !self.random.once_in(LOOKS) {
                return Ok(());
            }
        }
        self.disagree(attempt, "fault records without end".into())
    }

    /// Returns true if the model may stop this part without a record: the page is mapped without
    /// the permission, or the model records no faults of the address.
    fn may_be_silent(&self, attempt: &Attempt, part: &Part) -> bool {
        let domain = attempt.domain.and_then(|domain| self.domains.get(domain));
        let is_mapped = domain.is_some_and(|domain| domain.granted.find(part.iova).is_some());
        let is_silent = is_mapped && !self.unit.records_permission_faults();
        is_silent || !self.unit.records_faults_at(part.iova)
    }

    /// Looks for the bytes of a landed write. A stopped write may have stored some of them.
    fn compare_landed(
        &self,
        attempt: &Attempt,
        part: &Part,
        at: PhysAddr,
        verdict: Verdict,
    ) -> anyhow::Result<()> {
        let pattern = |index: u64| TestDevice::pattern(part.offset + index);
        if verdict == Verdict::Landed && !is_filled(&self.ram, at, part.bytes, pattern) {
            return self.disagree(attempt, format!("the bytes are not at {at}"));
        }
        let end = at.wrapping_add(part.bytes);
        let before = at.offset_in(PAGE) != 0 && self.ram.byte(at.wrapping_add(u64::MAX)) != Some(0);
        let after = end.offset_in(PAGE) != 0 && self.ram.byte(end) != Some(0);
        if before || after {
            return self.disagree(attempt, format!("bytes beside the access at {at}"));
        }
        Ok(())
    }

    fn disagree(&self, attempt: &Attempt, problem: String) -> anyhow::Result<()> {
        let access = match attempt.access {
            Access::Read => "read",
            Access::Write => "write",
        };
        Err(Disagreement {
            seed: self.options.seed,
            step: attempt.step,
            device: attempt.device,
            kind: attempt.kind,
            iova: attempt.iova,
            bytes: attempt.bytes,
            problem: format!("{access}: {problem}"),
        }
        .into())
    }
}

/// Returns true if the bytes from `at` have the `expected` values.
fn is_filled(ram: &GuestRam, at: PhysAddr, bytes: u64, expected: impl Fn(u64) -> u8) -> bool {
    (0..bytes).all(|index| ram.byte(at.wrapping_add(index)) == Some(expected(index)))
}
