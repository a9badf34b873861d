//! Devices that are paused until the daemon launches them.

use std::io;
use std::sync::Arc;

use super::Log;
use crate::counters::DeviceCounters;
use crate::handover::{
    HandOverBlocker, HandOverFunction, PauseHandle, SavedDevice, save, serve_device,
};
use crate::server::{ClientSlot, StopSignal};

/// A device whose thread is not started.
pub(super) struct PausedDevice {
    name: &'static str,
    device: Box<dyn DynPausedDevice>,
}

impl std::fmt::Debug for PausedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PausedDevice({})", self.name)
    }
}

/// A paused device of any kind.
trait DynPausedDevice: Send {
    fn save(&self) -> Result<SavedDevice, HandOverBlocker>;
    fn serve(self: Box<Self>) -> io::Result<()>;
}

struct PausedThread<F> {
    name: &'static str,
    slot: ClientSlot<F>,
    pause: PauseHandle,
    counters: Arc<DeviceCounters>,
    stop: StopSignal,
    log: Log,
}

impl<F: HandOverFunction + Send> DynPausedDevice for PausedThread<F> {
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
    pub(super) fn new<F: HandOverFunction + Send + 'static>(
        name: &'static str,
        slot: ClientSlot<F>,
        pause: PauseHandle,
        counters: Arc<DeviceCounters>,
        stop: StopSignal,
        log: Log,
    ) -> Self {
        Self {
            name,
            device: Box::new(PausedThread {
                name,
                slot,
                pause,
                counters,
                stop,
                log,
            }),
        }
    }

    /// Returns the state that another process needs to serve the device.
    pub(super) fn save(&self) -> Result<SavedDevice, HandOverBlocker> {
        self.device.save()
    }

    /// Returns the device's name.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Serves the device.
    ///
    /// # Errors
    /// Waiting for clients failed.
    pub(super) fn serve(self) -> io::Result<()> {
        self.device.serve()
    }
}
