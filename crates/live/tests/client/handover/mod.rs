//! Devices that go from one process to another while a client uses them.

/// What a process has that takes devices over in this directory: nothing of its own.
macro_rules! here {
    ($dir:expr) => {
        ringfence_live::daemon::LocalConfig::new(
            $dir,
            &ringfence_live::limits::GuestLimits::default(),
            &super::guest::log(),
        )
    };
}

mod assigned;
mod card;
mod first;
mod guest;
mod memory;
mod net;
mod record;
mod refused;
mod sandboxed;
mod stream;
mod taken;
