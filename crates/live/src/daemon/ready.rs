//! Devices that stand still until they are launched.

use std::io;
use std::sync::Arc;

use super::Log;
use crate::counters::DeviceCounters;
use crate::handover::{Attention, HandedDevice, Unmovable, attend, save};
use crate::server::{Post, Served, Stop};

/// A thread that has not begun.
pub(super) struct Ready(Box<dyn Rests>);

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ready")
    }
}

/// What is to serve, whatever kind of device it is.
trait Rests: Send {
    fn save(&self) -> Result<HandedDevice, Unmovable>;
    fn serve(self: Box<Self>) -> io::Result<()>;
}

struct Resting<F> {
    name: &'static str,
    post: Post<F>,
    bell: Attention,
    counters: Arc<DeviceCounters>,
    stop: Stop,
    log: Log,
}

impl<F: Served + Send> Rests for Resting<F> {
    fn save(&self) -> Result<HandedDevice, Unmovable> {
        save(&self.post)
    }

    fn serve(self: Box<Self>) -> io::Result<()> {
        let Self {
            name,
            post,
            bell,
            counters,
            stop,
            log,
        } = *self;
        attend(post, &bell, &counters, &stop, |event| log(name, &event))
    }
}

impl Ready {
    pub(super) fn new<F: Served + Send + 'static>(
        name: &'static str,
        post: Post<F>,
        bell: Attention,
        counters: Arc<DeviceCounters>,
        stop: Stop,
        log: Log,
    ) -> Self {
        Self(Box::new(Resting {
            name,
            post,
            bell,
            counters,
            stop,
            log,
        }))
    }

    /// What another process would need to serve it.
    pub(super) fn save(&self) -> Result<HandedDevice, Unmovable> {
        self.0.save()
    }

    pub(super) fn serve(self) -> io::Result<()> {
        self.0.serve()
    }
}
