//! A model of a virtio device. It keeps its side of the queues in raw memory, and a test decides
//! when and what it answers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::MapRequest;
use ringfence_types::{
    DomainId, Iova, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory, PhysRange, RequesterId,
};
use ringfence_virtio_iommu_driver::{Options, QueueParts, Transport, Unit, UnitError};

/// VERSION_1, and all features of the device type but the superseded BYPASS.
pub(crate) const FEATURES: u64 = 1 << 32 | 0x77;
pub(crate) const REQUESTS: u16 = 0;
pub(crate) const EVENTS: u16 = 1;
pub(crate) const DEVICE: RequesterId = RequesterId::new(0x20);
pub(crate) const DOMAIN: DomainId = DomainId::new(1);

/// A chain that the driver published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chain {
    pub(crate) head: u16,
    /// The bytes of the readable buffer.
    pub(crate) request: Vec<u8>,
    pub(crate) reply: u64,
    pub(crate) room: u32,
}

#[derive(Debug, Clone, Copy)]
struct Queue {
    parts: QueueParts,
    available: u16,
    used: u16,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) memory: Rc<Arena>,
    pub(crate) offered: Cell<u64>,
    pub(crate) accepted: Cell<u64>,
    pub(crate) status: Cell<u8>,
    pub(crate) config: RefCell<[u8; 40]>,
    pub(crate) sizes: Cell<[u16; 2]>,
    queues: Cell<[Option<Queue>; 2]>,
    pub(crate) notifications: Cell<[u32; 2]>,
    /// Answers each request with this status during the notification.
    pub(crate) answers: Cell<Option<u8>>,
    /// All requests that were answered that way.
    pub(crate) log: RefCell<Vec<Vec<u8>>>,
    /// The status does not change.
    pub(crate) is_stuck: Cell<bool>,
    /// The device vanishes when one of these bits of the status is set.
    pub(crate) vanishes_at: Cell<u8>,
    /// FEATURES_OK does not stay.
    pub(crate) rejects: Cell<bool>,
    /// The generation changes with each read.
    pub(crate) changes: Cell<bool>,
    generation: Cell<u32>,
}

/// The transport to a model.
#[derive(Debug, Clone)]
pub(crate) struct Wire(pub(crate) Rc<Model>);

impl Model {
    pub(crate) fn new() -> Rc<Self> {
        let mut config = [0; 40];
        config[..8].copy_from_slice(&0xffff_ffff_ffff_f000_u64.to_le_bytes());
        config[16..24].copy_from_slice(&0xffff_ffff_ffff_u64.to_le_bytes());
        config[28..32].copy_from_slice(&100_u32.to_le_bytes());
        config[32..36].copy_from_slice(&64_u32.to_le_bytes());
        config[36] = 1;
        Rc::new(Self {
            memory: Rc::new(Arena::new(1 << 24).unwrap()),
            offered: Cell::new(FEATURES),
            accepted: Cell::default(),
            status: Cell::default(),
            config: RefCell::new(config),
            sizes: Cell::new([256, 256]),
            queues: Cell::default(),
            notifications: Cell::default(),
            answers: Cell::new(Some(0)),
            log: RefCell::default(),
            is_stuck: Cell::default(),
            vanishes_at: Cell::default(),
            rejects: Cell::default(),
            changes: Cell::default(),
            generation: Cell::default(),
        })
    }

    fn word(&self, at: u64) -> u64 {
        let word = self.memory.word(PhysAddr::new(at & !7)).unwrap();
        word.load(Ordering::SeqCst) >> (at % 8 * 8)
    }

