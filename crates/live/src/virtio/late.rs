//! A device that takes its time: it begins to work on a queue only a while after the driver has rung.
//!
//! On a host that answers at once it is a matter of luck whether a driver is still busy when its answer comes. Here it has gone to wait.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use virtio_queue::Queue;

use super::{Awaited, Device, QueueBroken, StillMaster, Turn};
use crate::dma::Dma;

/// The device `D`, which waits for nothing itself, so much later.
#[derive(Debug)]
pub struct Late<D> {
    device: D,
    timer: OwnedFd,
    delay: Duration,
    /// The queue that was rung for, and its time has not come.
    rung: Option<usize>,
    /// Its time has come.
    due: Option<usize>,
}

impl<D: Device> Late<D> {
    /// `device`, which works on a queue `delay` after the first ring.
    ///
    /// # Errors
    /// If the host has no descriptors left.
    pub fn new(device: D, delay: Duration) -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            device,
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            // No time at all would stop the timer.
            delay: delay.max(Duration::from_nanos(1)),
            rung: None,
            due: None,
        })
    }

    fn set_timer(&self) -> io::Result<()> {
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(self.delay).map_err(|_| io::ErrorKind::InvalidInput)?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }
}

impl<D: Device> Device for Late<D> {
    const TYPE: u16 = D::TYPE;
    const CLASS: [u8; 3] = D::CLASS;

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.device.queue_sizes()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.device.activate(features);
    }

    fn reset(&mut self) {
        (self.rung, self.due) = (None, None);
        self.device.reset();
    }

    fn take_bus(&mut self) {
        self.device.take_bus();
    }

    fn leave_bus(&mut self) -> Result<(), StillMaster> {
        self.device.leave_bus()
    }

    fn waits_for(&self) -> Option<Awaited<'_>> {
        self.rung.map(|_| Awaited {
            fd: self.timer.as_fd(),
            input: true,
            output: false,
        })
    }

    fn came(&mut self) {
        self.due = self.rung.take();
    }

    fn due(&mut self) -> Option<usize> {
        self.due
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<Turn, QueueBroken> {
        // Of several queues one at a time is late; without a timer none is.
        let late = self.due.is_none() && self.rung.is_none_or(|rung| rung == index);
        if late && (self.rung.is_some() || self.set_timer().is_ok()) {
            self.rung = Some(index);
            return Ok(Turn::default());
        }
        if self.due == Some(index) {
            self.due = None;
        }
        self.device.process(index, queue, dma)
    }
}
