//! The connection to QEMU, and the accesses that are tried between its messages.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::{Access, Iova, IovaRange, RequesterId};
use ringfence_vfio_user::fields::{u32_at, u64_at};
use ringfence_vfio_user::{Message, VfioUserCommand, errno};
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
const QUIET: u32 = 8;
/// Accesses tried in each stop of the guest.
const CASES_PER_STOP: u32 = 50;
/// Longest wait for QEMU's answer, in seconds.
const REPLY_TIMEOUT_S: i64 = 120;
const PAGE_BYTES: u64 = 4096;
/// Possible offsets of the data before its specified position. QEMU puts the data before its
/// structure's padding, the specification after it.
const GAPS: [usize; 2] = [0, 4];

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
    reply_padding: Option<usize>,
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
            reply_padding: None,
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
                    if rings(&message) {
                        self.doorbells += 1;
                        let due = self.doorbells > QUIET && self.report.cases() < self.cases_wanted;
                        // QEMU blocks all accesses of a function that is not a bus master.
                        let master = self.session.function().is_master();
                        if due && master && !self.shadow.live.is_empty() {
                            self.try_some()?;
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
    fn try_some(&mut self) -> io::Result<()> {
        self.order("stop")?;
        self.report.most_mapped = self.report.most_mapped.max(self.shadow.live.len());
        if self.reply_padding.is_none() {
            self.reply_padding = self.find_reply_padding()?;
        }
        let cases = match self.reply_padding {
            Some(_) => CASES_PER_STOP.min(self.cases_wanted - self.report.cases()),
            None => 0,
        };
        for _ in 0..cases {
            let case = cases::next(&mut self.random, &self.shadow.live, &self.shadow.unmapped);
            self.try_one(case)?;
        }
        self.order("cont")?;
        for message in std::mem::take(&mut self.deferred) {
            self.answer(message)?;
        }
        Ok(())
    }

    /// Reads mapped pages until their bytes show where QEMU puts the data in a reply. `None` if
    /// no page decides.
    fn find_reply_padding(&mut self) -> io::Result<Option<usize>> {
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
            let ours = self.read(page);
            let Ok(body) = self.ask(Access::Read, page, &vec![0; length(page)])? else {
                continue;
            };
            let is_it = |gap: &usize| ours.as_deref() == data(&body, *gap, length(page));
            let fits: Vec<usize> = GAPS.into_iter().filter(is_it).collect();
            if let [gap] = fits.as_slice() {
                return Ok(Some(*gap));
            }
        }
        Ok(None)
    }

    /// Sends a monitor command and waits for its reply. Answers the client in between, since QEMU
    /// may be waiting for it.
    fn order(&mut self, command: &str) -> io::Result<()> {
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
        let patience = Timespec {
            tv_sec: REPLY_TIMEOUT_S,
            tv_nsec: 0,
        };
        if poll(&mut fds, Some(&patience))? == 0 {
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
        if rings(&message) {
            self.deferred.push(message);
            return Ok(());
        }
        self.answer(message)
    }

    fn try_one(&mut self, case: Case) -> io::Result<()> {
        let verdict = match case.access {
            Access::Read => self.try_read(case.range)?,
            Access::Write => self.try_write(case.range)?,
        };
        let count = match verdict {
            CaseResult::Allowed => &mut self.report.allowed,
            CaseResult::Rejected => &mut self.report.rejected,
            CaseResult::ToldMore => &mut self.report.write_only_reads,
            CaseResult::Differs(how) => {
                self.report.differing.push(format!("{case}: {how}"));
                return Ok(());
            }
        };
        *count += 1;
        Ok(())
    }

    fn try_read(&mut self, range: IovaRange) -> io::Result<CaseResult> {
        let ours = self.read(range);
        let theirs = self.ask_read(range)?;
        Ok(match (ours, theirs) {
            (None, Err(_)) => CaseResult::Rejected,
            (None, Ok(_)) => CaseResult::Differs("QEMU permits the access"),
            (Some(ours), Ok(theirs)) if ours == theirs => CaseResult::Allowed,
            (Some(_), Ok(_)) => CaseResult::Differs("wrong bytes"),
            (Some(_), Err(_)) if self.is_write_only_read(range)? => CaseResult::ToldMore,
            (Some(_), Err(_)) => CaseResult::Differs("QEMU faults the access"),
        })
    }

    /// Returns true if ours can read each page and QEMU grants each one for a read or a write.
    fn is_write_only_read(&mut self, range: IovaRange) -> io::Result<bool> {
        for page in pages(range) {
            let Some(bytes) = self.read(page) else {
                return Ok(false);
            };
            if self.ask_read(page)?.is_err() && self.ask_write(page, &bytes)?.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Tries a write and preserves the contents: ours writes a pattern, then QEMU writes the
    /// original bytes over it. QEMU may write a part before it rejects the rest, and then that part
    /// equals the original bytes.
    fn try_write(&mut self, range: IovaRange) -> io::Result<CaseResult> {
        let before = self.read_pieces(range);
        let pattern: Vec<u8> = before.iter().map(|byte| !byte).collect();
        let ours = self.write(range, &pattern);
        let theirs = self.ask_write(range, &before)?;
        Ok(match (ours, theirs) {
            (false, Err(_)) => CaseResult::Rejected,
            (false, Ok(())) => CaseResult::Differs("QEMU permits the access"),
            (true, Ok(())) if self.read(range).as_ref() == Some(&before) => CaseResult::Allowed,
            (true, theirs) => {
                self.write(range, &before);
                CaseResult::Differs(if theirs.is_ok() {
                    "wrong bytes"
                } else {
                    "QEMU faults the access"
                })
            }
        })
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

    fn ask_read(&mut self, range: IovaRange) -> io::Result<Result<Vec<u8>, u32>> {
        let count = length(range);
        let reply = self.ask(Access::Read, range, &vec![0; count])?;
        let Ok(body) = reply else {
            return Ok(Err(errno::EINVAL));
        };
        let data = data(&body, self.reply_padding.unwrap_or(0), count);
        Ok(Ok(data.unwrap_or_default().to_vec()))
    }

    fn ask_write(&mut self, range: IovaRange, bytes: &[u8]) -> io::Result<Result<(), u32>> {
        Ok(self.ask(Access::Write, range, bytes)?.map(|_| ()))
    }

    fn ask(
        &mut self,
        access: Access,
        range: IovaRange,
        data: &[u8],
    ) -> io::Result<Result<Vec<u8>, u32>> {
        let gap = self.reply_padding.unwrap_or(0);
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

enum CaseResult {
    Allowed,
    Rejected,
    ToldMore,
    Differs(&'static str),
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
fn rings(message: &Message) -> bool {
    let offset = u64_at(&message.body, 0).unwrap_or(0);
    let region = u32_at(&message.body, 8);
    VfioUserCommand::from_number(message.header.command) == Some(VfioUserCommand::RegionWrite)
        && region.is_some_and(|region| is_doorbell(region, offset))
}
