//! A machine with a ring unit: memory, context tables, and four devices with four rings each.

use proptest::test_runner::{Config as ProptestConfig, RngSeed};
use ringfence_hw::{
    FaultLog, Geometry, Prefetch, Replacement, RingLogic, RingUnit, RingUnitConfig, Translate,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, ContextTables, RING_ENTRY_BYTES, RingDevice, RingPte, RingTable,
    TranslationType, ring_words,
};
use ringfence_types::{
    Access, DomainId, FaultReason, Invalidation, Iova, Permissions, PhysAddr, PhysRange,
    RequesterId, RingId, RingIova, RingSlot,
};

pub(crate) const READ: Access = Access::Read;
pub(crate) const WRITE: Access = Access::Write;
pub(crate) const R: Permissions = Permissions::READ;
pub(crate) const W: Permissions = Permissions::WRITE;
pub(crate) const RW: Permissions = Permissions::READ_WRITE;

pub(crate) const NIC: RequesterId = RequesterId::new(0x0100);
pub(crate) const SSD: RequesterId = RequesterId::new(0x0208);
/// The same bus as the NIC, another function: that of the SSD.
pub(crate) const GPU: RequesterId = RequesterId::new(0x0108);
/// The same function as the NIC, on another bus: that of the SSD.
pub(crate) const HBA: RequesterId = RequesterId::new(0x0200);
/// No device: its bus has a context table without an entry for it.
pub(crate) const NOBODY: RequesterId = RequesterId::new(0x0110);
pub(crate) const DEVICES: [(RequesterId, DomainId); 4] = [
    (NIC, DomainId::new(1)),
    (SSD, DomainId::new(0xffff)),
    (GPU, DomainId::new(3)),
    (HBA, DomainId::new(4)),
];
pub(crate) const RINGS: u16 = 4;

const ARENA: u64 = 64 << 20;
const FRAMES: u64 = 32 << 20;
/// Layout: one page per rDEVICE, followed by its rRINGs; flat tables of 1 MiB each.
const RDEVICES: u64 = 1 << 20;
const TABLES: u64 = 2 << 20;

pub(crate) fn arena() -> Arena {
    Arena::new(ARENA).unwrap()
}

pub(crate) fn geometry(sets: u32, ways: u32) -> Geometry {
    Geometry::new(sets, ways).unwrap()
}

/// Large enough for an entry for every ring.
pub(crate) fn roomy(prefetch: Prefetch) -> RingUnitConfig {
    RingUnitConfig {
        riotlb: geometry(4, 8),
        replacement: Replacement::Lru,
        contexts: geometry(16, 1),
        prefetch,
        fault_log: FaultLog::MAX_CAPACITY,
    }
}

/// Proptest configuration with a fixed seed: every run is identical.
pub(crate) fn cases(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

pub(crate) fn pa(raw: u64) -> PhysAddr {
    PhysAddr::new(raw)
}

pub(crate) fn iova(ring: u16, slot: u32, offset: u32) -> Iova {
    RingIova::new(RingId::new(ring), RingSlot::new(slot).unwrap(), offset)
        .unwrap()
        .iova()
}

pub(crate) fn pte(start: u64, bytes: u64, permissions: Permissions) -> RingPte {
    RingPte::new(&PhysRange::new(pa(start), bytes).unwrap(), permissions).unwrap()
}

/// Outcome of an access: first byte and length, or address and reason of the fault.
pub(crate) type Seen = Result<(u64, u64), (Iova, FaultReason)>;

#[derive(Clone)]
pub(crate) struct Rig<'m, L: RingLogic> {
    pub(crate) mem: &'m Arena,
    pub(crate) unit: RingUnit<L>,
}

