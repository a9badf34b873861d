//! Where accesses are tried: the conversation with QEMU, interrupted by cases.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ringfence_types::{Access, DeviceId, Iova, IovaRange};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_memory::{Bytes, GuestAddress};

use super::cases::{self, Case, Random};
use super::feed::Feed;
use super::link::{FIXED_BYTES, Incoming, Link};
use super::monitor::Monitor;
use super::{Report, Settings};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::iommu::{Iommu, Translated};
use crate::pci::layout;
use crate::server::{Served, Stop};
use crate::session::Session;
use crate::virtio::VirtioPci;
use crate::virtio::blk::Blk;
use crate::wire::fields::{u32_at, u64_at};
use crate::wire::{Command, Message, errno};

/// Doorbells that the guest rings before anything is tried: while it boots, mappings are few.
const QUIET: u32 = 8;
/// Cases while the guest is stopped once.
const AT_ONCE: u32 = 50;
/// How long QEMU may take for an answer, in seconds.
const PATIENCE: i64 = 20;
const PAGE_BYTES: u64 = 4096;
/// In QEMU's structure the data begins before its padding, in the specification after it.
const GAPS: [usize; 2] = [0, 4];

pub(super) struct Bench {
    link: Link,
    session: Session<VirtioPci<Blk, Translated>>,
    feed: Feed,
    ours: Translated,
    path: PathBuf,
    monitor: Option<Monitor>,
    random: Random,
    wanted: u32,
    doorbells: u32,
    /// How many bytes before its message's end says QEMU has the data; found out before anything is judged.
    gap: Option<usize>,
    /// What came while the guest was being stopped, and rings.
    later: Vec<Message>,
    report: Report,
}

impl Bench {
    pub(super) fn new(
        stream: std::os::unix::net::UnixStream,
        disk: Blk,
        endpoint: u16,
        counters: Arc<DeviceCounters>,
        path: PathBuf,
        settings: Settings,
    ) -> io::Result<Self> {
        let iommu = Iommu::new(Arc::new(DeviceCounters::default()))?;
        let device = DeviceId::new(endpoint);
        let dma = iommu.add_endpoint(device).map_err(io::Error::other)?;
        let ours = iommu.another_reader(device).map_err(io::Error::other)?;
        Ok(Self {
            link: Link::new(stream),
            session: Session::new(VirtioPci::new(disk, dma, true, counters)),
            feed: Feed::new(iommu, endpoint)?,
            ours,
            path,
            monitor: None,
            random: Random::new(settings.seed),
            wanted: settings.cases,
            doorbells: 0,
            gap: None,
            later: Vec::new(),
            report: Report::default(),
        })
    }

