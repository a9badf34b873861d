//! The disk as the guest's registers know it, while a process does its work.
//!
//! Nothing here waits for the process, but a reset: a doorbell is passed on, and what became of the turn is heard when the process says so. What it says is
//! not trusted: a turn that nobody asked for, or what is no message, ends it. A device whose process has ended asks to be reset, and stays so.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_types::DeviceId;
use ringfence_virtio_iommu::DeniedReason;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use virtio_queue::{Queue, QueueT};

use super::grants::{Grants, Undead};
use super::life::Waits;
use super::process::Link;
use super::supervisor::Breach;
use super::wire::{MAX_BYTES, Order, Place, Report};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::errant::Tried;
use crate::handover::{DiskKind, Own, Unmovable};
use crate::iommu::Behind;
use crate::virtio::blk::{Blk, TooLong};
use crate::virtio::{Awaited, Device, QueueBroken, StillMaster, Turn};

/// A process that has not forgotten its rings by then is ended.
const RESET_WITHIN: Duration = Duration::from_secs(5);
/// One that has not left its work by then has it taken away. QEMU waits five seconds for the answer to a write.
const LEFT_WITHIN: Duration = Duration::from_secs(2);
/// Most messages that are heard at a time.
const HEARD_AT_ONCE: usize = 64;
/// Most accesses that were stopped, or requests that were too long, in one turn, for each descriptor of
/// the queue. Every one takes the IOMMU's lock: a process that says more speaks for no device.
const REPORTS_PER_DESCRIPTOR: u32 = 16;

/// What a front tells the log.
#[derive(Debug)]
pub enum Said<'a> {
    /// The process was ended.
    Ended(&'a Breach),
    /// It misbehaved, as it was told to.
    Errant(&'a Tried),
}

/// Takes what a front says.
pub type Tell = Box<dyn Fn(&Said<'_>) + Send>;

/// A queue, and the process's work on it.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// The process has its registers.
    told: bool,
    /// A turn was asked for and is not over.
    working: bool,
    /// Its number.
    round: u64,
    /// The driver rang meanwhile.
    rung: bool,
    /// What became of the last turn, and where it has ended.
    over: Option<(Turn, Place)>,
    broken: bool,
}

/// A disk in a process of its own.
pub struct Front {
    /// Answers for what does not change: features and configuration.
    disk: Blk,
    link: Link,
    iommu: Behind,
    device: DeviceId,
    lanes: Vec<Lane>,
    resetting: bool,
    /// Such reports since the last turn began.
    reports: u32,
    ended: bool,
    /// It was told to, for tests.
    misbehaves: bool,
    tell: Tell,
    counters: Arc<DeviceCounters>,
}

impl std::fmt::Debug for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Front({}, {:?})", self.device, self.link)
    }
}

impl Front {
    /// The front of the process at `link`, whose `disk` is like this one. What it says of stopped accesses is told as `device`'s.
    pub fn new(
        disk: Blk,
        link: Link,
        iommu: Behind,
        device: DeviceId,
        counters: Arc<DeviceCounters>,
        tell: Tell,
    ) -> Self {
        let lanes = vec![Lane::default(); disk.queue_sizes().len()];
        Self {
            disk,
            misbehaves: link.errant > 0,
            link,
            iommu,
            device,
            lanes,
            resetting: false,
            reports: 0,
            ended: false,
            tell,
            counters,
        }
    }

    /// Whether no turn is under way.
    pub fn is_idle(&self) -> bool {
        !self.lanes.iter().any(|lane| lane.working)
    }