impl<'m, L: RingLogic> Rig<'m, L> {
    /// Creates an enabled unit. Every ring has `slots` slots, all invalid.
    pub(crate) fn new(mem: &'m Arena, config: &RingUnitConfig, slots: u32) -> Self {
        let region = PhysRange::new(pa(FRAMES), ARENA - FRAMES).unwrap();
        let frames = Frames::new(mem, region);
        let mut contexts = ContextTables::new(Coherency::Coherent, mem, &frames).unwrap();
        for (number, (device, domain)) in DEVICES.into_iter().enumerate() {
            let at = pa(RDEVICES + number as u64 * 0x1000);
            let rings = at.wrapping_add(RING_ENTRY_BYTES);
            let words = ring_words(mem, at).unwrap();
            RingDevice::clear(words);
            RingDevice::new(rings, RINGS).unwrap().store(words);
            for ring in 0..RINGS {
                let words = ring_words(mem, rings.wrapping_add(u64::from(ring) * RING_ENTRY_BYTES))
                    .unwrap();
                let table = table(device, ring, slots);
                for slot in 0..slots {
                    let at = table.entry(RingSlot::new(slot).unwrap()).unwrap();
                    RingPte::clear(ring_words(mem, at).unwrap());
                }
                RingTable::clear(words);
                table.store(words);
            }
            let translation = TranslationType::Rings { device: at };
            let context = Context {
                domain,
                translation,
            };
            contexts.attach(mem, &frames, device, &context).unwrap();
        }
        let mut unit = RingUnit::new(config);
        unit.set_root_table(contexts.root());
        unit.enable();
        Self { mem, unit }
    }

    /// Returns the address of the rDEVICE of `device`.
    pub(crate) fn device(device: RequesterId) -> PhysAddr {
        pa(RDEVICES + number(device) * 0x1000)
    }

    /// Returns the address of the rRING of `ring` of `device`.
    pub(crate) fn ring(device: RequesterId, ring: u16) -> PhysAddr {
        Self::device(device).wrapping_add(RING_ENTRY_BYTES * (1 + u64::from(ring)))
    }

    pub(crate) fn words(
        &self,
        device: RequesterId,
        ring: u16,
        slot: u32,
    ) -> &'m ringfence_pgtable::RingWords {
        let at = table(device, ring, slot + 1)
            .entry(RingSlot::new(slot).unwrap())
            .unwrap();
        ring_words(self.mem, at).unwrap()
    }

    pub(crate) fn map(&self, device: RequesterId, ring: u16, slot: u32, pte: RingPte) {
        pte.store(self.words(device, ring, slot));
    }

    pub(crate) fn unmap(&self, device: RequesterId, ring: u16, slot: u32) {
        RingPte::clear(self.words(device, ring, slot));
    }

    pub(crate) fn invalidate(&mut self, device: RequesterId, ring: u16) {
        self.unit.invalidate(&ring_request(device, ring));
    }

    pub(crate) fn dma(
        &mut self,
        device: RequesterId,
        at: Iova,
        bytes: u64,
        access: Access,
    ) -> Seen {
        match self.unit.translate(self.mem, device, at, bytes, access) {
            Ok(translation) => {
                assert_eq!(translation.len(), 1);
                let range = translation.first();
                Ok((range.start().get(), range.bytes()))
            }
            Err(fault) => {
                assert_eq!((fault.device, fault.access), (device, access));
                Err((fault.iova, fault.reason))
            }
        }
    }

    /// Reads one byte at the start of a slot.
    pub(crate) fn touch(&mut self, device: RequesterId, ring: u16, slot: u32) -> Seen {
        self.dma(device, iova(ring, slot, 0), 1, READ)
    }
}

/// Returns the index of `device` in [`DEVICES`].
pub(crate) fn number(device: RequesterId) -> u64 {
    let number = DEVICES.iter().position(|(known, _)| *known == device);
    number.unwrap() as u64
}

/// Returns the flat table of `ring` of `device`.
fn table(device: RequesterId, ring: u16, slots: u32) -> RingTable {
    let number = u64::from(ring) + number(device) * u64::from(RINGS);
    RingTable::new(pa(TABLES + (number << 20)), slots).unwrap()
}

pub(crate) fn ring_request(device: RequesterId, ring: u16) -> Invalidation {
    Invalidation::Ring {
        domain: DEVICES[number(device) as usize].1,
        device,
        ring: RingId::new(ring),
    }
}
