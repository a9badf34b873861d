//! The CPUs of one machine under shuttle's schedules.
#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex as Plain;

use ringfence_dma::Platform;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Lock, Nanos, Pfn,
    PfnRange, Ticket,
};
use shuttle::sync::Mutex;
use shuttle::thread;

/// The embedder's lock.
pub(crate) struct Shuttled<T>(Mutex<T>);

impl<T> Lock<T> for Shuttled<T> {
    fn with<R>(&self, critical: impl FnOnce(&mut T) -> R) -> R {
        critical(&mut self.0.lock().unwrap())
    }
}

pub(crate) fn shuttled<T>(value: T) -> Shuttled<T> {
    Shuttled(Mutex::new(value))
}

/// The entries that the hardware caches, and the requests that it received. Hidden from shuttle,
/// except for the yields between a request and its completion.
#[derive(Debug, Default)]
pub(crate) struct Hardware {
    pub(crate) cached: BTreeSet<(DomainId, u64)>,
    /// The entries that each request removes at its completion: only those cached at its
    /// submission.
    pub(crate) requests: BTreeMap<u64, (Invalidation, BTreeSet<(DomainId, u64)>)>,
    pub(crate) submitted: u64,
    /// The requests that fail.
    pub(crate) failing: BTreeSet<u64>,
}

/// One CPU's view of the machine.
pub(crate) struct Processor {
    pub(crate) arena: std::sync::Arc<Arena>,
    pub(crate) frames: std::sync::Arc<Frames<std::sync::Arc<Arena>>>,
    pub(crate) port: Port,
    pub(crate) now: Nanos,
}

#[derive(Clone)]
pub(crate) struct Port(pub(crate) std::sync::Arc<Plain<Hardware>>);

impl Invalidator for Port {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        thread::yield_now();
        let mut hardware = self.0.lock().unwrap();
        hardware.submitted += 1;
        let number = hardware.submitted;
        let named = hardware
            .cached
            .iter()
            .filter(|(domain, page)| {
                let page = PfnRange::new(Pfn::new(*page), 1).unwrap();
                request.covers(*domain, &page, CachedLevels::Leaves)
            })
            .copied()
            .collect();
        hardware.requests.insert(number, (request, named));
        Ok(Ticket::new(number))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        // Let other tasks run between the request and its completion.
        thread::yield_now();
        let mut hardware = self.0.lock().unwrap();
        let (_, named) = hardware.requests.remove(&ticket.get()).unwrap();
        if hardware.failing.contains(&ticket.get()) {
            return Err(InvalidationError::Failed);
        }
        for page in named {
            hardware.cached.remove(&page);
        }
        Ok(true)
    }
}

impl Platform for Processor {
    type Memory = Arena;
    type Frames = Frames<std::sync::Arc<Arena>>;
    type Invalidator = Port;

    fn memory(&self) -> &Arena {
        &self.arena
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Port {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        self.now
    }
}
