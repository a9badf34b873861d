//! State of an endpoint that the unit shares with its readers: QSBR state and view.

use std::sync::{Arc, PoisonError};

use ringfence_types::RequesterId;

use crate::qsbr::Qsbr;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};
use crate::table::Table;

/// The attachment and the memory through which a reader translates. A reader keeps its view until a
/// checkpoint finds a newer one.
pub(crate) struct ReaderView<M> {
    pub(crate) attachment: AttachedDomain,
    /// Memory that physical addresses refer to.
    pub(crate) memory: Arc<M>,
}

/// Attachment of an endpoint.
#[derive(Clone)]
pub(crate) enum AttachedDomain {
    /// Blocked: every access faults.
    Blocked,
    /// Bypass: the device uses physical addresses.
    Bypass,
    /// Attached: the device uses addresses of a domain.
    Domain(Arc<Table>),
}

/// An endpoint, shared by the unit and its readers.
pub(crate) struct Endpoint<M> {
    device: RequesterId,
    qsbr: Qsbr,
    /// Incremented when the view changes or its table loses links.
    generation: AtomicU64,
    view: Mutex<Arc<ReaderView<M>>>,
    /// Reader slots that are not in use.
    free: Mutex<Vec<usize>>,
}

impl<M> Endpoint<M> {
    /// Creates a blocked endpoint with room for `readers` readers.
    pub(crate) fn new(device: RequesterId, readers: usize, memory: Arc<M>) -> Self {
        let view = ReaderView {
            attachment: AttachedDomain::Blocked,
            memory,
        };
        Self {
            device,
            qsbr: Qsbr::new(readers),
            generation: AtomicU64::new(0),
            view: Mutex::new(Arc::new(view)),
            free: Mutex::new((0..readers).rev().collect()),
        }
    }

    pub(crate) fn device(&self) -> RequesterId {
        self.device
    }

    #[inline]
    pub(crate) fn qsbr(&self) -> &Qsbr {
        &self.qsbr
    }

    /// Returns the generation of the view. If it differs from the reader's, the reader must reload
    /// the [`view`](Self::view).
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        // Relaxed: readers load it after R2 or R4, which orders it. The lock orders the view.
        self.generation.load(Ordering::Relaxed)
    }

    /// Returns the view and its generation.
    pub(crate) fn view(&self) -> (Arc<ReaderView<M>>, u64) {
        let view = lock(&self.view);
        (Arc::clone(&view), self.generation())
    }

    /// Makes readers drop their walk caches, because the table in the view has lost links. Readers
    /// may follow the old links until the caller has waited for readers.
    pub(crate) fn invalidate_walk_caches(&self) {
        // Under the lock: a reader that sees the new generation takes the lock and must then see
        // the links removed.
        let _view = lock(&self.view);
        self.advance();
    }

    /// Publishes `view` to readers. Some may use the old view until the caller has waited for them
    /// ([`synchronize`](crate::qsbr::synchronize)).
    pub(crate) fn publish(&self, view: ReaderView<M>) {
        let mut shown = lock(&self.view);
        *shown = Arc::new(view);
        self.advance();
    }

    fn advance(&self) {
        // Relaxed: `synchronize` orders it.
        self.generation
            .store(self.generation().wrapping_add(1), Ordering::Relaxed);
    }

    /// Allocates a reader slot; `None` if all are in use.
    pub(crate) fn alloc_slot(&self) -> Option<usize> {
        let slot = lock(&self.free).pop()?;
        self.qsbr.register(slot);
        Some(slot)
    }

    /// Frees `slot`, whose reader must be offline.
    pub(crate) fn free_slot(&self, slot: usize) {
        lock(&self.free).push(slot);
    }
}

/// Locks `mutex` and ignores poisoning: no code panics while holding one of these locks, and the
/// protected data is always consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
