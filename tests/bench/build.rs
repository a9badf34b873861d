//! Builds a bench for every mode.

use ringfence_devices::{Neighbour, Racer, Replayer, Reuse};
use ringfence_dma::cache::Cycles;
use ringfence_dma::flush::{FlushPolicy, Never};
use ringfence_dma::space::{Identity, Paged, Rings, Space, StaticTable, Thresholds};
use ringfence_dma::{Dma, Platform};
use ringfence_hw::RingLogic;
use ringfence_lab::Profile;
use ringfence_lab::components::{ModeParts, ReplayTable, ThreadCell};
use ringfence_lab::hardware::{Hardware, Riommu, Vtd};
use ringfence_lab::layer::{AttachInfo, Attachments, ContextTarget};
use ringfence_lab::mapping_cache::{CachedParts, CycleParams, DynCachedSpace};
use ringfence_lab::meter::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing};
use ringfence_lab::mode_dispatch::{IdentityKind, ModeVisitor};
use ringfence_lab::oracle::Ownership;
use ringfence_lab::replay_platform::ReplayPlatform;
use ringfence_lab::ring::{RingParts, RingSizes};
use ringfence_lab::shadow::CopyParts;
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_trace::DeviceIndex;
use ringfence_types::{Iova, PageSize, PhysAddr, PhysRange};

use super::mode_bench::{Attackers, World};
use super::{Bench, DEVICES, device};

pub(super) fn attackers(translates: bool) -> Attackers {
    let reuse = if translates { Reuse::Page } else { Reuse::Byte };
    ((Replayer::new(reuse), Neighbour), Racer::new())
}

pub(super) struct Build;

impl Build {
    fn world<H: Hardware, S: Space + 'static, F: FlushPolicy<S, u64> + 'static>(
        flush: F,
        enabled: bool,
        ownership: Ownership,
        mut make: impl FnMut(&AttachInfo, &ReplayPlatform<H>) -> (S, ContextTarget),
    ) -> Box<dyn Bench> {
        let mut machine = ReplayPlatform::new(&Profile::r210_2015(), enabled).unwrap();
        let mut dma = Dma::new(flush);
        let mut at = Vec::new();
        for index in 0..DEVICES {
            let mut to = ContextTarget::PassThrough;
            let attachment = dma
                .attach(device(index), Iova::new(u64::MAX), |domain| {
                    let newcomer = AttachInfo {
                        domain,
                        device: device(index),
                        index: DeviceIndex(index as u16),
                    };
                    let (space, directed) = make(&newcomer, &machine);
                    to = directed;
                    Ok::<_, ()>(space)
                })
                .unwrap();
            machine
                .attach(device(index), attachment.domain(), to)
                .unwrap();
            at.push(Attachments::new(&dma, attachment));
        }
        Box::new(World::new(machine, dma, at, ownership))
    }
}

impl ModeVisitor for Build {
    type Output = Box<dyn Bench>;

    fn identity(self, kind: IdentityKind) -> Box<dyn Bench> {
        let enabled = kind != IdentityKind::Off;
        Self::world(
            Never,
            enabled,
            Ownership::Byte,
            |&AttachInfo { domain, .. }, machine: &ReplayPlatform<Vtd>| {
                let directed = if kind.has_table() {
                    let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
                    let (memory, frames) = (&**machine.arena(), machine.frames());
                    let coherency = machine.coherency();
                    let table = Table::new(format, domain, coherency, memory, frames).unwrap();
                    let all =
                        PhysRange::new(PhysAddr::ZERO, ringfence_lab::replay_platform::DATA_BYTES);
                    StaticTable::fill(&table, machine, &[all.unwrap()]).unwrap();
                    ContextTarget::Table(table.root())
                } else {
                    ContextTarget::PassThrough
                };
                (Identity::new(domain), directed)
            },
        )
    }

    fn paged<A, T, F>(self, recipe: ModeParts<A, T, F>) -> Box<dyn Bench>
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static,
    {
        let flush = (recipe.flush)();
        Self::world::<T::Hardware, Paged<A, T>, F>(
            flush,
            true,
            Ownership::Page,
            |&AttachInfo { domain, .. }, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (coherency, host) = (machine.coherency(), machine.host());
                let table = (recipe.table)(domain, coherency, memory, frames, host).unwrap();
                let directed = ContextTarget::Table(table.root());
                let alloc = recipe.allocator(memory, frames, Some(&table)).unwrap();
                (Paged::new(alloc, table, recipe.rounding), directed)
            },
        )
    }

    fn cached<T: ReplayTable<Pages = ()>>(self, recipe: CachedParts<T>) -> Box<dyn Bench> {
        Self::world::<T::Hardware, DynCachedSpace<T>, _>(
            CachedParts::<T>::flush(),
            true,
            Ownership::Shared,
            |&AttachInfo { domain, .. }, machine| {
                let (memory, frames, host) = (machine.arena(), machine.frames(), machine.host());
                let coherency = machine.coherency();
                let made = recipe.space(domain, coherency, CYCLING, memory, frames, host);
                let (space, root) = made.unwrap();
                (space, ContextTarget::Table(root))
            },
        )
    }

    fn shadow<P: CopyParts>(self, recipe: P) -> Box<dyn Bench> {
        let recipe = recipe.with_thresholds(Thresholds::both(SPLIT));
        Self::world::<<P::Table as ReplayTable>::Hardware, P::Space, _>(
            recipe.flush(),
            true,
            Ownership::Page,
            |&AttachInfo { domain, .. }, machine| {
                let (memory, frames, host) = (machine.arena(), machine.frames(), machine.host());
                let made = recipe.space(domain, machine.coherency(), memory, frames, host);
                let (space, root) = made.unwrap();
                (space, ContextTarget::Table(root))
            },
        )
    }

    fn rings<D, L, F>(self, recipe: RingParts<D, L, F>) -> Box<dyn Bench>
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let sizes = RingSizes::Every(SLOTS);
        Self::world::<Riommu<L>, Rings<D, ThreadCell<D>>, F>(
            (recipe.flush)(),
            true,
            Ownership::Page,
            |newcomer, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (space, rings) = recipe.space(newcomer, &sizes, memory, frames).unwrap();
                (space, ContextTarget::Table(rings))
            },
        )
    }
}

/// Bytes on whole pages from which hybrid copying splits a buffer: few, so that a test splits many.
pub(crate) const SPLIT: u64 = 4096;

/// T and C of caches, short enough that cycles end within a test.
pub(super) const CYCLING: CycleParams = CycleParams {
    cycle_ns: 10_000_000,
    cycles: Cycles::PAPER,
};

/// Slots of every ring: fewer than a test may have live mappings, so that maps wait.
const SLOTS: u32 = 16;
