//! A machine whose devices may see older memory contents than its CPUs, with an invalidation port
//! that records every entry a device has ever seen.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ringfence_dma::ring::{Ring, RingSetup, RingTables, SlotChoice, lay_out};
use ringfence_dma::{MapReason, Platform};
use ringfence_memory::fake::NonCoherent;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, RingDevice, RingPte, RingTable};
use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysMemory, PhysRange,
    RequesterId, RingId, RingIova, RingSlot, Ticket,
};

pub(crate) const DEVICE: RequesterId = RequesterId::new(0x18);
pub(crate) const DOMAIN: DomainId = DomainId::new(1);
/// Base address of the tables.
pub(crate) const TABLES: PhysAddr = PhysAddr::new(1 << 20);
const BYTES: u64 = 8 << 20;

/// One CPU's access to the memory. Its write-backs wait for its own fence only.
pub(crate) type Memory = Rc<NonCoherent<Rc<Arena>>>;

/// A slot of the device: ring and slot index.
pub(crate) type SlotKey = (u16, u32);

/// The invalidation port of a unit with the worst possible cache: it keeps every valid entry that
/// it ever saw until the ring is invalidated.
#[derive(Debug, Default)]
pub(crate) struct Port {
    pub(crate) log: Vec<Invalidation>,
    /// The number of next requests that the port rejects, and the number that it accepts and fails.
    pub(crate) refuse: usize,
    pub(crate) fail: usize,
    failed: BTreeSet<u64>,
    cached: BTreeMap<SlotKey, BTreeSet<[u64; 2]>>,
}

impl Invalidator for Port {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if self.refuse > 0 {
            self.refuse -= 1;
            return Err(InvalidationError::QueueFull);
        }
        let number = self.log.len() as u64;
        self.log.push(request);
        if self.fail > 0 {
            self.fail -= 1;
            self.failed.insert(number);
            return Ok(Ticket::new(number));
        }
        match request {
            Invalidation::Ring {
                domain,
                device,
                ring,
            } => {
                assert_eq!((domain, device), (DOMAIN, DEVICE));
                self.cached.retain(|(id, _), _| *id != ring.get());
            }
            Invalidation::Domain(domain) => {
                assert_eq!(domain, DOMAIN);
                self.cached.clear();
            }
            other => panic!("{other:?} is no business of a ring unit"),
        }
        Ok(Ticket::new(number))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.failed.contains(&ticket.get()) {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }
}

/// The memory, the frames and the invalidation port of one CPU.
pub(crate) struct Board {
    pub(crate) memory: Memory,
    frames: Frames<Memory>,
    pub(crate) port: Port,
    pub(crate) coherency: Coherency,
}

impl Board {
    pub(crate) fn new(coherency: Coherency) -> Self {
        let arena = || Rc::new(Arena::new(BYTES).unwrap());
        Self::over(NonCoherent::new(arena(), arena()), coherency)
    }

    /// Returns the same board for another CPU, with its own port.
    pub(crate) fn processor(&self) -> Self {
        let (processors, devices) = (self.memory.processor_view(), self.memory.device_view());
        let memory = NonCoherent::new(Rc::clone(processors), Rc::clone(devices));
        Self::over(memory, self.coherency)
    }

    fn over(memory: NonCoherent<Rc<Arena>>, coherency: Coherency) -> Self {
        let memory = Rc::new(memory);
        // The first MiB is for coherent memory.
        let region = PhysRange::new(PhysAddr::new(4096), (1 << 20) - 4096).unwrap();
        Self {
            frames: Frames::new(Rc::clone(&memory), region),
            memory,
            port: Port::default(),
            coherency,
        }
    }

    /// Returns the rings of the device; `slots` gives their sizes.
    pub(crate) fn rings(&self, choice: SlotChoice, slots: &[u32]) -> Vec<Ring> {
        let setup = RingSetup {
            choice,
            coherency: self.coherency,
        };
        lay_out(
            &*self.memory,
            &RingTables::new(TABLES, slots).unwrap(),
            setup,
        )
        .unwrap()
    }

    /// Returns the memory that the unit's walks read.
    pub(crate) fn view(&self) -> &Arena {
        match self.coherency {
            Coherency::Coherent => self.memory.processor_view(),
            Coherency::NonCoherent => self.memory.device_view(),
        }
    }

    /// Returns the entry of a slot as the unit reads it.
    pub(crate) fn entry(&self, (ring, slot): SlotKey) -> RingPte {
        let device = RingDevice::read(self.view(), TABLES).unwrap();
        let table = RingTable::read(self.view(), &device, RingId::new(ring)).unwrap();
        RingPte::read(self.view(), &table, RingSlot::new(slot).unwrap()).unwrap()
    }

    /// Makes the device cache all valid entries.
    pub(crate) fn warm(&mut self) {
        let device = RingDevice::read(self.view(), TABLES).unwrap();
        let mut seen = Vec::new();
        for ring in 0..device.count() {
            let table = RingTable::read(self.view(), &device, RingId::new(ring)).unwrap();
            for slot in 0..table.slots() {
                let entry = self.entry((ring, slot));
                if entry.is_valid() {
                    seen.push(((ring, slot), entry.words()));
                }
            }
        }
        for (key, words) in seen {
            self.port.cached.entry(key).or_default().insert(words);
        }
    }

    /// Returns every entry that the device may use, cached or in memory, by slot.
    pub(crate) fn reachable(&mut self) -> BTreeMap<SlotKey, BTreeSet<[u64; 2]>> {
        self.warm();
        self.port.cached.clone()
    }
}

impl Platform for Board {
    type Memory = NonCoherent<Rc<Arena>>;
    type Frames = Frames<Memory>;
    type Invalidator = Port;

    fn memory(&self) -> &NonCoherent<Rc<Arena>> {
        &self.memory
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Port {
        &mut self.port
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// Returns a buffer of `bytes` bytes at `start`. It may lie outside memory, because no test reads
/// it.
pub(crate) fn buffer(start: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(start), bytes).unwrap()
}

pub(crate) fn slot_key(iova: RingIova) -> SlotKey {
    (iova.ring().get(), iova.slot().get())
}

pub(crate) fn is_full(reason: MapReason) -> bool {
    matches!(reason, MapReason::RingFull(_))
}

/// Returns all words of all tables.
pub(crate) fn words(board: &Board) -> Vec<u64> {
    let words = board.memory.words(TABLES, 1 << 13).unwrap();
    words
        .iter()
        .map(|word| word.load(std::sync::atomic::Ordering::Relaxed))
        .collect()
}
