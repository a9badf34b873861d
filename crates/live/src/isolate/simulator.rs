//! The process's side: it confines itself, then is a disk.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{Signal, set_parent_process_death_signal};
use virtio_queue::{Queue, QueueT};

use super::board::Board;
use super::process::{receive_with, send_with};
use super::reach::Reach;
use super::wire::{MAX_BYTES, Order, Place, Report};
use super::{copy, filter, limits, mapper, sys};
use crate::caps::{Caps, Complaints};
use crate::counters::DeviceCounters;
use crate::errant::{Errant, Misbehaviour, Tried};
use crate::privileges;
use crate::virtio::Device;
use crate::virtio::blk::{Blk, TooLong};

/// What a device may allocate, beside what it had before.
const HEAP_BYTES: usize = 16 << 20;

/// A process that is confined.
#[derive(Debug)]
pub struct Simulator {
    /// The way to memory.
    pub reach: Reach,
    /// The device.
    pub disk: Blk,
    counters: Arc<DeviceCounters>,
    queues: Vec<Queue>,
}

/// Tells the daemon.
fn tell(report: &Report) {
    // A packet is taken whole, or the daemon has gone.
    if rustix::io::write(rustix::stdio::stdin(), &report.encode()).is_err() {
        sys::end(0);
    }
}

/// Serves a disk to the daemon whose socket is standard input, and ends with it. For a process that does nothing else.
///
/// # Errors
/// What confining it meets. Afterwards it only ends.
pub fn simulate() -> io::Result<()> {
    enter(mapper::follow)?.serve()
}

/// Confines the process. `map` is the mapping thread: [`follow`](mapper::follow), or a test's.
///
/// # Errors
/// What that meets.
pub fn enter(map: fn(&Board) -> !) -> io::Result<Simulator> {
    let not_ours = || io::Error::from(io::ErrorKind::InvalidData);
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // Before there is another thread: each has capabilities of its own.
    privileges::drop_all()?;
    sys::keep_heap(HEAP_BYTES);
    let socket = rustix::stdio::stdin();
    let (bytes, fds) = receive_with(socket)?;
    let fds: [OwnedFd; 2] = fds.try_into().map_err(|_| not_ours())?;
    let [board, image] = fds.map(File::from);
    let Some(Order::Setup {
        read_only,
        queue_size,
        request_bytes,
        errant,
    }) = Order::decode(&bytes)
    else {
        return Err(not_ours());
    };
    let board: &'static Board = Box::leak(Box::new(Board::open(board)?));
    let keep = errant.contains(&Errant::AfterRevoke);
    let reach = Reach::new(board, keep, tell)?;
    let counters = Arc::new(DeviceCounters::default());
    // One number for both: the filter knows one.
    let number = image.as_raw_fd();
    let mut disk = Blk::new(image, read_only, Arc::clone(&counters))?;
    let caps = Caps {
        queue_size,
        request_bytes,
        ..Caps::default()
    };
    let complaints = Complaints::new(|refused| {
        if let Some(TooLong { bytes, most }) = refused.downcast_ref().copied() {
            tell(&Report::TooLong { bytes, most });
        }
    });
    disk.keep_within(&caps, complaints);
    if !errant.is_empty() {
        let told = |tried: &Tried| {
            tell(&Report::Tried {
                errant: tried.errant,
                access: tried.access,
                iova: tried.iova,
                stopped: tried.stopped,
            });
        };
        disk.misbehave(Misbehaviour::new(
            &errant,
            None,
            told,
            Arc::clone(&counters),
        ));
    }
    let queues = disk.queue_sizes().iter();
    let queues = queues
        .map(|size| Queue::new(*size))
        .collect::<Result<_, _>>();
    let queues = queues.map_err(io::Error::other)?;
    copy::catch_faults()?;
    let listener = mapper::start(board, map)?;
    limits::apply(disk.file())?;
    sys::close_all_but(&[socket.as_raw_fd(), number, listener.as_raw_fd()])?;
    let own = socket.try_clone_to_owned()?;
    send_with(&own, &Report::Ready.encode(), &[listener.as_fd()])?;
    drop((own, listener));
    sys::confine(&filter::for_the_device(socket.as_raw_fd(), number), false)?;
    tell(&Report::Confined);
    Ok(Simulator {
        reach,
        disk,
        counters,
        queues,
    })
}

impl Simulator {
    /// The next order; none if the daemon has gone.
    fn next(&self) -> Option<Order> {
        let mut bytes = [0; MAX_BYTES + 1];
        let got = rustix::io::read(rustix::stdio::stdin(), &mut bytes[..]).ok()?;
        Order::decode(bytes.get(..got)?)
    }

    /// Does what it is told until the daemon goes.
    ///
    /// # Errors
    /// None; it ends the process.
    pub fn serve(self) -> io::Result<()> {
        self.serve_after(|_| ())
    }

    /// The same, with something else to do before each order.
    ///
    /// # Errors
    /// None; it ends the process.
    pub fn serve_after(mut self, before: impl Fn(&Blk)) -> io::Result<()> {
        while let Some(order) = self.next() {
            before(&self.disk);
            self.obey(order);
        }
        sys::end(0)
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Setup { .. } => sys::end(1),
            Order::Begin { features } => self.disk.activate(features),
            Order::Queue {
                index,
                size,
                event_index,
                descriptors,
                available,
                used,
                at,
            } => {
                let Some(queue) = self.queues.get_mut(usize::from(index)) else {
                    sys::end(1);
                };
                let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
                queue.reset();
                queue.set_size(size);
                queue.set_event_idx(event_index);
                let (low, high) = halves(descriptors);
                queue.set_desc_table_address(low, high);
                let (low, high) = halves(available);
                queue.set_avail_ring_address(low, high);
                let (low, high) = halves(used);
                queue.set_used_ring_address(low, high);
                queue.set_next_avail(at.next_available);
                queue.set_next_used(at.next_used);
                queue.set_ready(true);
            }
            Order::Kick { index, round } => self.work(index, round),
            Order::Reset => {
                self.disk.reset();
                self.queues.iter_mut().for_each(Queue::reset);
                tell(&Report::WasReset);
            }
        }
    }

    fn work(&mut self, index: u16, round: u64) {
        let at = usize::from(index);
        let Some(queue) = self.queues.get_mut(at) else {
            sys::end(1);
        };
        self.reach.begin_turn();
        let report = match self.disk.process(at, queue, &mut self.reach) {
            Ok(turn) => Report::Turn {
                index,
                round,
                turn,
                at: Place {
                    next_available: queue.next_avail(),
                    next_used: queue.next_used(),
                },
                counted: self.counters.take(),
            },
            Err(_) => Report::Broken { index, round },
        };
        tell(&report);
    }
}