    pub(crate) fn store_byte(&self, at: u64, value: u8) {
        let word = self.memory.word(PhysAddr::new(at & !7)).unwrap();
        let shift = at % 8 * 8;
        let merge = |old: u64| Some(old & !(0xff << shift) | u64::from(value) << shift);
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, merge);
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        for (byte, at) in bytes.iter().zip(at..) {
            self.store_byte(at, *byte);
        }
    }

    pub(crate) fn parts(&self, number: u16) -> QueueParts {
        self.queues.get()[usize::from(number)].unwrap().parts
    }

    fn with_queue<T>(&self, number: u16, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queues = self.queues.get();
        let result = change(queues[usize::from(number)].as_mut().unwrap());
        self.queues.set(queues);
        result
    }

    /// Returns the chains that are new in the available ring.
    pub(crate) fn chains(&self, number: u16) -> Vec<Chain> {
        self.with_queue(number, |queue| {
            let available = queue.parts.available.get();
            assert_eq!(self.word(available) as u16, 1, "NO_INTERRUPT");
            let mut found = Vec::new();
            while queue.available != self.word(available + 2) as u16 {
                let slot = u64::from(queue.available % queue.parts.size);
                let head = self.word(available + 4 + 2 * slot) as u16;
                found.push(self.chain(&queue.parts, head));
                queue.available = queue.available.wrapping_add(1);
            }
            found
        })
    }

    /// Returns the chain with this first descriptor, published or not.
    pub(crate) fn chain(&self, parts: &QueueParts, head: u16) -> Chain {
        let descriptor = |index: u64| {
            let at = parts.descriptors.get() + index * 16;
            let rest = self.word(at + 8);
            let (bytes, flags) = (rest as u32, (rest >> 32) as u16);
            (self.word(at), bytes, flags, rest >> 48)
        };
        let (at, bytes, flags, next) = descriptor(head.into());
        if flags == 2 {
            return Chain {
                head,
                request: Vec::new(),
                reply: at,
                room: bytes,
            };
        }
        assert_eq!(flags, 1, "a readable buffer, and another one");
        let (reply, room, flags, _) = descriptor(next);
        assert_eq!(flags, 2, "a writable buffer, and no other one");
        let request = (at..at + u64::from(bytes)).map(|at| self.word(at) as u8);
        Chain {
            head,
            request: request.collect(),
            reply,
            room,
        }
    }

    /// Writes the status of a reply and uses the whole buffer.
    pub(crate) fn answer(&self, chain: &Chain, status: u8) {
        self.store(chain.reply + u64::from(chain.room) - 4, &[status, 0, 0, 0]);
        self.push_used(REQUESTS, chain.head.into(), chain.room);
    }

    /// Publishes a used element.
    pub(crate) fn push_used(&self, number: u16, id: u32, bytes: u32) {
        let index = self.with_queue(number, |queue| {
            let slot = u64::from(queue.used % queue.parts.size);
            let element = queue.parts.used.get() + 4 + 8 * slot;
            self.store(element, &id.to_le_bytes());
            self.store(element + 4, &bytes.to_le_bytes());
            queue.used = queue.used.wrapping_add(1);
            queue.used
        });
        self.set_used_index(number, index);
    }

    pub(crate) fn set_used_index(&self, number: u16, index: u16) {
        let used = self.parts(number).used.get();
        self.store(used + 2, &index.to_le_bytes());
    }

    /// Reports a fault event with these words.
    pub(crate) fn report(&self, chain: &Chain, words: [u64; 3], bytes: u32) {
        for (word, at) in words.iter().zip((chain.reply..).step_by(8)) {
            self.store(at, &word.to_le_bytes());
        }
        self.push_used(EVENTS, chain.head.into(), bytes);
    }

    /// Returns the number of notifications of the queue since the last call.
    pub(crate) fn take_notifications(&self, number: u16) -> u32 {
        let mut all = self.notifications.get();
        let found = std::mem::take(&mut all[usize::from(number)]);
        self.notifications.set(all);
        found
    }

    pub(crate) fn take_log(&self) -> Vec<Vec<u8>> {
        self.log.take()
    }
}

impl Transport for Wire {
    fn is_present(&self) -> bool {
        self.0.status.get() != 0xff
    }

    fn status(&self) -> u8 {
        self.0.status.get()
    }

    fn write_status(&mut self, status: u8) {
        let model = &self.0;
        if model.is_stuck.get() || model.status.get() == 0xff {
            return;
        }
        let features_ok = if model.rejects.get() { 8 } else { 0 };
        let is_absent = status & model.vanishes_at.get() != 0;
        let present = status & !features_ok;
        model.status.set(if is_absent { 0xff } else { present });
        if status == 0 {
            model.queues.set([None; 2]);
        }
    }

