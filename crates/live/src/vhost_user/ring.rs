//! The device's thread: from the ring's start to its stop.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ReadWriteFlags;
use virtio_queue::{Queue, QueueT};

use super::translations::Translated;
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::event::signal;
use crate::server::{Event, Report, Stop, wait};
use crate::virtio::{Awaited, Device, QueueBroken};

/// Times that it is said of one front-end's ring that it broke.
const MOST_SAID: u32 = 16;

/// A device that is not at work.
pub(super) struct Parked<D> {
    pub(super) device: D,
    pub(super) dma: Translated,
}

/// Where others are told. Changed while the ring runs.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Of what was used: the driver.
    pub(super) call: Mutex<Option<OwnedFd>>,
    /// That the ring is broken: the front-end.
    pub(super) error: Mutex<Option<OwnedFd>>,
    /// Times that the ring broke.
    broken: AtomicU32,
    /// The device waits for a kick.
    pub(super) idle: AtomicBool,
}

fn tell(event: &Mutex<Option<OwnedFd>>) {
    let event = event.lock().unwrap_or_else(PoisonError::into_inner);
    event.as_ref().inspect(|event| signal(event));
}

/// What the device's thread works with.
pub(super) struct Ring<D> {
    pub(super) parked: Parked<D>,
    pub(super) queue: Queue,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) events: Arc<Events>,
    pub(super) counters: Arc<DeviceCounters>,
    pub(super) report: Report,
}

/// What is left when it has stopped.
pub(super) struct Stopped<D> {
    pub(super) parked: Parked<D>,
    /// The next entry to be taken.
    pub(super) base: u16,
}

/// A ring at work.
pub(super) struct Running<D> {
    stop: Stop,
    kick: Arc<OwnedFd>,
    events: Arc<Events>,
    thread: JoinHandle<Stopped<D>>,
}

impl<D: Device + Send + 'static> Running<D> {
    pub(super) fn start(ring: Ring<D>, stop: Stop) -> Self {
        let told = stop.clone();
        ring.events.idle.store(false, Ordering::Release);
        Self {
            kick: Arc::clone(&ring.kick),
            events: Arc::clone(&ring.events),
            thread: thread::spawn(move || ring.run(&told)),
            stop,
        }
    }

    /// Whether it waits for a kick, and none has come; or works no more.
    pub(super) fn rests(&self) -> bool {
        let mut kicked = [PollFd::new(&self.kick, PollFlags::IN)];
        // In this order: who takes a kick is no longer idle by then.
        let quiet = poll(&mut kicked, Some(&Timespec::default())) == Ok(0);
        quiet && self.events.idle.load(Ordering::Acquire) || self.thread.is_finished()
    }

    /// Waits until it has stopped. Whoever calls this has cut short what the device waits for. None: its thread panicked.
    pub(super) fn stop(self) -> Option<Stopped<D>> {
        self.stop.stop();
        self.thread.join().ok()
    }
}

impl<D: Device> Ring<D> {
    fn run(mut self, stop: &Stop) -> Stopped<D> {
        self.parked.dma.begin();
        if let Err(broken) = self.work(stop)
            && !self.parked.dma.cut_short()
        {
            self.counters.broken_queues.add(1);
            // The guest breaks it as often as it likes.
            let said = self.events.broken.fetch_add(1, Ordering::Relaxed);
            if said < MOST_SAID {
                (self.report)(&Event::Broken(&broken));
            }
            tell(&self.events.error);
        }
        Stopped {
            base: self.queue.next_avail(),
            parked: self.parked,
        }
    }

    fn work(&mut self, stop: &Stop) -> Result<(), QueueBroken> {
        let Self { parked, queue, .. } = self;
        let Parked { device, dma } = parked;
        // The front-end tells which entry is next, not how many were used.
        let used = dma.settled(|memory| queue.used_idx(memory, Ordering::Acquire))?;
        queue.set_next_used(used.0);
        // Whoever kicked before may have been heard by nobody.
        let mut unfinished = true;
        loop {
            if unfinished {
                let turn = device.process(0, queue, dma)?;
                if turn.interrupt {
                    self.counters.interrupts.add(1);
                    tell(&self.events.call);
                }
                if dma.cut_short() {
                    return Ok(());
                }
                unfinished = turn.more;
            }
            let kick = Awaited {
                fd: self.kick.as_fd(),
                input: true,
                output: false,
            };
            self.events.idle.store(!unfinished, Ordering::Release);
            let woken = wait(None, Some(kick), stop, unfinished);
            self.events.idle.store(false, Ordering::Release);
            // A descriptor that cannot be waited for is one that the front-end has made so.
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

/// Takes what an eventfd has counted. Does not wait, even if the front-end takes it first.
fn clear(event: &OwnedFd) {
    let mut count = [0; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    let _ = rustix::io::preadv2(event, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT);
}
