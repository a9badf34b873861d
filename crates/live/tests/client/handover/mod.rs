//! Hand-over of devices between processes while a client uses them.

/// A destination's configuration for this directory, with defaults for everything else.
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
mod dmas;
mod guest;
mod malicious_source;
mod memory;
mod net;
mod net_driver;
mod record;
mod refused;
mod ring;
mod sandboxed;
mod stream;
mod success;
