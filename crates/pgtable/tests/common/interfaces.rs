//! The ways to change a table, behind one trait.

use ringfence_pgtable::{
    DirtyLines, Format, Leaf, LeafCache, MapError, MapRequest, ReclaimingTable, Table,
    UnlinkedTables, UnmapError,
};
use ringfence_types::{CachedLevels, Invalidation, Iova, Pending, PfnRange, PhysAddr};

use crate::common::{DOMAIN, Instant, Memory, Source, flushed};

/// One way to change a table.
pub(crate) trait TableInterface<F: Format> {
    fn map(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        request: MapRequest,
    ) -> Result<(), MapError>;
    fn unmap(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        range: PfnRange,
    ) -> Result<(), UnmapError>;
    fn root(&self) -> PhysAddr;
    fn lookup(&self, mem: &Memory, iova: Iova) -> Option<Leaf>;
    fn destroy(self, mem: &Memory, frames: &Source<'_>);
}

pub(crate) struct Plain<F>(pub(crate) Table<F>);
pub(crate) struct Cached<F>(pub(crate) Table<F>, pub(crate) LeafCache);
pub(crate) struct Burst<F>(
    pub(crate) Table<F>,
    pub(crate) LeafCache,
    pub(crate) DirtyLines,
    pub(crate) bool,
);
pub(crate) struct Reclaiming<F>(pub(crate) ReclaimingTable<F>);

impl<F: Format> TableInterface<F> for Plain<F> {
    fn map(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map(mem, frames, request)
    }
    fn unmap(&mut self, mem: &Memory, _: &Source<'_>, range: PfnRange) -> Result<(), UnmapError> {
        let (unmapped, levels) = self.0.unmap(mem, range)?;
        assert_eq!((unmapped.domain(), unmapped.range()), (DOMAIN, range));
        assert_eq!(levels, CachedLevels::Leaves, "these tables stay");
        Ok(())
    }
    fn root(&self) -> PhysAddr {
        self.0.root()
    }
    fn lookup(&self, mem: &Memory, iova: Iova) -> Option<Leaf> {
        self.0.lookup(mem, iova)
    }
    fn destroy(self, mem: &Memory, frames: &Source<'_>) {
        assert!(self.0.destroy(mem, frames, &flushed()).is_ok());
    }
}

impl<F: Format> TableInterface<F> for Cached<F> {
    fn map(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.1.map(&self.0, mem, frames, request)
    }
    fn unmap(&mut self, mem: &Memory, _: &Source<'_>, range: PfnRange) -> Result<(), UnmapError> {
        let (unmapped, _) = self.1.unmap(&self.0, mem, range)?;
        assert_eq!(unmapped.range(), range);
        Ok(())
    }
    fn root(&self) -> PhysAddr {
        self.0.root()
    }
    fn lookup(&self, mem: &Memory, iova: Iova) -> Option<Leaf> {
        self.0.lookup(mem, iova)
    }
    fn destroy(self, mem: &Memory, frames: &Source<'_>) {
        let Self(table, cache) = self;
        let table = table
            .destroy(mem, frames, &flushed())
            .expect_err("a cache of it lives");
        drop(cache);
        assert!(table.destroy(mem, frames, &flushed()).is_ok());
    }
}

/// Plain and cached operations alternate. Each is synced before the test checks the table.
impl<F: Format> TableInterface<F> for Burst<F> {
    fn map(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.3 = !self.3;
        let done = if self.3 {
            self.0.map_nosync(mem, frames, request, &mut self.2)
        } else {
            self.1
                .map_nosync(&self.0, mem, frames, request, &mut self.2)
        };
        self.2.sync(mem);
        done
    }
    fn unmap(&mut self, mem: &Memory, _: &Source<'_>, range: PfnRange) -> Result<(), UnmapError> {
        self.3 = !self.3;
        let done = if self.3 {
            self.0.unmap_nosync(mem, range, &mut self.2)
        } else {
            self.1.unmap_nosync(&self.0, mem, range, &mut self.2)
        };
        self.2.sync(mem);
        assert!(self.2.is_clean());
        let (unmapped, _) = done?;
        assert_eq!(unmapped.range(), range);
        Ok(())
    }
    fn root(&self) -> PhysAddr {
        self.0.root()
    }
    fn lookup(&self, mem: &Memory, iova: Iova) -> Option<Leaf> {
        self.0.lookup(mem, iova)
    }
    fn destroy(self, mem: &Memory, frames: &Source<'_>) {
        drop(self.1);
        assert!(self.0.destroy(mem, frames, &flushed()).is_ok());
    }
}

impl<F: Format> TableInterface<F> for Reclaiming<F> {
    fn map(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map(mem, frames, request)
    }
    fn unmap(
        &mut self,
        mem: &Memory,
        frames: &Source<'_>,
        range: PfnRange,
    ) -> Result<(), UnmapError> {
        let before = self.0.table_bytes();
        let (unmapped, levels) = self.0.unmap(mem, range)?;
        let out = frames.outstanding();
        let retired = self.0.take_unlinked();
        assert_eq!(levels == CachedLevels::All, !retired.is_empty());
        assert_eq!(
            self.0.table_bytes() + F::GRANULE.bytes() * retired.len() as u64,
            before
        );
        let count = retired.len();
        let request = Invalidation::Pages {
            domain: DOMAIN,
            range,
            levels,
        };
        let pending = Pending::submit(&mut Instant, request, (unmapped, retired)).expect("covered");
        let (unmapped, retired) = pending.wait(&mut Instant).expect("completes").split();
        assert_eq!(unmapped.range(), range);
        assert_eq!(
            frames.outstanding(),
            out,
            "nothing goes back before the invalidation"
        );
        UnlinkedTables::release(retired, frames);
        assert_eq!(frames.outstanding(), out - count);
        Ok(())
    }
    fn root(&self) -> PhysAddr {
        self.0.root()
    }
    fn lookup(&self, mem: &Memory, iova: Iova) -> Option<Leaf> {
        self.0.lookup(mem, iova)
    }
    fn destroy(self, mem: &Memory, frames: &Source<'_>) {
        assert!(self.0.destroy(mem, frames, &flushed()).is_ok());
    }
}