    fn offered_features(&mut self) -> u64 {
        self.0.offered.get()
    }

    fn accept_features(&mut self, features: u64) {
        self.0.accepted.set(features);
    }

    fn queue_size(&mut self, queue: u16) -> u16 {
        self.0.sizes.get()[usize::from(queue)]
    }

    fn enable_queue(&mut self, queue: u16, parts: &QueueParts) {
        assert_eq!(
            self.0.status.get(),
            11,
            "after FEATURES_OK, before DRIVER_OK"
        );
        let mut queues = self.0.queues.get();
        queues[usize::from(queue)] = Some(Queue {
            parts: *parts,
            available: 0,
            used: 0,
        });
        self.0.queues.set(queues);
    }

    fn notify(&mut self, queue: u16) {
        let model = &self.0;
        assert_ne!(model.status.get() & 4, 0, "notified before DRIVER_OK");
        let mut all = model.notifications.get();
        all[usize::from(queue)] += 1;
        model.notifications.set(all);
        if let (REQUESTS, Some(status)) = (queue, model.answers.get()) {
            for chain in model.chains(REQUESTS) {
                model.answer(&chain, status);
                model.log.borrow_mut().push(chain.request);
            }
        }
    }

    fn config_generation(&self) -> u32 {
        let model = &self.0;
        let step = u32::from(model.changes.get());
        model.generation.set(model.generation.get() + step);
        model.generation.get()
    }

    fn read_config(&self, offset: u64) -> u32 {
        let config = self.0.config.borrow();
        let bytes = config[offset as usize..][..4].try_into().unwrap();
        u32::from_le_bytes(bytes)
    }

    fn read_config_byte(&self, offset: u64) -> u8 {
        self.0.config.borrow()[offset as usize]
    }

    fn write_config_byte(&mut self, offset: u64, value: u8) {
        assert_eq!(offset, 36, "only `bypass` is writable");
        if self.0.config.borrow()[36] != 0xee {
            self.0.config.borrow_mut()[36] = value;
        }
    }
}

pub(crate) type ModelFrames = Frames<Rc<Arena>>;
pub(crate) type ModelUnit<'f> = Unit<Wire, Rc<Arena>, &'f ModelFrames>;

pub(crate) const OPTIONS: Options = Options {
    first_endpoint: 0x100,
    poll_limit: 300,
};

pub(crate) fn frames(model: &Model) -> ModelFrames {
    frames_of(model, 16)
}

pub(crate) fn frames_of(model: &Model, count: u64) -> ModelFrames {
    let region = PhysRange::new(PhysAddr::new(0x10_0000), count << 12).unwrap();
    Frames::new(model.memory.clone(), region)
}

pub(crate) fn start<'f>(
    model: &Rc<Model>,
    frames: &'f ModelFrames,
) -> Result<ModelUnit<'f>, UnitError> {
    Unit::new(Wire(model.clone()), model.memory.clone(), frames, &OPTIONS)
}

/// Starts the driver and attaches [`DEVICE`] to [`DOMAIN`]. From then on the model answers nothing
/// by itself.
pub(crate) fn attached<'f>(model: &Rc<Model>, frames: &'f ModelFrames) -> ModelUnit<'f> {
    let mut unit = start(model, frames).unwrap();
    unit.attach(DEVICE, DOMAIN).unwrap();
    model.answers.set(None);
    model.take_log();
    model.take_notifications(REQUESTS);
    unit
}

pub(crate) fn pages(first: u64, count: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), count).unwrap()
}

pub(crate) fn map_of(first: u64, count: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(first << 12),
        pa: PhysAddr::new(0x50_0000),
        pages: count,
        permissions: Permissions::READ_WRITE,
    }
}

/// Maps pages with a model that accepts.
pub(crate) fn map(unit: &mut ModelUnit<'_>, model: &Model, first: u64, count: u64) {
    let before = model.answers.replace(Some(0));
    unit.map(DOMAIN, map_of(first, count)).unwrap();
    model.answers.set(before);
    model.take_log();
    model.take_notifications(REQUESTS);
}