    fn order(&mut self, order: &Order) {
        if self.ended {
            return;
        }
        // There is room for all that can be unanswered; a process for which there is not does not listen.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if send(&self.link.socket, &order.encode(), flags).is_err() {
            self.end(&Breach::Gone);
        }
    }

    fn end(&mut self, breach: &Breach) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.link.life.kill();
        for lane in &mut self.lanes {
            lane.working = false;
            lane.broken = true;
        }
        (self.tell)(&Said::Ended(breach));
    }

    /// Hears one message, if there is one.
    fn hear(&mut self) -> bool {
        if self.ended {
            return false;
        }
        let mut bytes = [0; MAX_BYTES + 1];
        let got = match recv(&self.link.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((got, _)) => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return false,
            Err(_) => 0,
        };
        if got == 0 {
            self.end(&Breach::Gone);
            return false;
        }
        let report = bytes.get(..got).and_then(Report::decode);
        if report.and_then(|report| self.take(report)).is_none() {
            self.end(&Breach::Protocol);
        }
        true
    }

    /// Hears it until it has said enough, or has ended. False if it has not by then.
    fn hear_until(&mut self, deadline: Instant, enough: impl Fn(&Self) -> bool) -> bool {
        while !enough(self) && !self.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).ok();
            let mut ready = [PollFd::new(&self.link.socket, PollFlags::IN)];
            // Whoever never stops talking is not listened to for ever.
            if left.is_zero() || poll(&mut ready, limit.as_ref()) == Ok(0) {
                return false;
            }
            self.hear();
        }
        true
    }

    /// Hears it until it has said enough, has ended, or has had the device wait for long enough. False
    /// if it has not by then.
    fn wait_for_it(&mut self, most: Duration, enough: impl Fn(&Self) -> bool) -> bool {
        let begun = Instant::now();
        let patience = most.min(self.link.life.patience(Waits::Device));
        let heard = self.hear_until(begun + patience, enough);
        if self
            .link
            .life
            .charge(Waits::Device, begun.elapsed())
            .is_err()
        {
            self.end(&Breach::LateInAll);
        }
        heard
    }

    /// Waits for turns that are under way. False if one is not over by then.
    fn end_turns(&mut self, until: Instant) -> bool {
        let ended = self.hear_until(until, Self::is_idle);
        self.keep_rings();
        ended
    }

    /// Whoever rang during a turn that is over does not ring again.
    fn keep_rings(&mut self) {
        for lane in &mut self.lanes {
            if let Some((turn, _)) = &mut lane.over {
                turn.more |= std::mem::take(&mut lane.rung);
            }
        }
    }

    /// Takes what the process says. None if it may not say that now.
    fn take(&mut self, report: Report) -> Option<()> {
        match report {
            Report::Turn {
                index,
                round,
                turn,
                at,
                counted,
            } => {
                let lane = self.working_lane(index, round)?;
                lane.over = Some((turn, at));
                self.counters.add_all(&counted);
            }
            Report::Broken { index, round } => self.working_lane(index, round)?.broken = true,
            Report::WasReset if self.resetting => self.resetting = false,
            Report::Stopped {
                iova,
                access,
                permission,
            } => {
                self.count_report()?;
                let reason = if permission {
                    DeniedReason::Permission
                } else {
                    DeniedReason::NotMapped
                };
                self.iommu.report(self.device, iova, access, reason);
            }
            Report::Tried {
                errant,
                access,
                iova,
                stopped,
            } => {
                // Each is tried once; the log is not the process's to fill.
                self.link.errant = self.link.errant.checked_sub(1)?;
                (self.tell)(&Said::Errant(&Tried {
                    errant,
                    access,
                    iova,
                    stopped,
                }));
            }
            // It is said as often as the log bears it.
            Report::TooLong { bytes, most } => {
                self.count_report()?;
                self.disk.complain(TooLong { bytes, most });
            }
            Report::Ready | Report::Confined | Report::WasReset => return None,
        }
        Some(())
    }

    /// One more report that nobody asked for. None if it is one too many.
    fn count_report(&mut self) -> Option<()> {
        let descriptors = self.disk.queue_sizes().iter().copied().map(u32::from);
        let most = descriptors
            .sum::<u32>()
            .saturating_mul(REPORTS_PER_DESCRIPTOR);
        self.reports = self
            .reports
            .checked_add(1)
            .filter(|reports| *reports <= most)?;
        Some(())
    }

    /// The lane whose turn is over.
    fn working_lane(&mut self, index: u16, round: u64) -> Option<&mut Lane> {
        let lane = self.lanes.get_mut(usize::from(index))?;
        let asked = std::mem::take(&mut lane.working) && lane.round == round;
        asked.then_some(lane)
    }
}

impl Device for Front {
    const TYPE: u16 = Blk::TYPE;
    const CLASS: [u8; 3] = Blk::CLASS;

