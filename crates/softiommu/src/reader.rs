//! Reader side: slot, read section, guard.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use ringfence_types::{
    Access, Fault, FaultReason, IovaRange, Permissions, PhysAddr, PhysRange, RequesterId,
};

use crate::endpoint::{AttachedDomain, Endpoint, ReaderView};
use crate::guard_count;
use crate::phys_ranges::PhysRanges;
use crate::sync::AtomicU64;
use crate::walk::{Denied, one_of, translate_cached};
use crate::walk_cache::WalkCache;

/// One thread's access to an endpoint's address space. May move between threads while it is
/// offline, that is, while no [`ReadSection`] borrows it.
///
/// An offline reader keeps a reference to the view it last saw, including memory that was replaced
/// since. It cannot access that memory. It releases the view when it next goes online or is
/// dropped.
pub struct Reader<M> {
    endpoint: Arc<Endpoint<M>>,
    slot: usize,
    epoch: u64,
    generation: u64,
    state: ReaderState<M>,
}

/// State that a guard reads.
struct ReaderState<M> {
    view: Arc<ReaderView<M>>,
    /// Links of the table in the view.
    walk_cache: WalkCache,
    device: RequesterId,
    /// The first fault that an interface could not return, see [`ReadGuard::take_fault`].
    fault: Cell<Option<Fault>>,
}

/// A batch of work during which the reader is online. Unmap waits until the reader calls
/// [`guard`](Self::guard) or drops the section. A section must not span a blocking call.
///
/// The section stays on its thread. If it is leaked, every change of mappings by that thread fails
/// from then on. Other threads wait until the reader goes online again or is dropped.
pub struct ReadSection<'r, M> {
    reader: &'r mut Reader<M>,
    /// Makes the type neither `Send` nor `Sync`.
    stays: PhantomData<*const ()>,
}

/// Permission to translate and to use the results, until the next guard of its read section. A
/// cheap copy.
pub struct ReadGuard<'p, M> {
    /// Words of the table of the attached domain; empty if there is none.
    words: &'p [AtomicU64],
    state: &'p ReaderState<M>,
    /// Makes the type neither `Send` nor `Sync`: another thread's accesses would not end at this
    /// thread's checkpoint.
    stays: PhantomData<*const ()>,
}

impl<M> Clone for ReadGuard<'_, M> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for ReadGuard<'_, M> {}

impl<M> Reader<M> {
    /// Creates a reader; `None` if the endpoint already has its maximum number of readers.
    pub(crate) fn new(endpoint: Arc<Endpoint<M>>) -> Option<Self> {
        let slot = endpoint.alloc_slot()?;
        let (view, generation) = endpoint.view();
        let seen = ReaderState {
            view,
            walk_cache: WalkCache::new(),
            device: endpoint.device(),
            fault: Cell::new(None),
        };
        Some(Self {
            endpoint,
            slot,
            epoch: 0,
            generation,
            state: seen,
        })
    }

    /// Returns the requester ID of the endpoint.
    pub fn device(&self) -> RequesterId {
        self.endpoint.device()
    }

    /// Goes online and starts a read section. Costs a full fence, so call it once per batch of
    /// work, not per request.
    ///
    /// After some thousand unmaps with no reader online it costs a `membarrier` system call
    /// instead. In exchange, those unmaps need no fence.
    ///
    /// # Panics
    /// Panics if a seccomp filter, installed after the endpoint was added, rejects `membarrier`.
    /// Allow the system call, or install the filter earlier: then `membarrier` is not used.
    #[inline]
    pub fn online(&mut self) -> ReadSection<'_, M> {
        guard_count::increment();
        self.epoch = self.endpoint.qsbr().online(self.slot);
        self.refresh();
        ReadSection {
            reader: self,
            stays: PhantomData,
        }
    }

    /// Reloads the view if it was replaced, or if its table lost links.
    #[inline]
    fn refresh(&mut self) {
        if self.endpoint.generation() != self.generation {
            self.reload_view();
        }
    }

    #[cold]
    fn reload_view(&mut self) {
        (self.state.view, self.generation) = self.endpoint.view();
        self.state.walk_cache.clear();
    }

    /// Passes a checkpoint: no earlier guard exists, so waiters need no longer wait for this
    /// reader.
    #[cold]
    fn checkpoint(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.refresh();
        self.endpoint.qsbr().quiescent(self.slot, epoch);
    }
}

impl<M> Drop for Reader<M> {
    fn drop(&mut self) {
        // Ends a leaked read section.
        self.endpoint.qsbr().offline(self.slot);
        self.endpoint.free_slot(self.slot);
    }
}

