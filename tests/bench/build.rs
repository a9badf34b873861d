//! A bench for every mode there is.

use ringfence_devices::{Neighbour, Racer, Replayer, Reuse};
use ringfence_dma::flush::{Flush, Never};
use ringfence_dma::space::{Identity, Paged, Rings, Space, StaticTable};
use ringfence_dma::{Dma, Platform};
use ringfence_hw::RingLogic;
use ringfence_lab::Profile;
use ringfence_lab::build::{Job, Recipe, ReplayTable, Single};
use ringfence_lab::hardware::{Directed, Hardware, Riommu, Vtd};
use ringfence_lab::hosted::{CachedRecipe, CachedSpace, Cycles, Cycling, Hosted, PviommuHost};
use ringfence_lab::machine::Machine;
use ringfence_lab::meter::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing};
use ringfence_lab::modes::TableKind;
use ringfence_lab::oracle::Ownership;
use ringfence_lab::replay::{Attached, Newcomer};
use ringfence_lab::ring::{RingRecipe, RingSizes};
use ringfence_pgtable::{Levels, SecondStage, Table};
use ringfence_trace::DeviceIndex;
use ringfence_types::{Iova, PageSize, PhysAddr, PhysRange};

use super::world::{Attackers, World};
use super::{Bench, DEVICES, device};

pub(super) fn attackers(translates: bool) -> Attackers {
    let reuse = if translates { Reuse::Page } else { Reuse::Byte };
    ((Replayer::new(reuse), Neighbour), Racer::new())
}

pub(super) struct Build;

impl Build {
    fn world<H: Hardware, S: Space + 'static, F: Flush<S, u64> + 'static>(
        flush: F,
        enabled: bool,
        ownership: Ownership,
        mut make: impl FnMut(&Newcomer, &Machine<H>) -> (S, Directed),
    ) -> Box<dyn Bench> {
        let mut machine = Machine::new(&Profile::r210_2015(), enabled).unwrap();
        let mut dma = Dma::new(flush);
        let mut at = Vec::new();
        for index in 0..DEVICES {
            let mut to = Directed::PassThrough;
            let attachment = dma
                .attach(device(index), Iova::new(u64::MAX), |domain| {
                    let newcomer = Newcomer {
                        domain,
                        device: device(index),
                        row: DeviceIndex(index as u16),
                    };
                    let (space, directed) = make(&newcomer, &machine);
                    to = directed;
                    Ok::<_, ()>(space)
                })
                .unwrap();
            machine
                .attach(device(index), attachment.domain(), to)
                .unwrap();
            at.push(Attached::new(&dma, attachment));
        }
        Box::new(World::new(machine, dma, at, ownership))
    }
}

impl Job for Build {
    type Output = Box<dyn Bench>;

    fn identity(self, kind: TableKind) -> Box<dyn Bench> {
        let enabled = kind != TableKind::None;
        Self::world(
            Never,
            enabled,
            Ownership::Byte,
            |&Newcomer { domain, .. }, machine: &Machine<Vtd>| {
                let directed = if kind == TableKind::StaticRadix {
                    let format = SecondStage::new(Levels::Four).with_pages_up_to(PageSize::Size2M);
                    let (memory, frames) = (&**machine.arena(), machine.frames());
                    let coherency = machine.coherency();
                    let table = Table::new(format, domain, coherency, memory, frames).unwrap();
                    let all = PhysRange::new(PhysAddr::ZERO, ringfence_lab::machine::DATA_BYTES);
                    StaticTable::fill(&table, machine, &[all.unwrap()]).unwrap();
                    Directed::Table(table.root())
                } else {
                    Directed::PassThrough
                };
                (Identity::new(domain), directed)
            },
        )
    }

    fn paged<A, T, F>(self, recipe: Recipe<A, T, F>) -> Box<dyn Bench>
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
            |&Newcomer { domain, .. }, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (coherency, host) = (machine.coherency(), machine.host());
                let table = (recipe.table)(domain, coherency, memory, frames, host).unwrap();
                let directed = Directed::Table(table.root());
                let alloc = recipe.allocator(memory, frames, Some(&table)).unwrap();
                (Paged::new(alloc, table, recipe.rounding), directed)
            },
        )
    }

    fn cached(self, recipe: CachedRecipe) -> Box<dyn Bench> {
        Self::world::<Hosted<PviommuHost>, CachedSpace, _>(
            CachedRecipe::flush(),
            true,
            Ownership::Shared,
            |&Newcomer { domain, .. }, machine| {
                let (memory, frames, host) = (machine.arena(), machine.frames(), machine.host());
                let made = recipe.space(domain, CYCLING, memory, frames, host);
                let (space, root) = made.unwrap();
                (space, Directed::Table(root))
            },
        )
    }

    fn rings<D, L, F>(self, recipe: RingRecipe<D, L, F>) -> Box<dyn Bench>
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static,
    {
        let sizes = RingSizes::Every(SLOTS);
        Self::world::<Riommu<L>, Rings<D, Single<D>>, F>(
            (recipe.flush)(),
            true,
            Ownership::Page,
            |newcomer, machine| {
                let (memory, frames) = (machine.arena(), machine.frames());
                let (space, rings) = recipe.space(newcomer, &sizes, memory, frames).unwrap();
                (space, Directed::Table(rings))
            },
        )
    }
}

/// T and C of caches: short enough that a test sees cycles end.
pub(super) const CYCLING: Cycling = Cycling {
    cycle_ns: 10_000_000,
    cycles: Cycles::DOCUMENT,
};

/// Slots of every ring: fewer than a test may have live, so that maps wait.
const SLOTS: u32 = 16;
