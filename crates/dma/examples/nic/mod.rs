//! The machine of the examples: memory, an IOMMU, and a network card whose pool stays mapped.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    FromDevice, Paged, PlainTable, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace,
    WhenExhausted,
};
use ringfence_dma::{Attachment, Cpu, Dma, Platform};
use ringfence_iova::{Depot, MagazineLimits, Magazines};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Access, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn, PfnRange, PhysAddr,
    PhysRange, RequesterId, Ticket,
};

pub(crate) type Space =
    ShadowSpace<Magazines<RefCell<Depot>>, PlainTable<SecondStage>, RefCell<ShadowDepot>>;

/// An IOMMU that counts invalidations.
#[derive(Default)]
pub(crate) struct Iommu(u64);

impl Invalidator for Iommu {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        self.0 += 1;
        Ok(Ticket::new(self.0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// The machine: memory, frames for tables, and an IOMMU.
pub(crate) struct Machine {
    pub(crate) memory: Rc<Arena>,
    frames: Frames<Rc<Arena>>,
    iommu: Iommu,
}

impl Platform for Machine {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = Iommu;

    fn memory(&self) -> &Arena {
        &self.memory
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Iommu {
        &mut self.iommu
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

pub(crate) fn bytes(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).expect("a range")
}

type Layer = Dma<Space, Strict, PhysRange>;
type LayerCpu = Cpu<Space, Strict, PhysRange>;

pub(crate) struct Nic {
    pub(crate) machine: Machine,
    pub(crate) dma: Layer,
    pub(crate) cpu: LayerCpu,
    pub(crate) at: Attachment,
}

impl Nic {
    /// Attaches the card. Tables lie at 16 MiB, its pool at 32 MiB.
    pub(crate) fn new() -> Self {
        let memory = Rc::new(Arena::new(64 << 20).expect("memory"));
        let machine = Machine {
            frames: Frames::new(Rc::clone(&memory), bytes(16 << 20, 1 << 20)),
            memory,
            iommu: Iommu::default(),
        };
        let mut dma = Dma::new(Strict);
        let at = dma.attach(RequesterId::new(0x18), Iova::new(u64::MAX), |domain| {
            let format = SecondStage::new(Levels::Four);
            let (memory, frames) = (&*machine.memory, &machine.frames);
            let table = Table::new(format, domain, Coherency::Coherent, memory, frames)
                .map_err(|error| error.to_string())?;
            let pages = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).ok_or("no pages")?;
            let addresses = Magazines::new(pages, MagazineLimits::DEFAULT, RefCell::new)
                .map_err(|error| error.to_string())?;
            let paged = Paged::new(addresses, PlainTable(table), Rounding::Exact);
            let pool = ShadowPool::new(bytes(32 << 20, 1 << 20), RefCell::new).ok_or("no pool")?;
            // This driver knows the length of each received frame.
            let policy = ShadowPolicy {
                from_device: FromDevice::Unspecified,
                when_exhausted: WhenExhausted::Refuse,
            };
            Ok::<_, String>(ShadowSpace::new(paged, pool, policy))
        });
        let at = at.expect("an attached card");
        Self {
            cpu: dma.cpu(),
            machine,
            dma,
            at,
        }
    }

    /// Returns all parts, as the calls of the layer take them.
    pub(crate) fn parts(&mut self) -> (&mut Machine, &Layer, &mut LayerCpu, &Attachment) {
        (&mut self.machine, &self.dma, &mut self.cpu, &self.at)
    }

    /// The card writes `bytes` by DMA, at an address that its IOMMU translates.
    pub(crate) fn card_writes(&self, iova: Iova, bytes: &[u8]) {
        let space = self.dma.space(&self.at).expect("an attached card");
        let leaf = space
            .paged()
            .table()
            .0
            .lookup(&*self.machine.memory, iova)
            .filter(|leaf| leaf.permissions.allows(Access::Write))
            .expect("a mapping");
        self.machine
            .memory
            .write_bytes(leaf.translate(iova), bytes)
            .expect("memory");
    }

    /// Prints the size of the pool. Neither a map nor an unmap invalidated anything.
    pub(crate) fn finish(&self) {
        let pool = self.dma.space(&self.at).expect("an attached card").pool();
        assert_eq!(self.machine.iommu.0, 0, "pools need no invalidation");
        println!(
            "{} KiB in use, {} KiB mapped, {} KiB at most",
            pool.bytes_in_use() >> 10,
            pool.mapped_bytes() >> 10,
            pool.memory().bytes() >> 10
        );
    }
}
