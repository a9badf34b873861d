//! The main loop, and the accesses that are tried while the guest is stopped.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use ringfence_vfio_user::fields::{u32_at, u64_at};
use ringfence_vfio_user::{Message, VfioUserCommand};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_memory::{Bytes, GuestAddress};

use super::cases::{self, Case, Random};
use super::link::{FIXED_BYTES, QemuLink, QemuMessage};
use super::monitor::Monitor;
use super::shadow_iommu::ShadowIommu;
use super::{DifferentialReport, DifferentialSettings};
use ringfence_live::Session;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Dma;
use ringfence_live::iommu::{EndpointMemory, VirtioIommu};
use ringfence_live::server::{PolledFunction, StopSignal};
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::{DmaAddresses, VirtioPci, is_doorbell};

/// Doorbells before the first access is tried: the guest has few mappings while it boots.
const DOORBELLS_BEFORE_CASES: u32 = 8;
/// Accesses tried in each stop of the guest.
const CASES_PER_STOP: u32 = 50;
/// Longest wait for QEMU's answer, in seconds.
const REPLY_TIMEOUT_S: i64 = 120;
const PAGE_BYTES: u64 = 4096;
/// Possible offsets of the data before its specified position. QEMU puts the data before its
/// structure's padding, the specification after it.
const DATA_GAPS: [usize; 2] = [0, 4];

pub(super) struct Comparison {
    link: QemuLink,
    session: Session<VirtioPci<Blk, EndpointMemory>>,
    shadow: ShadowIommu,
    ours: EndpointMemory,
    path: PathBuf,
    monitor: Option<Monitor>,
    random: Random,
    cases_wanted: u32,
    doorbells: u32,
    /// Offset in bytes of QEMU's data before its specified position, detected before the first
    /// case.
    data_gap: Option<usize>,
    /// Doorbells that arrived while the guest was being stopped.
    deferred: Vec<Message>,
    report: DifferentialReport,
}

impl Comparison {
    pub(super) fn new(
        stream: std::os::unix::net::UnixStream,
        disk: Blk,
        endpoint: u16,
        counters: Arc<DeviceCounters>,
        path: PathBuf,
        settings: DifferentialSettings,
    ) -> io::Result<Self> {
        let iommu = VirtioIommu::new(Arc::new(DeviceCounters::default()))?;
        let device = RequesterId::new(endpoint);
        let dma = iommu.add_endpoint(device).map_err(io::Error::other)?;
        let ours = iommu.add_reader(device).map_err(io::Error::other)?;
        Ok(Self {
            link: QemuLink::new(stream),
            session: Session::new(VirtioPci::new(
                disk,
                dma,
                DmaAddresses::Translated,
                counters,
            )),
            shadow: ShadowIommu::new(iommu, endpoint)?,
            ours,
            path,
            monitor: None,
            random: Random::new(settings.seed),
            cases_wanted: settings.cases,
            doorbells: 0,
            data_gap: None,
            deferred: Vec::new(),
            report: DifferentialReport::default(),
        })
    }

