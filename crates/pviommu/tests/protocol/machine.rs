//! A guest's platform and its channel to a host.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::Platform;
use ringfence_memory::Arena;
use ringfence_pviommu::frontend::{Channel, RemoteTable, SharedChannel, UnmapCompletions};
use ringfence_types::{Invalidator, Nanos, RequesterId};

use crate::rig::{NIC, Source};

pub(crate) type Line<Q> = Rc<SharedChannel<Q, RefCell<Channel<Q>>>>;
pub(crate) type Table<Q> = RemoteTable<Line<Q>, Q, RefCell<Channel<Q>>>;

pub(crate) const ID: RequesterId = RequesterId::new(NIC.get() as u16);
/// Pages of the window that a guest uses.
pub(crate) const SPACE: u64 = 96;

/// Invalidator that waits for the host's answers.
pub(crate) type Waits<Q> = UnmapCompletions<Line<Q>, Q, RefCell<Channel<Q>>>;

/// A guest's platform.
pub(crate) struct Machine<I> {
    pub(crate) memory: Arc<Arena>,
    pub(crate) frames: Source,
    pub(crate) answers: I,
    pub(crate) now: Nanos,
}

impl<I: Invalidator> Platform for Machine<I> {
    type Memory = Arc<Arena>;
    type Frames = Source;
    type Invalidator = I;

    fn memory(&self) -> &Arc<Arena> {
        &self.memory
    }

    fn frames(&self) -> &Source {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut I {
        &mut self.answers
    }

    fn now(&self) -> Nanos {
        self.now
    }
}
