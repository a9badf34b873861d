//! A driver of a network card whose packets are copied: the card never reaches the driver's memory.
//!
//! ```sh
//! cargo run -p ringfence-dma --example nic_copy
//! ```

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{Released, Strict};
use ringfence_dma::space::{
    FromDevice, Paged, PlainTable, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace,
    WhenExhausted,
};
use ringfence_dma::{Attachment, Cpu, Dma, MapReason, Mapping, Platform};
use ringfence_iova::{Depot, MagazineLimits, Magazines};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage, Table};
use ringfence_types::{
    Access, Direction, Invalidation, InvalidationError, Invalidator, Iova, Nanos, Pfn, PfnRange,
    PhysAddr, PhysRange, RequesterId, Ticket,
};

/// Bytes of a receive buffer, and the frames that the card receives.
const BUFFER: u64 = 2048;
const FRAMES: [&[u8]; 3] = [b"a short frame", b"another one", b"the last frame"];
/// Receive buffers in the ring.
const RING: u64 = 4;

type Space = ShadowSpace<Magazines<RefCell<Depot>>, PlainTable<SecondStage>, RefCell<ShadowDepot>>;

/// An IOMMU that counts invalidations. A driver with copies makes none.
#[derive(Default)]
struct Iommu(u64);

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
struct Machine {
    memory: Rc<Arena>,
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

fn bytes(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).expect("a range")
}

struct Nic {
    machine: Machine,
    dma: Dma<Space, Strict, PhysRange>,
    cpu: Cpu<Space, Strict, PhysRange>,
    at: Attachment,
}

impl Nic {
    /// Attaches the card. Tables lie at 16 MiB, the pool of copies at 32 MiB.
    fn new() -> Self {
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

    /// Maps a buffer. `None` if all copies are in use: the driver tries again after a completion.
    fn map(&mut self, buffer: PhysRange, direction: Direction) -> Option<Mapping<PhysRange>> {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        match self
            .dma
            .map_single(cpu, machine, &self.at, buffer, buffer, direction)
        {
            Ok((mapping, _)) => Some(mapping),
            Err((_, error)) if matches!(error.reason, MapReason::Shadow(_)) => None,
            Err((_, error)) => panic!("{error}"),
        }
    }

    /// Returns the buffer of a received frame. Only the frame's bytes are copied to it.
    fn received(&mut self, mapping: Mapping<PhysRange>, length: u64) -> PhysRange {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let unmapped = self
            .dma
            .unmap_received(cpu, machine, &self.at, mapping, length);
        let Released(buffer) = unmapped.expect("a length within the buffer");
        buffer
    }

    /// Returns the buffer of a sent frame.
    fn sent(&mut self, mapping: Mapping<PhysRange>) -> PhysRange {
        let (cpu, machine) = (&mut self.cpu, &mut self.machine);
        let unmapped = self.dma.unmap_single(cpu, machine, &self.at, mapping);
        let Released(buffer) = unmapped.expect("a live mapping");
        buffer
    }

    /// The card writes a frame by DMA, and as many bytes beyond the buffer as its page has.
    fn card_receives(&self, mapping: &Mapping<PhysRange>, frame: &[u8]) {
        let space = self.dma.space(&self.at).expect("an attached card");
        let leaf = space
            .paged()
            .table()
            .0
            .lookup(&*self.machine.memory, mapping.iova());
        let leaf = leaf
            .filter(|leaf| leaf.permissions.allows(Access::Write))
            .expect("a mapping");
        let target = leaf.translate(mapping.iova());
        let mut stray = vec![0xff; (4096 - mapping.iova().offset_in(4096)) as usize];
        stray[..frame.len()].copy_from_slice(frame);
        self.machine
            .memory
            .write_bytes(target, &stray)
            .expect("memory");
    }
}

fn main() {
    let mut nic = Nic::new();
    let buffers = (0..RING).map(|slot| bytes(0x10_0000 + slot * BUFFER, BUFFER));
    let ring: Vec<_> = buffers
        .filter_map(|at| nic.map(at, Direction::FromDevice))
        .collect();
    let mut ring = ring.into_iter();
    for frame in FRAMES {
        let posted = ring.next().expect("a posted buffer");
        nic.card_receives(&posted, frame);
        let buffer = nic.received(posted, frame.len() as u64);
        let mut found = vec![0; BUFFER as usize];
        let memory = &nic.machine.memory;
        memory
            .read_bytes(buffer.start(), &mut found)
            .expect("memory");
        assert_eq!(&found[..frame.len()], frame);
        assert!(
            found[frame.len()..].iter().all(|byte| *byte == 0),
            "stray bytes of the card"
        );
        println!("{} bytes: {}", frame.len(), String::from_utf8_lossy(frame));
        // Send an answer: the card reads a copy of it, and zeroes beside it.
        let answer = nic
            .map(bytes(0x20_0000, 64), Direction::ToDevice)
            .expect("a free copy");
        nic.sent(answer);
    }
    let pool = nic.dma.space(&nic.at).expect("an attached card").pool();
    assert_eq!(nic.machine.iommu.0, 0, "copies need no invalidation");
    println!(
        "{} KiB in use, {} KiB mapped, {} KiB at most",
        pool.bytes_in_use() >> 10,
        pool.mapped_bytes() >> 10,
        pool.memory().bytes() >> 10
    );
}