    /// Runs until QEMU disconnects or the stop signal comes.
    pub(super) fn run(mut self, stop: &StopSignal) -> io::Result<DifferentialReport> {
        loop {
            while self.session.function().unfinished() {
                self.session.function().continue_work();
            }
            let mut fds = [
                PollFd::new(stop.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.link.fd(), PollFlags::IN),
            ];
            poll(&mut fds, None)?;
            if !fds[0].revents().is_empty() {
                return Ok(self.report);
            }
            match self.link.receive() {
                Ok(None) => {}
                Ok(Some(QemuMessage::Message(message))) => {
                    if is_doorbell_write(&message) {
                        self.doorbells += 1;
                        let due = self.doorbells > DOORBELLS_BEFORE_CASES
                            && self.report.cases() < self.cases_wanted;
                        // QEMU blocks all accesses of a function that is not a bus master.
                        let master = self.session.function().is_master();
                        if due && master && !self.shadow.live.is_empty() {
                            self.run_cases()?;
                        }
                    }
                    self.answer(message)?;
                }
                Ok(Some(QemuMessage::Reply(..))) => {
                    return Err(io::Error::other("unexpected reply"));
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Ok(self.report);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(&mut self, message: Message) -> io::Result<()> {
        let header = message.header;
        let command = VfioUserCommand::from_number(header.command);
        let reply = if matches!(
            command,
            Some(VfioUserCommand::DmaMap | VfioUserCommand::DmaUnmap)
        ) {
            let result = self.shadow.change(message);
            Some(match result {
                Ok(body) => header.reply(&body),
                Err(errno) => header.error_reply(errno),
            })
        } else {
            self.session.handle(message).reply
        };
        match reply {
            Some(reply) if !header.no_reply => self.link.send(&reply),
            _ => Ok(()),
        }
    }

    /// Stops the guest, tries some cases, and continues the guest.
    fn run_cases(&mut self) -> io::Result<()> {
        self.run_command("stop")?;
        self.report.most_mapped = self.report.most_mapped.max(self.shadow.live.len());
        if self.data_gap.is_none() {
            self.data_gap = self.find_data_gap()?;
        }
        let cases = match self.data_gap {
            Some(_) => CASES_PER_STOP.min(self.cases_wanted - self.report.cases()),
            None => 0,
        };
        for _ in 0..cases {
            let case = cases::next(&mut self.random, &self.shadow.live, &self.shadow.unmapped);
            self.try_one(case)?;
        }
        self.run_command("cont")?;
        for message in std::mem::take(&mut self.deferred) {
            self.answer(message)?;
        }
        Ok(())
    }

    /// Reads mapped pages until their bytes show where QEMU puts the data in a reply. `None` if
    /// no page decides.
    fn find_data_gap(&mut self) -> io::Result<Option<usize>> {
        let ranges: Vec<IovaRange> = self
            .shadow
            .live
            .iter()
            .map(|mapping| mapping.range)
            .collect();
        for range in ranges {
            let Some(page) = IovaRange::new(range.start(), PAGE_BYTES.min(range.bytes())) else {
                continue;
            };
            let Some(ours) = self.read(page) else {
                continue;
            };
            let Ok(body) = self.ask(Access::Read, page, &vec![0; length(page)])? else {
                continue;
            };
            let fits = |gap: &usize| data(&body, *gap, length(page)) == Some(ours.as_slice());
            let fitting: Vec<usize> = DATA_GAPS.into_iter().filter(fits).collect();
            if let [gap] = fitting.as_slice() {
                return Ok(Some(*gap));
            }
        }
        Ok(None)
    }

    /// Sends a monitor command and waits for its reply. Answers the client in between, since QEMU
    /// may be waiting for it.
    fn run_command(&mut self, command: &str) -> io::Result<()> {
        let mut monitor = match self.monitor.take() {
            Some(monitor) => monitor,
            None => Monitor::connect(&self.path)?,
        };
        monitor.ask(command)?;
        loop {
            if monitor.has_line() || self.wait_for_event(Some(&monitor))? {
                if monitor.answered()? {
                    break;
                }
                continue;
            }
            match self.link.receive()? {
                Some(QemuMessage::Message(message)) => self.defer_or_reply(message)?,
                Some(QemuMessage::Reply(..)) => return Err(io::Error::other("unexpected reply")),
                None => {}
            }
        }
        self.monitor = Some(monitor);
        Ok(())
    }

    /// Waits for the client or the monitor. Returns true if the monitor is readable.
    fn wait_for_event(&self, monitor: Option<&Monitor>) -> io::Result<bool> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.link.fd(), PollFlags::IN)];
        fds.extend(monitor.map(|m| PollFd::from_borrowed_fd(m.fd(), PollFlags::IN)));
        let timeout = Timespec {
            tv_sec: REPLY_TIMEOUT_S,
            tv_nsec: 0,
        };
        if poll(&mut fds, Some(&timeout))? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "no answer from QEMU",
            ));
        }
        Ok(fds.get(1).is_some_and(|fd| !fd.revents().is_empty()))
    }

    /// Defers doorbells, because the device must not serve requests during the test; answers other
    /// messages.
    fn defer_or_reply(&mut self, message: Message) -> io::Result<()> {
        if is_doorbell_write(&message) {
            self.deferred.push(message);
            return Ok(());
        }
        self.answer(message)
    }

    fn try_one(&mut self, case: Case) -> io::Result<()> {
        let result = match case.access {
            Access::Read => self.try_read(case.range)?,
            Access::Write => self.try_write(case.range)?,
        };
        let count = match result {
            CaseResult::Allowed => &mut self.report.allowed,
            CaseResult::Rejected => &mut self.report.rejected,
            CaseResult::WriteOnlyRead => &mut self.report.write_only_reads,
            CaseResult::Differs(difference) => {
                self.report.differing.push(format!("{case}: {difference}"));
                return Ok(());
            }
        };
        *count += 1;
        Ok(())
    }

    fn try_read(&mut self, range: IovaRange) -> io::Result<CaseResult> {
        let ours = self.read(range);
        let theirs = self.ask_read(range)?;
        let result = compare_reads(ours.as_deref(), theirs.as_deref());
        if result == CaseResult::Differs(Difference::OnlyQemuRejects)
            && is_write_only_read(&self.grants(range)?)
        {
            return Ok(CaseResult::WriteOnlyRead);
        }
        Ok(result)
    }

    /// Returns what QEMU grants of each page: a read, or else a write of the bytes already there.
    fn grants(&mut self, range: IovaRange) -> io::Result<Vec<Option<Access>>> {
        let mut grants = Vec::new();
        for page in pages(range) {
            grants.push(if self.ask_read(page)?.is_some() {
                Some(Access::Read)
            } else if let Some(bytes) = self.read(page)
                && self.ask_write(page, &bytes)?
            {
                Some(Access::Write)
            } else {
                None
            });
        }
        Ok(grants)
    }

    /// Tries a write and preserves the contents: ours writes a pattern, then QEMU writes the
    /// original bytes over it. QEMU may write a part before it rejects the rest, and then that part
    /// equals the original bytes.
    fn try_write(&mut self, range: IovaRange) -> io::Result<CaseResult> {
        let before = self.read_pieces(range);
        let pattern: Vec<u8> = before.iter().map(|byte| !byte).collect();
        let ours = self.write(range, &pattern);
        let theirs = self.ask_write(range, &before)?;
        let after = self.read(range);
        let result = compare_writes(ours, theirs, after.as_ref() == Some(&before));
        if ours && matches!(result, CaseResult::Differs(_)) {
            self.write(range, &before);
        }
        Ok(result)
    }

    fn read(&mut self, range: IovaRange) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length(range)];
        let at = GuestAddress(range.start().get());
        let read = self.ours.with(|memory| memory.read_slice(&mut bytes, at));
        read.is_ok().then_some(bytes)
    }

    fn write(&mut self, range: IovaRange, bytes: &[u8]) -> bool {
        let at = GuestAddress(range.start().get());
        self.ours
            .with(|memory| memory.write_slice(bytes, at))
            .is_ok()
    }

    /// Reads the range page by page, with zeros for inaccessible pages.
    fn read_pieces(&mut self, range: IovaRange) -> Vec<u8> {
        let piece = |page| self.read(page).unwrap_or_else(|| vec![0; length(page)]);
        pages(range).flat_map(piece).collect()
    }

    /// Returns the bytes that QEMU read; `None` if it rejected the access.
    fn ask_read(&mut self, range: IovaRange) -> io::Result<Option<Vec<u8>>> {
        let count = length(range);
        let Ok(body) = self.ask(Access::Read, range, &vec![0; count])? else {
            return Ok(None);
        };
        let data = data(&body, self.data_gap.unwrap_or(0), count);
        Ok(Some(data.unwrap_or_default().to_vec()))
    }

    /// Returns false if QEMU rejected the access.
    fn ask_write(&mut self, range: IovaRange, bytes: &[u8]) -> io::Result<bool> {
        Ok(self.ask(Access::Write, range, bytes)?.is_ok())
    }

    fn ask(
        &mut self,
        access: Access,
        range: IovaRange,
        data: &[u8],
    ) -> io::Result<Result<Vec<u8>, u32>> {
        let gap = self.data_gap.unwrap_or(0);
        let id = self.link.ask(access, range, data, gap)?;
        loop {
            match self.link.receive()? {
                Some(QemuMessage::Reply(number, result)) if number == id => return Ok(result),
                Some(QemuMessage::Reply(..)) => return Err(io::Error::other("unexpected reply")),
                Some(QemuMessage::Message(message)) => self.defer_or_reply(message)?,
                None => {
                    self.wait_for_event(None)?;
                }
            }
        }
    }
}

