//! The guest's memory as the unit reads it: every address goes through the second stage.

use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicU64;

use ringfence_pgtable::{Cursor, Leaf, SecondStage, WalkErrorKind, walk};
use ringfence_types::{
    Access, DomainId, GuestPhysAddr, Iova, MemoryError, PhysAddr, PhysMemory, TABLE_WORDS,
};

use super::cache::SecondStageCache;

/// Memory that is addressed by guest-physical address. The walk of a first-stage table reads its
/// entries through it.
pub(super) struct SecondStageView<'a, M: ?Sized> {
    pub(super) mem: &'a M,
    pub(super) domain: DomainId,
    pub(super) format: SecondStage,
    pub(super) root: PhysAddr,
    pub(super) cache: RefCell<&'a mut SecondStageCache>,
    /// Words read so far, of both stages.
    pub(super) references: Cell<u64>,
    /// The second-stage fault that ended the walk.
    pub(super) stopped: Cell<Option<(GuestPhysAddr, WalkErrorKind)>>,
}

impl<M: PhysMemory + ?Sized> SecondStageView<'_, M> {
    /// Translates a guest-physical address for reads or writes.
    pub(super) fn translate(
        &self,
        guest: GuestPhysAddr,
        access: Access,
    ) -> Result<Leaf, WalkErrorKind> {
        let cached = match self.cache.try_borrow_mut() {
            Ok(mut cache) => cache.lookup(self.domain, guest),
            Err(_) => None,
        };
        let leaf = match cached {
            Some(leaf) => leaf,
            None => {
                let leaf = self.walk(guest)?;
                if let Ok(mut cache) = self.cache.try_borrow_mut() {
                    cache.fill(self.domain, guest, leaf);
                }
                leaf
            }
        };
        if leaf.permissions.allows(access) {
            Ok(leaf)
        } else {
            Err(WalkErrorKind::NoPermission)
        }
    }

    fn walk(&self, guest: GuestPhysAddr) -> Result<Leaf, WalkErrorKind> {
        let start = Cursor::root(&self.format, self.root);
        self.count();
        let found = walk(
            &self.format,
            self.mem,
            start,
            Iova::new(guest.get()),
            |_| {
                self.count();
            },
        );
        found.map_err(|error| error.kind)
    }

    fn count(&self) {
        self.references.set(self.references.get().wrapping_add(1));
    }

    /// Returns the host address of a first-stage entry.
    fn host(&self, at: PhysAddr) -> Result<PhysAddr, MemoryError> {
        let guest = GuestPhysAddr::new(at.get());
        match self.translate(guest, Access::Read) {
            Ok(leaf) => Ok(leaf.translate(Iova::new(at.get()))),
            Err(kind) => {
                self.stopped.set(Some((guest, kind)));
                Err(MemoryError::Outside { at, words: 1 })
            }
        }
    }
}

/// Addresses are guest-physical. A run of words must not cross a page.
impl<M: PhysMemory + ?Sized> PhysMemory for SecondStageView<'_, M> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let host = self.host(at)?;
        self.count();
        self.mem.word(host)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.mem.table(self.host(at)?)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        let fits = at.offset_in(4096) / 8 + count as u64 <= TABLE_WORDS as u64;
        if !fits {
            return Err(MemoryError::Outside {
                at,
                words: count as u64,
            });
        }
        self.mem.words(self.host(at)?, count)
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}
