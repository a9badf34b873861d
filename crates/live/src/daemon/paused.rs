//! Devices that are paused until the daemon launches them.

use std::io;
use std::sync::Arc;

use super::Log;
use crate::counters::DeviceCounters;
use crate::handover::{
    HandOverBlocker, HandOverFunction, PauseHandle, SavedDevice, save, serve_device,
};
use crate::server::{ClientSlot, ServeEvent, StopSignal};

/// A device whose thread is not started.
pub(super) struct PausedDevice {
    name: &'static str,
    log: Log,
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
            log: Arc::clone(&log),
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

    /// Confines the calling thread with `confine` and serves the device. Logs the error if either
    /// fails: nobody may wait for the thread yet.
    ///
    /// # Errors
    /// The thread could not be confined, or waiting for clients failed.
    pub(super) fn serve(self, confine: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let Self { name, log, device } = self;
        let ended = confine().and_then(|()| device.serve());
        if let Err(error) = &ended {
            log(name, &ServeEvent::Failed(error));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct FailingDevice;

    impl DynPausedDevice for FailingDevice {
        fn save(&self) -> Result<SavedDevice, HandOverBlocker> {
            unreachable!("the device is not saved")
        }

        fn serve(self: Box<Self>) -> io::Result<()> {
            Err(io::Error::other("no poll"))
        }
    }

    #[test]
    fn the_log_has_the_error_that_ends_a_thread() {
        let confined: fn() -> io::Result<()> = || Ok(());
        let refused: fn() -> io::Result<()> = || Err(io::Error::other("no filter"));
        for (confine, wanted) in [(confined, "no poll"), (refused, "no filter")] {
            let lines = Arc::new(Mutex::new(Vec::new()));
            let shared = Arc::clone(&lines);
            let paused = PausedDevice {
                name: "blk",
                log: Arc::new(move |name, event| {
                    if let ServeEvent::Failed(error) = event {
                        shared.lock().unwrap().push(format!("{name}: {error}"));
                    }
                }),
                device: Box::new(FailingDevice),
            };
            assert_eq!(paused.serve(confine).unwrap_err().to_string(), wanted);
            assert_eq!(*lines.lock().unwrap(), [format!("blk: {wanted}")]);
        }
    }
}
