//! Process side of the sandbox: the process confines itself and then serves a disk.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{Signal, set_parent_process_death_signal};
use virtio_queue::{Queue, QueueT};

use super::process::{receive_with, send_with};
use super::sandbox_memory::{SandboxFault, SandboxMemory};
use super::wire::{DeviceCommand, DeviceResponse, MAX_BYTES, RingPosition};
use super::{copy, filter, limits, mapper, resident};
use crate::counters::DeviceCounters;
use crate::dma_fault_injection::{InjectedDma, InjectionResult};
use crate::grants::control_region::ControlRegion;
use crate::grants::sys;
use crate::limits::{BoundedLog, GuestLimits};
use crate::privileges;
use crate::virtio::blk::{Blk, RequestTooLong};
use crate::virtio::{Device, DmaInjector};

/// Bytes that the device may allocate in addition to its initial heap.
const HEAP_BYTES: usize = 16 << 20;

/// The device of a confined process.
#[derive(Debug)]
pub struct SandboxedDevice {
    /// Access to guest memory.
    pub memory: SandboxMemory,
    /// The disk that the process serves.
    pub disk: Blk,
    counters: Arc<DeviceCounters>,
    queues: Vec<Queue>,
}

/// Sends a report to the daemon; exits if the daemon has closed the socket.
fn send(report: &DeviceResponse) {
    // Writes of packets are atomic, so an error means that the daemon has closed the socket.
    if rustix::io::write(rustix::stdio::stdin(), &report.encode()).is_err() {
        sys::end(0);
    }
}

/// Serves a disk to the daemon whose socket is standard input, and exits when the daemon closes it.
/// The process must do nothing else.
///
/// # Errors
/// Errors from before the process is confined; afterwards the process exits instead of returning.
pub fn run_sandboxed_device() -> io::Result<()> {
    enter(mapper::follow)?.serve()
}

/// Confines the process. `map` is the body of the mapping thread: [`follow`](mapper::follow) or a
/// substitute for tests.
///
/// # Errors
/// An error of confinement, or an invalid setup message.
pub fn enter(map: fn(&ControlRegion) -> !) -> io::Result<SandboxedDevice> {
    let not_ours = || io::Error::from(io::ErrorKind::InvalidData);
    set_parent_process_death_signal(Some(Signal::KILL))?;
    resident::raise_limit();
    // Each thread has its own capabilities, so drop them before the process starts another thread.
    privileges::drop_all()?;
    sys::keep_heap(HEAP_BYTES);
    let socket = rustix::stdio::stdin();
    let (bytes, fds) = receive_with(socket)?;
    let fds: [OwnedFd; 2] = fds.try_into().map_err(|_| not_ours())?;
    let [control, image] = fds.map(File::from);
    let Some(DeviceCommand::Setup {
        read_only,
        queue_size,
        request_bytes,
        injected,
    }) = DeviceCommand::decode(&bytes)
    else {
        return Err(not_ours());
    };
    let control: &'static ControlRegion = Box::leak(Box::new(ControlRegion::open(control)?));
    let keep = injected.contains(&InjectedDma::AfterRevoke);
    let memory = SandboxMemory::new(control, keep, |fault: &SandboxFault| {
        send(&DeviceResponse::Fault {
            iova: fault.iova,
            access: fault.access,
            permission: fault.permission,
        });
    })?;
    let counters = Arc::new(DeviceCounters::default());
    // Both uses share one descriptor: the filter admits a single number.
    let number = image.as_raw_fd();
    let mut disk = Blk::new(image, read_only, Arc::clone(&counters))?;
    let limits = GuestLimits {
        queue_size,
        request_bytes,
        ..GuestLimits::default()
    };
    let log = BoundedLog::new(|refused| {
        if let Some(RequestTooLong { bytes, limit: most }) = refused.downcast_ref().copied() {
            send(&DeviceResponse::TooLong { bytes, most });
        }
    });
    disk.set_limits(&limits, log);
    if !injected.is_empty() {
        let report = |result: &InjectionResult| {
            send(&DeviceResponse::Injected {
                injected: result.injected,
                access: result.access,
                iova: result.iova,
                stopped: result.stopped,
            });
        };
        disk.inject_dma(DmaInjector::new(
            &injected,
            None,
            report,
            Arc::clone(&counters),
        ));
    }
    let queues = disk.queue_sizes().iter();
    let queues = queues
        .map(|size| Queue::new(*size))
        .collect::<Result<_, _>>();
    let queues = queues.map_err(io::Error::other)?;
    copy::catch_faults()?;
    let listener = mapper::start(control, map)?;
    resident::lock_own_pages()?;
    limits::apply(disk.file())?;
    sys::close_all_but(&[socket.as_raw_fd(), number, listener.as_raw_fd()])?;
    let own = socket.try_clone_to_owned()?;
    send_with(&own, &DeviceResponse::Ready.encode(), &[listener.as_fd()])?;
    drop((own, listener));
    sys::confine(&filter::for_the_device(socket.as_raw_fd(), number), false)?;
    send(&DeviceResponse::Confined);
    Ok(SandboxedDevice {
        memory,
        disk,
        counters,
        queues,
    })
}

impl SandboxedDevice {
    /// Receives the next command. `None` if the daemon has closed the socket or the command is
    /// malformed.
    fn next(&self) -> Option<DeviceCommand> {
        let mut bytes = [0; MAX_BYTES + 1];
        let got = rustix::io::read(rustix::stdio::stdin(), &mut bytes[..]).ok()?;
        DeviceCommand::decode(bytes.get(..got)?)
    }

    /// Executes commands until the daemon closes the socket, then exits.
    ///
    /// # Errors
    /// None: this function exits the process instead of returning.
    pub fn serve(self) -> io::Result<()> {
        self.serve_after(|_| ())
    }

    /// Like [`serve`](Self::serve), but calls `before` ahead of each command.
    ///
    /// # Errors
    /// None: this function exits the process instead of returning.
    pub fn serve_after(mut self, before: impl Fn(&Blk)) -> io::Result<()> {
        while let Some(order) = self.next() {
            before(&self.disk);
            self.obey(order);
        }
        sys::end(0)
    }

    fn obey(&mut self, order: DeviceCommand) {
        match order {
            DeviceCommand::Setup { .. } => sys::end(1),
            DeviceCommand::Begin { features } => self.disk.activate(features),
            DeviceCommand::Queue {
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
            DeviceCommand::Kick { index, round } => self.work(index, round),
            DeviceCommand::Reset => {
                // This process is the one that works for the disk.
                let _ = self.disk.reset();
                self.queues.iter_mut().for_each(Queue::reset);
                send(&DeviceResponse::ResetDone);
            }
        }
    }

    fn work(&mut self, index: u16, round: u64) {
        let at = usize::from(index);
        let Some(queue) = self.queues.get_mut(at) else {
            sys::end(1);
        };
        self.memory.begin_turn();
        let report = match self.disk.process(at, queue, &mut self.memory) {
            Ok(turn) => DeviceResponse::Turn {
                index,
                round,
                turn,
                at: RingPosition {
                    next_available: queue.next_avail(),
                    next_used: queue.next_used(),
                },
                counted: self.counters.take(),
            },
            Err(_) => DeviceResponse::Broken { index, round },
        };
        send(&report);
    }
}