/// Result of one access, tried on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CaseResult {
    Allowed,
    Rejected,
    /// A read that QEMU rejects because Linux mapped a page of it for writes only.
    WriteOnlyRead,
    Differs(Difference),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    OnlyQemuPermits,
    OnlyQemuRejects,
    WrongBytes,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnlyQemuPermits => "QEMU permits the access",
            Self::OnlyQemuRejects => "QEMU faults the access",
            Self::WrongBytes => "wrong bytes",
        })
    }
}

/// Compares the bytes that both sides read; `None` if a side rejected the read.
fn compare_reads(ours: Option<&[u8]>, theirs: Option<&[u8]>) -> CaseResult {
    match (ours, theirs) {
        (None, None) => CaseResult::Rejected,
        (None, Some(_)) => CaseResult::Differs(Difference::OnlyQemuPermits),
        (Some(_), None) => CaseResult::Differs(Difference::OnlyQemuRejects),
        (Some(ours), Some(theirs)) if ours == theirs => CaseResult::Allowed,
        (Some(_), Some(_)) => CaseResult::Differs(Difference::WrongBytes),
    }
}

/// Compares a write: whether each side permitted it, and whether ours then reads what QEMU wrote.
fn compare_writes(ours: bool, theirs: bool, reads_theirs: bool) -> CaseResult {
    match (ours, theirs) {
        (false, false) => CaseResult::Rejected,
        (false, true) => CaseResult::Differs(Difference::OnlyQemuPermits),
        (true, false) => CaseResult::Differs(Difference::OnlyQemuRejects),
        (true, true) if reads_theirs => CaseResult::Allowed,
        (true, true) => CaseResult::Differs(Difference::WrongBytes),
    }
}

