//! The reader's side: a slot, a burst, a pin.

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
/// offline, which it is whenever no [`ReadSection`] borrows it.
///
/// An offline reader keeps the view it last saw, and with it memory that has been replaced since;
/// it cannot reach it. The view goes when the reader next goes online, or is dropped.
pub struct Reader<M> {
    endpoint: Arc<Endpoint<M>>,
    slot: usize,
    epoch: u64,
    generation: u64,
    state: ReaderState<M>,
}

/// What a pin looks at.
struct ReaderState<M> {
    view: Arc<ReaderView<M>>,
    /// Of the table in the view.
    walk_cache: WalkCache,
    device: RequesterId,
    /// The first fault that a pin could not return as one.
    fault: Cell<Option<Fault>>,
}

/// A burst of work: while it lives, unmap waits for its next [`guard`](Self::guard) or its end. It
/// must not live across anything that blocks.
///
/// It stays on its thread. If it is leaked, that thread is refused every change from then on, and
/// others wait until the reader goes online again or is dropped.
pub struct ReadSection<'r, M> {
    reader: &'r mut Reader<M>,
    /// Neither `Send` nor `Sync`.
    stays: PhantomData<*const ()>,
}

/// The right to translate and to use what translations give, until the next pin of its burst. It
/// costs nothing to copy.
pub struct ReadGuard<'p, M> {
    /// The words of the table that the endpoint's domain has; none if it is not attached to one.
    words: &'p [AtomicU64],
    state: &'p ReaderState<M>,
    /// Neither `Send` nor `Sync`: another thread's accesses would not be over at this one's
    /// checkpoint.
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
    /// `None` if the endpoint has as many readers as it may have.
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

    /// The endpoint.
    pub fn device(&self) -> RequesterId {
        self.endpoint.device()
    }

    /// Begins a burst of work. Costs a full fence: do it when work begins, not for each request.
    /// After some thousand unmaps in which nobody was online it costs a `membarrier` instead, which
    /// lets unmap do without a fence meanwhile.
    ///
    /// # Panics
    /// If a filter of system calls that was put up after the endpoint was added refuses
    /// `membarrier`. Allow it, or put the filter up before: then there is no such thing.
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

    /// Looks whether there is another view to look at, or the table in it has lost links.
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

    /// The pins before are gone: says so to whoever waits for it.
    #[cold]
    fn checkpoint(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.refresh();
        self.endpoint.qsbr().quiescent(self.slot, epoch);
    }
}

impl<M> Drop for Reader<M> {
    fn drop(&mut self) {
        // A burst that was leaked ends here.
        self.endpoint.qsbr().offline(self.slot);
        self.endpoint.free_slot(self.slot);
    }
}

impl<M> ReadSection<'_, M> {
    /// A pin for the next request. The one before, and all slices taken under it, are gone by then:
    /// this is the checkpoint that unmap waits for.
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
    /// Whose accesses this pin translates.
    pub fn device(&self) -> RequesterId {
        self.state.device
    }

    /// What the addresses of translations refer to.
    #[inline]
    pub fn memory(&self) -> &'p M {
        &self.state.view.memory
    }

    /// The first access that an interface without room for a [`Fault`] has refused, such as
    /// vm-memory's, since this was last asked. It is the reader's, and outlives the pin.
    pub fn take_fault(&self) -> Option<Fault> {
        self.state.fault.take()
    }

    /// Keeps `fault` for [`take_fault`](Self::take_fault), unless there is one already.
    #[cfg(feature = "vm-memory")]
    #[cold]
    pub(crate) fn keep_fault(&self, fault: Fault) {
        if self.state.fault.get().is_none() {
            self.state.fault.set(Some(fault));
        }
    }

    /// Where the bytes of `range` lie, if the device may access every one of them as `access` says.
    ///
    /// The addresses are good for as long as the pin lives, even where their mapping goes in the
    /// meantime.
    #[inline]
    pub fn translate(&self, range: IovaRange, access: Access) -> Result<PhysRanges, Fault> {
        self.translate_for(range, permissions(access))
    }

    /// As [`translate`](Self::translate), for all accesses of `wanted` at once.
    #[inline]
    pub fn translate_for(
        &self,
        range: IovaRange,
        wanted: Permissions,
    ) -> Result<PhysRanges, Fault> {
        match self.translate_cached(&range, wanted) {
            Some(found) => Ok(PhysRanges::one(found)),
            None => self.walk(range, wanted),
        }
    }

    /// The memory behind `range` in the usual case: see
    /// [`walk::translate_cached`](translate_cached).
    #[inline]
    pub(crate) fn translate_cached(
        &self,
        range: &IovaRange,
        wanted: Permissions,
    ) -> Option<PhysRange> {
        translate_cached(self.words, &self.state.walk_cache, range, wanted)
    }

    /// The memory behind `range` in every case.
    #[inline(never)]
    pub(crate) fn walk(&self, range: IovaRange, wanted: Permissions) -> Result<PhysRanges, Fault> {
        match &self.state.view.attachment {
            AttachedDomain::Domain(table) => table
                .translate(&self.state.walk_cache, range, wanted)
                .map_err(|denied| self.fault(denied)),
            AttachedDomain::Bypass => self.untranslated(range, wanted).map(PhysRanges::one),
            AttachedDomain::Blocked => {
                Err(self.fault((range.start(), one_of(wanted), FaultReason::Blocked)))
            }
        }
    }

    #[inline]
    fn untranslated(&self, range: IovaRange, wanted: Permissions) -> Result<PhysRange, Fault> {
        let [start, last] = [range.start(), range.last()].map(|at| PhysAddr::new(at.get()));
        PhysRange::inclusive(start, last)
            .ok_or_else(|| self.fault((range.start(), one_of(wanted), FaultReason::BadLength)))
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

/// What an access needs.
#[inline]
pub(crate) const fn permissions(access: Access) -> Permissions {
    match access {
        Access::Read => Permissions::READ,
        Access::Write => Permissions::WRITE,
    }
}
