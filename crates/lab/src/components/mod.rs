//! The components that modes combine: tables, allocators, and their constructors.

mod allocators;
mod dyn_alloc;
mod family_format;
mod family_tables;
mod tables;

pub(crate) use allocators::{
    MagazineAlloc, RcacheAlloc, bitmap, bitmap_as_published, contiguous, eiovar, freebsd,
    freebsd_14, magazine, maple, rb_tree, rcache,
};
pub(crate) use dyn_alloc::{dyn_alloc, dyn_bitmap};
pub use family_format::FamilyFormat;
pub(crate) use family_tables::{family_cached_radix, family_radix};
pub(crate) use tables::{
    LeafCachedRadix, flat_table, leaf_cached_radix, plain_radix, reclaiming_radix,
    reclaiming_radix_full_page,
};

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::space::{IoPageTable, Paged, Rounding};
use ringfence_iova::IovaAllocator;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, PageSize, PhysAddr};

use crate::error::LabError;
use crate::hardware::Hardware;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform, SpaceResult};
use crate::modes::{Alloc, Mode};

/// A cell for state that the CPUs of a replay share. A replay is one thread.
pub type ThreadCell<T> = RefCell<T>;

const LAST_PAGE_48_BIT: u64 = (1 << 36) - 1;
/// Fujita and Moriai's bitmap covers 4 GiB, and so does a flat table.
pub(crate) const LAST_PAGE_32_BIT: u64 = (1 << 20) - 1;

/// An I/O page table that a replay can use.
pub trait ReplayTable: IoPageTable + Sized + 'static {
    /// The hardware that walks the table.
    type Hardware: Hardware;

    /// The highest page that the table translates.
    const LAST_PAGE: u64 = LAST_PAGE_48_BIT;

    /// Returns the constructor of tables with leaves of up to `size`, in place of `make`. The
    /// default, for tables without larger leaves, is `make`.
    fn with_page_size(make: MakeTable<Self>, size: PageSize) -> MakeTable<Self> {
        let _ = size;
        make
    }

    /// Returns the address at which the hardware starts its walk.
    fn root(&self) -> PhysAddr;

    /// Returns the coherency of the page walks that the table was created for. `None` if the table
    /// does not expose it.
    fn coherency(&self) -> Option<Coherency> {
        None
    }
}

/// The owner of a table: the layer itself or a host.
pub type HostOf<T> = <<T as ReplayTable>::Hardware as Hardware>::Host;

/// Creates the empty table of a domain. A host, if the mode has one, owns it. Fails if memory is
/// short.
pub type MakeTable<T> =
    fn(DomainId, Coherency, &Arena, &Frames<Rc<Arena>>, Option<&HostOf<T>>) -> Result<T, LabError>;

/// Creates the allocator of a domain. Fails if memory is short.
pub type MakeAlloc<A> = fn(&AllocEnv<'_>) -> Result<A, LabError>;

/// The inputs for creating the allocator of a domain.
pub struct AllocEnv<'a> {
    /// The mode's allocator.
    pub kind: Alloc,
    /// The memory of the replay.
    pub memory: &'a Rc<Arena>,
    /// Frames of `memory`.
    pub frames: &'a Frames<Rc<Arena>>,
    /// The root of the domain's table; `None` in the ablation that has no table.
    pub table: Option<PhysAddr>,
    /// The highest page that the table translates.
    pub last_page: u64,
}

/// The constructors of a mode's components.
pub struct ModeParts<A, T: ReplayTable, F> {
    /// Creates the allocator of a domain.
    pub alloc: MakeAlloc<A>,
    /// The mode's allocator.
    pub kind: Alloc,
    /// Creates the flush policy of the unit.
    pub flush: fn() -> F,
    /// The rounding of a request to the reserved size.
    pub rounding: Rounding,
    /// Creates the table of a domain.
    pub table: MakeTable<T>,
}

impl<A, T: ReplayTable, F> Clone for ModeParts<A, T, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, T: ReplayTable, F> Copy for ModeParts<A, T, F> {}

impl<A, T: ReplayTable, F> ModeParts<A, T, F> {
    /// Returns the constructors of `mode`, which has these components.
    pub(crate) fn new(
        mode: &Mode,
        alloc: MakeAlloc<A>,
        table: MakeTable<T>,
        flush: fn() -> F,
    ) -> Self {
        Self {
            alloc,
            kind: mode.alloc,
            flush,
            rounding: match mode.alloc {
                Alloc::CachedRbTree | Alloc::Eiovar(_) => Rounding::PowerOfTwo,
                _ => Rounding::Exact,
            },
            table: T::with_page_size(table, mode.page_size),
        }
    }

    /// Creates the allocator of a domain with the new, empty `table`. Without a table, the
    /// allocator behaves as if the domain had one.
    ///
    /// # Errors
    /// Memory is short.
    pub fn allocator(
        &self,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        table: Option<&T>,
    ) -> Result<A, LabError> {
        (self.alloc)(&AllocEnv {
            kind: self.kind,
            memory,
            frames,
            table: table.map(T::root),
            last_page: T::LAST_PAGE,
        })
    }

    /// Returns a constructor of the spaces of devices. `host` owns their tables, if the mode has a
    /// host.
    pub fn make_space<I>(
        self,
        coherency: Coherency,
        host: Option<HostOf<T>>,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Paged<A, T>> + 'static
    where
        A: IovaAllocator + 'static,
        F: 'static,
    {
        self.make_space_with(coherency, host, Self::allocator)
    }

    /// Like [`make_space`](Self::make_space), with the allocator that `alloc` returns.
    pub(crate) fn make_space_with<B, I>(
        self,
        coherency: Coherency,
        host: Option<HostOf<T>>,
        alloc: impl Fn(&Self, &Rc<Arena>, &Frames<Rc<Arena>>, Option<&T>) -> Result<B, LabError>
        + 'static,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Paged<B, T>> + 'static
    where
        A: 'static,
        B: IovaAllocator + 'static,
        F: 'static,
    {
        move |of, platform| {
            let (memory, frames) = (&platform.arena, &platform.frames);
            let table = (self.table)(of.domain, coherency, memory, frames, host.as_ref())?;
            let target = ContextTarget::Table(table.root());
            let alloc = alloc(&self, memory, frames, Some(&table))?;
            Ok((Paged::new(alloc, table, self.rounding), target))
        }
    }
}
