//! An endpoint as its readers and the unit share it: the gate, and what there is to see behind it.

use std::sync::{Arc, PoisonError};

use ringfence_types::RequesterId;

use crate::qsbr::Qsbr;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};
use crate::table::Table;

/// What a reader translates by, and where it ends up. Readers keep the one they saw until a
/// checkpoint tells them of another.
pub(crate) struct ReaderView<M> {
    pub(crate) attachment: AttachedDomain,
    /// What physical addresses refer to.
    pub(crate) memory: Arc<M>,
}

/// What an endpoint's addresses are.
#[derive(Clone)]
pub(crate) enum AttachedDomain {
    /// Nothing: every access faults.
    Blocked,
    /// Physical addresses.
    Bypass,
    /// Addresses of a domain.
    Domain(Arc<Table>),
}

/// One endpoint.
pub(crate) struct Endpoint<M> {
    device: RequesterId,
    qsbr: Qsbr,
    /// Grows with every change of the view, and of what links its table has lost.
    generation: AtomicU64,
    view: Mutex<Arc<ReaderView<M>>>,
    /// Slots of the gate that no reader has.
    free: Mutex<Vec<usize>>,
}

impl<M> Endpoint<M> {
    /// An endpoint that is denied everything, with room for `readers` readers.
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

    /// Counts changes of the view. If it is not the reader's own number, [`view`](Self::view) is
    /// due.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        // Relaxed: read after R2 or R4, which order it; and the lock orders the view.
        self.generation.load(Ordering::Relaxed)
    }

    /// The view, and its generation.
    pub(crate) fn view(&self) -> (Arc<ReaderView<M>>, u64) {
        let view = lock(&self.view);
        (Arc::clone(&view), self.generation())
    }

    /// Tells readers that the table in the view has lost links. Some may follow them until their
    /// gate has been waited at.
    pub(crate) fn invalidate_walk_caches(&self) {
        // Under the lock, because a reader that sees the new generation takes it and must then find
        // the links gone.
        let _view = lock(&self.view);
        self.advance();
    }

    /// Shows readers `view`. Some may go on with the view before until their gate has been waited
    /// at ([`synchronize`](crate::qsbr::synchronize)).
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

    /// A slot of the gate for a reader.
    pub(crate) fn alloc_slot(&self) -> Option<usize> {
        let slot = lock(&self.free).pop()?;
        self.qsbr.register(slot);
        Some(slot)
    }

    /// The reader of `slot`, offline, is gone.
    pub(crate) fn free_slot(&self, slot: usize) {
        lock(&self.free).push(slot);
    }
}

/// Nothing panics while it holds one of these locks, and what they protect is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
