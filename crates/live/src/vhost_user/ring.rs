//! The device's thread, which runs from the start of the ring to its stop.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ReadWriteFlags;
use virtio_queue::{Queue, QueueT};

use super::translations::IotlbMemory;
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::event::signal;
use crate::server::{EventHandler, ServeEvent, StopSignal, wait};
use crate::virtio::{Device, PollSource, QueueBroken};

/// Most reports about broken rings of one front-end.
const MAX_REPORTS: u32 = 16;

/// A device whose ring is stopped.
pub(super) struct IdleDevice<D> {
    pub(super) device: D,
    pub(super) dma: IotlbMemory,
}

/// Eventfds that the device signals. They can change while the ring runs.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Signals used buffers to the driver.
    pub(super) call: Mutex<Option<OwnedFd>>,
    /// Signals a broken ring to the front-end.
    pub(super) error: Mutex<Option<OwnedFd>>,
    /// Number of times that the ring broke.
    broken: AtomicU32,
    /// True while the device waits for a kick.
    pub(super) idle: AtomicBool,
}

fn notify(event: &Mutex<Option<OwnedFd>>) {
    let event = event.lock().unwrap_or_else(PoisonError::into_inner);
    event.as_ref().inspect(|event| signal(event));
}

/// The ring and its device, as the device's thread needs them.
pub(super) struct Vring<D> {
    pub(super) idle_device: IdleDevice<D>,
    pub(super) queue: Queue,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) events: Arc<Events>,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) report: EventHandler,
}

/// State of a ring that has stopped.
pub(super) struct StoppedVring<D> {
    pub(super) idle_device: IdleDevice<D>,
    /// Index of the next available entry.
    pub(super) base: u16,
}

/// A running ring.
pub(super) struct RunningVring<D> {
    stop: StopSignal,
    kick: Arc<OwnedFd>,
    events: Arc<Events>,
    thread: JoinHandle<StoppedVring<D>>,
}

impl<D: Device + Send + 'static> RunningVring<D> {
    pub(super) fn start(ring: Vring<D>, stop: StopSignal) -> Self {
        let report = stop.clone();
        ring.events.idle.store(false, Ordering::Release);
        Self {
            kick: Arc::clone(&ring.kick),
            events: Arc::clone(&ring.events),
            thread: thread::spawn(move || ring.run(&report)),
            stop,
        }
    }

    /// Returns true if the device waits for a kick and none is pending, or if its thread has ended.
    pub(super) fn is_idle(&self) -> bool {
        let mut kicked = [PollFd::new(&self.kick, PollFlags::IN)];
        // Poll before reading the flag: a thread that consumes a kick clears the flag first.
        let quiet = poll(&mut kicked, Some(&Timespec::default())) == Ok(0);
        quiet && self.events.idle.load(Ordering::Acquire) || self.thread.is_finished()
    }

    /// Stops the ring and waits for its thread. The caller must have aborted any wait for a
    /// translation. `None` if the thread panicked.
    pub(super) fn stop(self) -> Option<StoppedVring<D>> {
        self.stop.stop();
        self.thread.join().ok()
    }
}

impl<D: Device> Vring<D> {
    fn run(mut self, stop: &StopSignal) -> StoppedVring<D> {
        self.idle_device.dma.begin();
        if let Err(broken) = self.work(stop)
            && !self.idle_device.dma.interrupted()
        {
            self.counters.broken_queues.add(1);
            // The guest can break the ring any number of times.
            let reported = self.events.broken.fetch_add(1, Ordering::Relaxed);
            if reported < MAX_REPORTS {
                (self.report)(&ServeEvent::Broken(&broken));
            }
            notify(&self.events.error);
        }
        StoppedVring {
            base: self.queue.next_avail(),
            idle_device: self.idle_device,
        }
    }

    fn work(&mut self, stop: &StopSignal) -> Result<(), QueueBroken> {
        let Self {
            idle_device: parked,
            queue,
            ..
        } = self;
        let IdleDevice { device, dma } = parked;
        // The front-end sends the next available index, but not the used index.
        let used = dma.with_retry(|memory| queue.used_idx(memory, Ordering::Acquire))?;
        queue.set_next_used(used.0);
        // A kick from before the start may be lost, so process the ring once without one.
        let mut unfinished = true;
        loop {
            if unfinished {
                let turn = device.process(0, queue, dma)?;
                if turn.interrupt {
                    self.counters.interrupts.add(1);
                    notify(&self.events.call);
                }
                if dma.interrupted() {
                    return Ok(());
                }
                unfinished = turn.more;
            }
            let kick = PollSource::readable(self.kick.as_fd());
            self.events.idle.store(!unfinished, Ordering::Release);
            let woken = wait(None, Some(kick), stop, unfinished);
            self.events.idle.store(false, Ordering::Release);
            // Polling fails only if the front-end changed the descriptor.
            let Ok(woken) = woken else { return Ok(()) };
            if woken.stop {
                return Ok(());
            }
            if woken.extra {
                self.counters.doorbells.add(1);
                clear(&self.kick);
                unfinished = true;
            }
        }
    }
}

/// Resets an eventfd's counter. Never blocks, even if the front-end reads it first.
fn clear(event: &OwnedFd) {
    let mut count = [0; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    let _ = rustix::io::preadv2(event, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT);
}
