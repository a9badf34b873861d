//! A device that begins to work on a queue only some time after the doorbell.
//!
//! On a fast host a reply may arrive before or after its driver begins to wait. With a delay, the
//! driver is always waiting.

use std::io;
use std::time::Duration;

use virtio_queue::Queue;

use super::{BusMasterStuck, Device, PollSource, QuantumResult, QueueBroken, ResetPending};
use crate::delay_timer::DelayTimer;
use crate::dma::Dma;

/// Delays the work of the device `D`, which must have no poll source.
#[derive(Debug)]
pub struct Delayed<D> {
    device: D,
    timer: DelayTimer,
    /// Queue whose doorbell rang and whose delay has not expired.
    kicked: Option<usize>,
    /// Queue whose delay has expired.
    due: Option<usize>,
}

impl<D: Device> Delayed<D> {
    /// Wraps `device`, which then works on a queue `delay` after its first doorbell.
    ///
    /// # Errors
    /// The host has no free descriptors.
    pub fn new(device: D, delay: Duration) -> io::Result<Self> {
        Ok(Self {
            device,
            timer: DelayTimer::new(delay)?,
            kicked: None,
            due: None,
        })
    }
}

impl<D: Device> Device for Delayed<D> {
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

    fn reset(&mut self) -> Result<(), ResetPending> {
        (self.kicked, self.due) = (None, None);
        self.device.reset()
    }

    fn set_bus_master(&mut self) {
        self.device.set_bus_master();
    }

    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        self.device.clear_bus_master()
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        self.kicked.map(|_| self.timer.source())
    }

    fn on_ready(&mut self) {
        self.due = self.kicked.take();
    }

    fn due(&mut self) -> Option<usize> {
        self.due
    }

    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        // Only one queue at a time is delayed; if the timer fails, none is.
        let late = self.due.is_none() && self.kicked.is_none_or(|rung| rung == index);
        if late && (self.kicked.is_some() || self.timer.start().is_ok()) {
            self.kicked = Some(index);
            return Ok(QuantumResult::default());
        }
        if self.due == Some(index) {
            self.due = None;
        }
        self.device.process(index, queue, dma)
    }
}