    fn features(&self) -> u64 {
        self.disk.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.disk.queue_sizes()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.disk.read_config(offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.order(&Order::Begin { features });
    }

    /// What the process knows beside the rings stands in the registers: its requests are done, and its grants are the IOMMU's state. One that was ended
    /// goes as well: its driver is asked to begin again, elsewhere with another process.
    fn save(&self) -> Result<Own, Unmovable> {
        if self.misbehaves {
            return Err(Unmovable::Keeps("a disk that misbehaves"));
        }
        // Nor is one over that its queue does not know of.
        if !self.is_idle() || self.lanes.iter().any(|lane| lane.over.is_some()) {
            return Err(Unmovable::Keeps("a disk in the middle of a turn"));
        }
        let mut own = self.disk.save()?;
        if let Own::Blk { kind, .. } = &mut own {
            *kind = DiskKind::Apart;
        }
        Ok(own)
    }

    fn stand_still(&mut self, until: Instant) -> bool {
        self.end_turns(until)
    }

    /// The process is dead when this returns true, and reaches nothing.
    fn leave(&mut self) -> bool {
        self.link.life.end()
    }

    /// When it returns the process has let go of its rings, or is to be dead.
    fn reset(&mut self) {
        let used = self.lanes.iter().any(|lane| lane.told);
        self.resetting = used && !self.ended;
        if self.resetting {
            self.order(&Order::Reset);
        }
        // A turn that is under way ends first, and is of no interest any more.
        if !self.wait_for_it(RESET_WITHIN, |front| !front.resetting) {
            self.end(&Breach::Late);
        }
        for lane in &mut self.lanes {
            *lane = Lane {
                round: lane.round,
                broken: self.ended,
                ..Lane::default()
            };
        }
    }

    fn take_bus(&mut self) {
        self.iommu.with_grants(self.device, Grants::release);
    }

    /// Asks first, so that no access is made in part; then what is mapped is gone, whoever the process listens to.
    fn leave_bus(&mut self) -> Result<(), StillMaster> {
        self.iommu
            .with_grants(self.device, |grants| grants.call_off());
        self.wait_for_it(LEFT_WITHIN, Self::is_idle);
        self.keep_rings();
        match self.iommu.with_grants(self.device, Grants::hold) {
            Some(Err(Undead)) => Err(StillMaster),
            _ => Ok(()),
        }
    }

    fn waits_for(&self) -> Option<Awaited<'_>> {
        (!self.ended).then(|| Awaited {
            fd: self.link.socket.as_fd(),
            input: true,
            output: false,
        })
    }

    fn came(&mut self) {
        for _ in 0..HEARD_AT_ONCE {
            if !self.hear() {
                break;
            }
        }
    }

    fn due(&mut self) -> Option<usize> {
        self.lanes
            .iter()
            .position(|lane| lane.over.is_some() || (lane.broken && lane.told))
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        _dma: &mut A,
    ) -> Result<Turn, QueueBroken> {
        let broken = || QueueBroken(virtio_queue::Error::QueueNotReady);
        let number = u16::try_from(index).map_err(|_| broken())?;
        let lane = self.lanes.get_mut(index).ok_or_else(broken)?;
        if lane.broken {
            // Said once.
            lane.told = false;
            return Err(broken());
        }
        let over = lane.over.take().map(|(turn, at)| {
            // For another process, if one is to go on.
            queue.set_next_avail(at.next_available);
            queue.set_next_used(at.next_used);
            turn
        });
        if lane.working {
            lane.rung = true;
            return Ok(Turn::default());
        }
        if let Some(turn) = over
            && !std::mem::take(&mut lane.rung)
        {
            return Ok(turn);
        }
        let told = std::mem::replace(&mut lane.told, true);
        lane.working = true;
        lane.round = lane.round.wrapping_add(1);
        let round = lane.round;
        self.reports = 0;
        if !told {
            self.order(&Order::queue(number, &queue.state()));
        }
        self.order(&Order::Kick {
            index: number,
            round,
        });
        let interrupt = over.is_some_and(|turn| turn.interrupt);
        Ok(Turn {
            interrupt,
            more: false,
        })
    }
}

#[cfg(test)]
mod tests;
