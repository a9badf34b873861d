//! Sessions of a hostile driver and of devices with the function, from bytes.
//!
//! Input: a byte of configuration, then steps of 8 bytes, at most [`MAX_STEPS`]. Bits of the
//! configuration: 0 and 1 rIOTLB, 2 contexts cached, 3 prefetch, 4 sound tables and registers at
//! the beginning.
//!
//! Byte 0 of a step, modulo 12, selects the action:
//!
//! - 0, 1: an access (1: a write). Device in bits 0 and 1 of byte 1, ring in the others, slot in 2,
//!   offset in 3 and 4, bytes in 5 and 6, 2^23 more bytes for each in 7.
//! - 2: an access of 8 bytes anywhere. Device in byte 1, the highest bytes of the address in the
//!   others.
//! - 3: a word changes. Word in bytes 1 and 2, shift in 3, bits to flip in 4 to 7.
//! - 4: a word becomes a pointer. Word in bytes 1 and 2, page in 3, low bits in 4 and 5.
//! - 5: a write to a register: register in byte 1, value in the others.
//! - 6: a write of any size anywhere: offset in bytes 1 and 2, bytes in 3, value in the others.
//! - 7: an invalidation: scope in byte 1, device in 2, ring in 3.
//! - 8: the driver fills a slot: device, ring and slot as for an access, buffer in bytes 3 and 4,
//!   bytes in 5 and 6, direction in 7.
//! - 9: the driver clears a slot.
//! - 10: a word changes during the next access: as 3, with the number of lookups before it in
//!   byte 7.
//! - 11: bit 0 of byte 1: a hand-over, or a reset. In both cases without cached entries.

use ringfence_hw::{Geometry, Prefetch};
use ringfence_riommu_device::{Config, RiommuDevice};
use ringfence_types::{Access, Fault, FaultReason, Iova, PhysRange, RequesterId};

use super::memory::{Memory, PAGE_BYTES, PendingChange, WordIndex};
use super::reference::{Outcome, Reference, Request};

/// Most steps of an input.
const MAX_STEPS: usize = 64;
/// Most entries that an access looks up: root, context, rDEVICE, rRING, two slots, and the entry
/// of the fault queue.
const MAX_LOOKUPS: u32 = 7;

/// Devices in DEV, and one that is not.
const LISTED: [u16; 3] = [1, 0x10, 0x101];
const UNLISTED: u16 = 2;
const ROOT: u64 = 0;
const CONTEXTS: [u64; 2] = [PAGE_BYTES, 2 * PAGE_BYTES];
const DEVICES: [u64; 3] = [3 * PAGE_BYTES, 4 * PAGE_BYTES, 5 * PAGE_BYTES];
const RINGS: u64 = 2;
const SLOTS: u64 = 4;
const QUEUE: u64 = 6 * PAGE_BYTES;

