//! Devices that are paused until the daemon launches them.

use std::io;
use std::sync::Arc;

use super::Log;
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::handover::{HandOverBlocker, PauseHandle, SavedDevice, save, serve_device};
use crate::server::{ClientSlot, StopSignal};
use crate::virtio::{Device, VirtioPci};

/// A device whose thread is not started.
pub(super) struct PausedDevice(Box<dyn DynPausedDevice>);

impl std::fmt::Debug for PausedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PausedDevice")
    }
}

/// A paused device of any kind.
trait DynPausedDevice: Send {
    fn save(&self) -> Result<SavedDevice, HandOverBlocker>;
    fn serve(self: Box<Self>) -> io::Result<()>;
}

struct PausedThread<D, A> {
    name: &'static str,
    slot: ClientSlot<VirtioPci<D, A>>,
    pause: PauseHandle,
    counters: Arc<DeviceCounters>,
    stop: StopSignal,
    log: Log,
}

impl<D: Device + Send, A: Dma> DynPausedDevice for PausedThread<D, A> {
    fn save(&self) -> Result<SavedDevice, HandOverBlocker> {
        save(&self.slot)
    }

    fn serve(self: Box<Self>) -> io::Result<()> {
        let Self {
            name,
            slot,
            pause,
            counters,
            stop,
            log,
        } = *self;
        serve_device(slot, &pause, &counters, &stop, |event| log(name, &event))
    }
}

impl PausedDevice {
    pub(super) fn new<D: Device + Send + 'static, A: Dma + 'static>(
        name: &'static str,
        slot: ClientSlot<VirtioPci<D, A>>,
        pause: PauseHandle,
        counters: Arc<DeviceCounters>,
        stop: StopSignal,
        log: Log,
    ) -> Self {
        Self(Box::new(PausedThread {
            name,
            slot,
            pause,
            counters,
            stop,
            log,
        }))
    }

    /// Returns the state that another process needs to serve the device.
    pub(super) fn save(&self) -> Result<SavedDevice, HandOverBlocker> {
        self.0.save()
    }

    pub(super) fn serve(self) -> io::Result<()> {
        self.0.serve()
    }
}