/// Returns true if QEMU grants an access to each page, and not to all of them a read.
fn is_write_only_read(grants: &[Option<Access>]) -> bool {
    grants.iter().all(Option::is_some) && grants.contains(&Some(Access::Write))
}

/// Returns the data in the body of a `DMA_READ` reply.
fn data(body: &[u8], gap: usize, count: usize) -> Option<&[u8]> {
    body.get(FIXED_BYTES.checked_sub(gap)?..)?.get(..count)
}

/// Splits `range` at page boundaries, in order.
fn pages(range: IovaRange) -> impl Iterator<Item = IovaRange> {
    let (first, last) = (range.start().get(), range.last().get());
    let starts = (first / PAGE_BYTES..=last / PAGE_BYTES).map(|page| page * PAGE_BYTES);
    starts.filter_map(move |start| {
        let end = (start | (PAGE_BYTES - 1)).min(last);
        IovaRange::inclusive(Iova::new(start.max(first)), Iova::new(end))
    })
}

fn length(range: IovaRange) -> usize {
    usize::try_from(range.bytes()).unwrap_or(0)
}

/// Returns true if the message is a doorbell write.
fn is_doorbell_write(message: &Message) -> bool {
    let offset = u64_at(&message.body, 0).unwrap_or(0);
    let region = u32_at(&message.body, 8);
    VfioUserCommand::from_number(message.header.command) == Some(VfioUserCommand::RegionWrite)
        && region.is_some_and(|region| is_doorbell(region, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_compared() {
        let (some, other) = (Some([1, 2].as_slice()), Some([1, 3].as_slice()));
        for (ours, theirs, expected) in [
            (None, None, CaseResult::Rejected),
            (some, some, CaseResult::Allowed),
            (some, other, CaseResult::Differs(Difference::WrongBytes)),
            // A reply that is too short.
            (
                some,
                Some(&[][..]),
                CaseResult::Differs(Difference::WrongBytes),
            ),
            (None, some, CaseResult::Differs(Difference::OnlyQemuPermits)),
            (some, None, CaseResult::Differs(Difference::OnlyQemuRejects)),
        ] {
            assert_eq!(compare_reads(ours, theirs), expected, "{ours:?} {theirs:?}");
        }
    }

    #[test]
    fn writes_are_compared() {
        for (ours, theirs, reads_theirs, expected) in [
            (false, false, false, CaseResult::Rejected),
            (true, true, true, CaseResult::Allowed),
            (
                true,
                true,
                false,
                CaseResult::Differs(Difference::WrongBytes),
            ),
            (
                false,
                true,
                true,
                CaseResult::Differs(Difference::OnlyQemuPermits),
            ),
            (
                true,
                false,
                false,
                CaseResult::Differs(Difference::OnlyQemuRejects),
            ),
            // QEMU wrote all bytes and then rejected the access.
            (
                true,
                false,
                true,
                CaseResult::Differs(Difference::OnlyQemuRejects),
            ),
        ] {
            let result = compare_writes(ours, theirs, reads_theirs);
            assert_eq!(result, expected, "{ours} {theirs} {reads_theirs}");
        }
    }

    /// A read over two pages that QEMU grants one by one is rejected for another reason.
    #[test]
    fn only_pages_for_writes_explain_a_rejected_read() {
        let (read, write) = (Some(Access::Read), Some(Access::Write));
        for (grants, expected) in [
            (vec![write], true),
            (vec![read, write], true),
            (vec![read, read], false),
            (vec![read], false),
            (vec![write, None], false),
            (vec![None], false),
        ] {
            assert_eq!(is_write_only_read(&grants), expected, "{grants:?}");
        }
    }

    #[test]
    fn ranges_are_split_at_pages() {
        let range = |first, last| IovaRange::inclusive(Iova::new(first), Iova::new(last)).unwrap();
        let split: Vec<_> = pages(range(0x1ff8, 0x3007)).collect();
        let expected = [(0x1ff8, 0x1fff), (0x2000, 0x2fff), (0x3000, 0x3007)];
        assert_eq!(split, expected.map(|(first, last)| range(first, last)));
    }
}