/// Runs one input.
pub(crate) fn run(data: &[u8], reached: &mut dyn FnMut(&'static str)) {
    let Some((&config, steps)) = data.split_first() else {
        return;
    };
    let mut session = Session::new(config);
    for step in steps.as_chunks::<8>().0.iter().take(MAX_STEPS) {
        session.step(step, reached);
        session.check(reached);
    }
    session.memory.check_all();
}

struct Session {
    config: Config,
    memory: Memory,
    device: RiommuDevice,
    reference: Reference,
}

impl Session {
    fn new(bits: u8) -> Self {
        let geometry = |ways| Geometry::new(1, ways).expect("a power of two");
        let config = Config {
            riotlb: match bits & 3 {
                0 => Geometry::ABSENT,
                1 => geometry(1),
                2 => geometry(2),
                _ => geometry(8),
            },
            contexts: match bits & 4 {
                0 => Geometry::ABSENT,
                _ => geometry(2),
            },
            prefetch: match bits & 8 {
                0 => Prefetch::Absent,
                _ => Prefetch::Immediate,
            },
        };
        let mut session = Self {
            device: device(&config),
            memory: Memory::new(),
            reference: Reference::new(&LISTED, bits & 8 != 0),
            config,
        };
        if bits & 16 != 0 {
            session.start();
        }
        session
    }

    /// Writes sound tables and starts the function, as a driver does.
    fn start(&mut self) {
        for (bus, contexts) in CONTEXTS.into_iter().enumerate() {
            let at = ROOT + bus as u64 * 16;
            self.memory.store_entry(at, [contexts | 1, 0]);
        }
        for (id, table) in LISTED.into_iter().zip(DEVICES) {
            let at = CONTEXTS[usize::from(id >> 8)] + u64::from(id & 0xff) * 16;
            let domain = u64::from(id) << 8;
            self.memory.store_entry(at, [table | 0b1101, domain]);
            self.memory.store_entry(table, [table + 16, RINGS]);
            for ring in 0..RINGS {
                let slots = table + 0x40 + ring * SLOTS * 16;
                self.memory
                    .store_entry(table + 16 + ring * 16, [slots, SLOTS]);
            }
        }
        for (offset, bytes, value) in [(0x28, 8, QUEUE | 2), (0x10, 8, ROOT), (0x18, 4, 7)] {
            self.write(offset, bytes, value);
        }
    }

    fn step(&mut self, step: &[u8; 8], reached: &mut dyn FnMut(&'static str)) {
        let [kind, a, b, c, d, e, f, g] = *step;
        let word = WordIndex::any(u16::from_le_bytes([a, b]).into());
        match kind % 12 {
            kind @ 0..=1 => {
                let offset = u64::from(u16::from_le_bytes([c, d]));
                let iova = slot_address(a, b) | offset;
                let bytes = u64::from(u16::from_le_bytes([e, f])) + (u64::from(g) << 23);
                self.access(a, iova, bytes, kind == 1, reached);
            }
            2 => {
                let iova = u64::from_be_bytes([b, c, d, e, f, g, 0, 0]);
                self.access(a, iova, 8, false, reached);
            }
            3 => {
                let flip = u64::from(u32::from_le_bytes([d, e, f, g])) << (c & 63);
                self.memory.store(word, self.memory.load(word) ^ flip);
            }
            4 => {
                let low = u64::from(u16::from_le_bytes([d, e]));
                self.memory.store(word, (u64::from(c) * PAGE_BYTES) | low);
            }
            5 => {
                let registers = [
                    (0x10, 8),
                    (0x18, 4),
                    (0x1c, 4),
                    (0x20, 8),
                    (0x28, 8),
                    (0x30, 4),
                ];
                let (offset, bytes) = registers[usize::from(a) % registers.len()];
                let value = u64::from_le_bytes([b, c, d, e, f, g, 0, 0]);
                self.write(offset, bytes, value);
            }
            6 => {
                let offset = u64::from(u16::from_le_bytes([a, b]));
                let value = u64::from_le_bytes([d, e, f, g, 0, 0, 0, 0]);
                self.write(offset, c.into(), value);
                let read = self.device.read(offset, c.into());
                assert_eq!(read, self.reference.read(offset, c.into()), "{offset:#x}");
            }
            7 => {
                let (scope, id) = (u64::from(a), u64::from(requester(b)));
                let value = match scope % 3 {
                    0 => u64::from(c) << 16 | id,
                    1 => 1 << 32 | id,
                    _ => 2 << 32,
                };
                self.write(0x20, 8, value);
            }
            8 => {
                let buffer = u64::from(u16::from_le_bytes([c, d])) << 4;
                let bytes = u64::from(u16::from_le_bytes([e, f]));
                let control = 1 << 32 | u64::from(g & 3) << 30 | bytes;
                self.memory.store_entry(slot_entry(a, b), [buffer, control]);
            }
            9 => {
                if let Some(word) = WordIndex::at(slot_entry(a, b) + 8) {
                    self.memory.store(word, 0);
                }
            }
            10 => {
                let flip = u64::from(u16::from_le_bytes([d, e])) << (c & 63);
                self.memory.change_later(PendingChange {
                    after: g & 7,
                    word,
                    flip,
                });
            }
            _ => self.restart(a & 1 != 0, reached),
        }
    }

    fn write(&mut self, offset: u64, bytes: u64, value: u64) {
        self.device.write(offset, bytes, value);
        self.reference
            .write(offset, bytes, value, self.memory.now());
    }

    fn restart(&mut self, is_reset: bool, reached: &mut dyn FnMut(&'static str)) {
        let now = self.memory.now();
        if is_reset {
            self.device.reset();
            self.reference.reset(now);
            reached("reset");
        } else {
            let state = self.device.save();
            self.device = device(&self.config);
            self.device.restore(&state).expect("a saved state");
            assert_eq!(self.device.save(), state);
            self.reference.hand_over(now);
            reached("hand-over");
        }
        assert_eq!(self.device.unit().riotlb_live(), 0);
    }

    fn access(
        &mut self,
        device: u8,
        iova: u64,
        bytes: u64,
        write: bool,
        reached: &mut dyn FnMut(&'static str),
    ) {
        let request = Request {
            device: requester(device),
            iova,
            bytes,
            write,
        };
        let began = self.memory.now();
        self.memory.begin();
        let found = self.device.translate(
            &self.memory,
            RequesterId::new(request.device),
            Iova::new(iova),
            bytes,
            if write { Access::Write } else { Access::Read },
        );
        let lookups = self.memory.end();
        assert!(lookups <= MAX_LOOKUPS, "{lookups} entries for {request:x?}");
        let seen = outcome(&request, found);
        let permitted = self.reference.outcomes(&self.memory, &request, began);
        assert!(
            permitted.contains(&seen),
            "{request:x?}: {seen:x?} of {permitted:x?}"
        );
        let changed = self.memory.now() != began;
        match seen {
            Ok(_) => reached("permitted"),
            Err(fault) => {
                reached(REASONS[usize::from(fault.1) - 1]);
                self.reference.record(&self.memory, &request, fault);
            }
        }
        if changed {
            reached("changed meanwhile");
        } else if permitted.len() > 1 {
            reached("stale");
        }
    }

    /// Compares memory, the registers and the interrupt.
    fn check(&mut self, reached: &mut dyn FnMut(&'static str)) {
        self.memory.check();
        for (offset, bytes) in [
            (0x08, 8),
            (0x10, 8),
            (0x18, 4),
            (0x1c, 4),
            (0x28, 8),
            (0x30, 4),
            (0x34, 4),
        ] {
            let read = self.device.read(offset, bytes);
            assert_eq!(read, self.reference.read(offset, bytes), "{offset:#x}");
        }
        let due = std::mem::take(&mut self.reference.interrupt);
        assert_eq!(self.device.take_interrupt(), due);
        if due {
            reached("interrupt");
        }
        let status = self.device.read(0x1c, 4);
        for (bit, outcome) in [
            (1, "fault lost"),
            (2, "queue outside memory"),
            (4, "malformed invalidation"),
        ] {
            if status & bit != 0 {
                reached(outcome);
            }
        }
        assert!(self.device.unit().riotlb_live() <= self.config.riotlb.entries());
    }
}

fn device(config: &Config) -> RiommuDevice {
    RiommuDevice::new(config, &LISTED.map(RequesterId::new)).expect("three devices")
}

fn requester(device: u8) -> u16 {
    LISTED
        .get(usize::from(device & 3))
        .copied()
        .unwrap_or(UNLISTED)
}

/// Returns the address of the first byte of a slot.
fn slot_address(device_and_ring: u8, slot: u8) -> u64 {
    u64::from(device_and_ring >> 2) << 48 | u64::from(slot) << 30
}

/// Returns the address of a slot's entry in the tables of [`Session::start`].
fn slot_entry(device_and_ring: u8, slot: u8) -> u64 {
    let table = DEVICES[usize::from(device_and_ring & 3) % DEVICES.len()];
    let ring = u64::from(device_and_ring >> 2) % RINGS;
    table + 0x40 + (ring * SLOTS + u64::from(slot) % SLOTS) * 16
}

const REASONS: [&str; 13] = [
    "reason 1",
    "reason 2",
    "reason 3",
    "reason 4",
    "reason 5",
    "reason 6",
    "reason 7",
    "reason 8",
    "reason 9",
    "reason 10",
    "reason 11",
    "reason 12",
    "reason 13",
];

fn outcome(request: &Request, found: Result<PhysRange, Fault>) -> Outcome {
    match found {
        Ok(range) => {
            assert_eq!(range.bytes(), request.bytes, "all of it");
            Ok(range.start().get())
        }
        Err(fault) => {
            assert_eq!(fault.device.get(), request.device);
            Err((fault.iova.get(), code(fault.reason)))
        }
    }
}

/// Codes of docs/RIOMMU-DEVICE.md, "Faults".
fn code(reason: FaultReason) -> u8 {
    match reason {
        FaultReason::Blocked => 1,
        FaultReason::RootNotPresent => 2,
        FaultReason::ContextNotPresent => 3,
        FaultReason::ContextInvalid => 4,
        FaultReason::TableAccess => 5,
        FaultReason::ReservedBit => 6,
        FaultReason::RingBeyondDevice => 7,
        FaultReason::SlotBeyondRing => 8,
        FaultReason::NotPresent => 9,
        FaultReason::ReadDenied => 10,
        FaultReason::WriteDenied => 11,
        FaultReason::BeyondBuffer => 12,
        FaultReason::BadLength => 13,
        _ => panic!("a ring IOMMU has no reason {reason}"),
    }
}