    /// Until QEMU goes or the stop comes.
    pub(super) fn run(mut self, stop: &Stop) -> io::Result<Report> {
        loop {
            while self.session.function().unfinished() {
                self.session.function().go_on();
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
                Ok(Some(Incoming::Message(message))) => {
                    if rings(&message) {
                        self.doorbells += 1;
                        let due = self.doorbells > QUIET && self.report.cases() < self.wanted;
                        // QEMU lets nothing through of a function that is no master of the bus.
                        let master = self.session.function().is_master();
                        if due && master && !self.feed.live.is_empty() {
                            self.try_some()?;
                        }
                    }
                    self.answer(message)?;
                }
                Ok(Some(Incoming::Reply(..))) => {
                    return Err(io::Error::other("a reply to nothing"));
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
        let command = Command::from_number(header.command);
        let reply = if matches!(command, Some(Command::DmaMap | Command::DmaUnmap)) {
            let result = self.feed.change(message);
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

    /// Stops the guest, tries cases, lets it go on.
    fn try_some(&mut self) -> io::Result<()> {
        self.order("stop")?;
        self.report.most_mapped = self.report.most_mapped.max(self.feed.live.len());
        if self.gap.is_none() {
            self.gap = self.find_gap()?;
        }
        let cases = match self.gap {
            Some(_) => AT_ONCE.min(self.wanted - self.report.cases()),
            None => 0,
        };
        for _ in 0..cases {
            let case = cases::next(&mut self.random, &self.feed.live, &self.feed.past);
            self.try_one(case)?;
        }
        self.order("cont")?;
        for message in std::mem::take(&mut self.later) {
            self.answer(message)?;
        }
        Ok(())
    }

    /// Reads what is mapped until the bytes say where in a reply QEMU has the data.
    fn find_gap(&mut self) -> io::Result<Option<usize>> {
        let ranges: Vec<IovaRange> = self.feed.live.iter().map(|told| told.range).collect();
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

    /// Gives the monitor an order and waits until it is carried out; answers the client meanwhile, for which QEMU may be waiting.
    fn order(&mut self, command: &str) -> io::Result<()> {
        let mut monitor = match self.monitor.take() {
            Some(monitor) => monitor,
            None => Monitor::connect(&self.path)?,
        };
        monitor.ask(command)?;
        loop {
            if monitor.has_line() || self.came(Some(&monitor))? {
                if monitor.answered()? {
                    break;
                }
                continue;
            }
            match self.link.receive()? {
                Some(Incoming::Message(message)) => self.keep_or_answer(message)?,
                Some(Incoming::Reply(..)) => return Err(io::Error::other("a reply to nothing")),
                None => {}
            }
        }
        self.monitor = Some(monitor);
        Ok(())
    }

    /// Waits for the client or the monitor; whether the monitor has something.
    fn came(&self, monitor: Option<&Monitor>) -> io::Result<bool> {
        let mut fds = vec![PollFd::from_borrowed_fd(self.link.fd(), PollFlags::IN)];
        fds.extend(monitor.map(|m| PollFd::from_borrowed_fd(m.fd(), PollFlags::IN)));
        let patience = Timespec {
            tv_sec: PATIENCE,
            tv_nsec: 0,
        };
        if poll(&mut fds, Some(&patience))? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "QEMU does not answer",
            ));
        }
        Ok(fds.get(1).is_some_and(|fd| !fd.revents().is_empty()))
    }

    /// Requests must not be served while the guest is looked at.
    fn keep_or_answer(&mut self, message: Message) -> io::Result<()> {
        if rings(&message) {
            self.later.push(message);
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
            Verdict::Allowed => &mut self.report.allowed,
            Verdict::Rejected => &mut self.report.rejected,
            Verdict::ToldMore => &mut self.report.told_more,
            Verdict::Differs(how) => {
                self.report.differing.push(format!("{case}: {how}"));
                return Ok(());
            }
        };
        *count += 1;
        Ok(())
    }

    fn try_read(&mut self, range: IovaRange) -> io::Result<Verdict> {
        let ours = self.read(range);
        let theirs = self.ask_read(range)?;
        Ok(match (ours, theirs) {
            (None, Err(_)) => Verdict::Rejected,
            (None, Ok(_)) => Verdict::Differs("QEMU lets it through"),
            (Some(ours), Ok(theirs)) if ours == theirs => Verdict::Allowed,
            (Some(_), Ok(_)) => Verdict::Differs("to other bytes"),
            (Some(_), Err(_)) if self.told_more(range)? => Verdict::ToldMore,
            (Some(_), Err(_)) => Verdict::Differs("QEMU rejects it"),
        })
    }

    /// Whether each page of what ours reads and QEMU does not is granted for reading or for writing by QEMU.
    fn told_more(&mut self, range: IovaRange) -> io::Result<bool> {
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

    /// What is written is put back: ours writes a pattern, QEMU writes over it what was there. Where only a part can be reached, QEMU may
    /// write that part before it rejects the rest, so that part is what is there already.
    fn try_write(&mut self, range: IovaRange) -> io::Result<Verdict> {
        let before = self.read_pieces(range);
        let pattern: Vec<u8> = before.iter().map(|byte| !byte).collect();
        let ours = self.write(range, &pattern);
        let theirs = self.ask_write(range, &before)?;
        Ok(match (ours, theirs) {
            (false, Err(_)) => Verdict::Rejected,
            (false, Ok(())) => Verdict::Differs("QEMU lets it through"),
            (true, Ok(())) if self.read(range).as_ref() == Some(&before) => Verdict::Allowed,
            (true, theirs) => {
                self.write(range, &before);
                Verdict::Differs(if theirs.is_ok() {
                    "to other bytes"
                } else {
                    "QEMU rejects it"
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

    /// What is there, page by page; zero where nothing is.
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
        let data = data(&body, self.gap.unwrap_or(0), count);
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
        let gap = self.gap.unwrap_or(0);
        let id = self.link.ask(access, range, data, gap)?;
        loop {
            match self.link.receive()? {
                Some(Incoming::Reply(number, result)) if number == id => return Ok(result),
                Some(Incoming::Reply(..)) => return Err(io::Error::other("a reply to nothing")),
                Some(Incoming::Message(message)) => self.keep_or_answer(message)?,
                None => {
                    self.came(None)?;
                }
            }
        }
    }
}

enum Verdict {
    Allowed,
    Rejected,
    ToldMore,
    Differs(&'static str),
}

/// The data in the body of a reply to `DMA_READ`.
fn data(body: &[u8], gap: usize, count: usize) -> Option<&[u8]> {
    body.get(FIXED_BYTES.checked_sub(gap)?..)?.get(..count)
}

/// What lies in each page of `range`, in order.
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

/// Whether a message is a doorbell.
fn rings(message: &Message) -> bool {
    let offset = u64_at(&message.body, 0).unwrap_or(0);
    let notify = u64::from(layout::NOTIFY)..u64::from(layout::NOTIFY + layout::NOTIFY_BYTES);
    Command::from_number(message.header.command) == Some(Command::RegionWrite)
        && u32_at(&message.body, 8) == Some(layout::BAR.into())
        && notify.contains(&offset)
}