impl<M> ReadSection<'_, M> {
    /// Returns a guard for the next request. All earlier guards and slices have ended by now: this
    /// call is the checkpoint that unmap waits for.
    #[inline]
    pub fn guard(&mut self) -> ReadGuard<'_, M> {
        let epoch = self.reader.endpoint.qsbr().epoch();
        if epoch != self.reader.epoch {
            self.reader.checkpoint(epoch);
        }
        let seen = &self.reader.state;
        let words = match &seen.view.attachment {
            AttachedDomain::Domain(table) => table.all(),
            AttachedDomain::Bypass | AttachedDomain::Blocked => &[],
        };
        ReadGuard {
            words,
            state: seen,
            stays: PhantomData,
        }
    }
}

impl<M> Drop for ReadSection<'_, M> {
    #[inline]
    fn drop(&mut self) {
        self.reader.endpoint.qsbr().offline(self.reader.slot);
        guard_count::decrement();
    }
}

impl<'p, M> ReadGuard<'p, M> {
    /// Returns the requester ID whose accesses this guard translates.
    pub fn device(&self) -> RequesterId {
        self.state.device
    }

    /// Returns the memory that translated addresses refer to.
    #[inline]
    pub fn memory(&self) -> &'p M {
        &self.state.view.memory
    }

    /// Takes the first fault, since the last call, of an interface that cannot return a [`Fault`],
    /// such as vm-memory. The reader stores the fault, so it outlives the guard.
    pub fn take_fault(&self) -> Option<Fault> {
        self.state.fault.take()
    }

    /// Stores `fault` for [`take_fault`](Self::take_fault) unless one is already stored.
    #[cfg(feature = "vm-memory")]
    #[cold]
    pub(crate) fn keep_fault(&self, fault: Fault) {
        if self.state.fault.get().is_none() {
            self.state.fault.set(Some(fault));
        }
    }

    /// Translates `range` if the device may access every byte of it.
    ///
    /// The addresses stay valid while the guard lives, even if another thread unmaps them.
    ///
    /// # Errors
    /// [`Fault`] with the first address that the device may not access.
    #[inline]
    pub fn translate(&self, range: IovaRange, access: Access) -> Result<PhysRanges, Fault> {
        self.translate_for(range, permissions(access))
    }

    /// Translates as [`translate`](Self::translate) does, and requires all permissions of
    /// `required`.
    #[inline]
    pub fn translate_for(
        &self,
        range: IovaRange,
        required: Permissions,
    ) -> Result<PhysRanges, Fault> {
        match self.translate_cached(&range, required) {
            Some(found) => Ok(PhysRanges::one(found)),
            None => self.walk(range, required),
        }
    }

    /// Fast path: translates `range` within one page whose table is cached. See
    /// [`walk::translate_cached`](translate_cached).
    #[inline]
    pub(crate) fn translate_cached(
        &self,
        range: &IovaRange,
        required: Permissions,
    ) -> Option<PhysRange> {
        translate_cached(self.words, &self.state.walk_cache, range, required)
    }

    /// Slow path: translates any range.
    #[inline(never)]
    pub(crate) fn walk(
        &self,
        range: IovaRange,
        required: Permissions,
    ) -> Result<PhysRanges, Fault> {
        match &self.state.view.attachment {
            AttachedDomain::Domain(table) => table
                .translate(&self.state.walk_cache, range, required)
                .map_err(|denied| self.fault(denied)),
            AttachedDomain::Bypass => self.untranslated(range, required).map(PhysRanges::one),
            AttachedDomain::Blocked => {
                Err(self.fault((range.start(), one_of(required), FaultReason::Blocked)))
            }
        }
    }

    #[inline]
    fn untranslated(&self, range: IovaRange, required: Permissions) -> Result<PhysRange, Fault> {
        let [start, last] = [range.start(), range.last()].map(|at| PhysAddr::new(at.get()));
        PhysRange::inclusive(start, last)
            .ok_or_else(|| self.fault((range.start(), one_of(required), FaultReason::BadLength)))
    }

    #[cold]
    fn fault(&self, (iova, access, reason): Denied) -> Fault {
        Fault {
            device: self.state.device,
            iova,
            access,
            reason,
        }
    }
}

/// Returns the permission that an access needs.
#[inline]
pub(crate) const fn permissions(access: Access) -> Permissions {
    match access {
        Access::Read => Permissions::READ,
        Access::Write => Permissions::WRITE,
    }
}
