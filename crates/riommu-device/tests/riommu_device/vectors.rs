//! The encodings in `vectors/encodings.txt`. The kernel module's tests run the same file.

use ringfence_hw::Prefetch;
use ringfence_pgtable::{Context, RingDevice, RingPte, RingTable, TranslationType};
use ringfence_riommu_device::{
    Config, FaultEntry, InvalidateScope, InvalidateWord, RiommuDevice, register,
};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Iova, Permissions, PhysAddr, PhysRange, RequesterId,
    RingId, RingIova, RingSlot,
};

use crate::rig::{self, Rig};

const VECTORS: &str = include_str!("../../vectors/encodings.txt");

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text} is not a number"))
}

/// Encodes the fields of a line. What the function only reads is decoded from `words` and returned.
fn encode(kind: &str, fields: &[u64], words: &[u64]) -> Vec<u64> {
    match (kind, fields) {
        ("root", &[contexts]) => {
            check_root(contexts, words);
            words.to_vec()
        }
        ("fq", &[address, size]) => {
            check_queue(address, size, words[0]);
            words.to_vec()
        }
        ("ctrl", &[translate, faults, interrupt]) => {
            let bits = [
                register::TRANSLATE,
                register::RECORD_FAULTS,
                register::INTERRUPT,
            ];
            let set = bits.into_iter().zip([translate, faults, interrupt]);
            vec![set.map(|(bit, field)| u64::from(bit) * field).sum()]
        }
        ("cap", &[count, size, prefetch]) => {
            assert_eq!(size, register::MAX_QUEUE_SHIFT.into());
            let config = Config {
                prefetch: [Prefetch::Absent, Prefetch::Immediate][prefetch as usize],
                ..rig::cached()
            };
            let devices: Vec<_> = (0..count as u16).map(RequesterId::new).collect();
            let device = RiommuDevice::new(&config, &devices).unwrap();
            vec![device.read(register::CAP, 8)]
        }
        ("not-invalidation", &[]) => {
            assert_eq!(InvalidateWord::from_raw(words[0]).scope(), None);
            let mut rig = Rig::started(&Config::default());
            rig.device.write(register::INV, 8, words[0]);
            let status = rig.device.read(register::STS, 4);
            assert_eq!(status, register::BAD_INVALIDATION.into());
            words.to_vec()
        }
        ("context", &[domain, device]) => {
            let device = PhysAddr::new(device);
            let context = Context {
                domain: DomainId::new(domain as u16),
                translation: TranslationType::Rings { device },
            };
            context.encode().to_vec()
        }
        ("rdevice", &[rings, count]) => {
            let device = RingDevice::new(PhysAddr::new(rings), count as u16).unwrap();
            device.encode().to_vec()
        }
        ("rring", &[table, slots]) => {
            let ring = RingTable::new(PhysAddr::new(table), slots as u32).unwrap();
            ring.encode().to_vec()
        }
        ("rpte", &[buffer, bytes, direction]) => {
            let buffer = PhysRange::new(PhysAddr::new(buffer), bytes).unwrap();
            let permissions = Permissions::from_bits(direction).unwrap();
            RingPte::new(&buffer, permissions).unwrap().words().to_vec()
        }
        ("riova", &[ring, slot, offset]) => {
            let (ring, slot) = (RingId::new(ring as u16), RingSlot::new(slot as u32));
            let address = RingIova::new(ring, slot.unwrap(), offset as u32).unwrap();
            vec![Iova::from(address).get()]
        }
        ("invalidate-ring", &[device, ring]) => {
            let scope =
                InvalidateScope::Ring(RequesterId::new(device as u16), RingId::new(ring as u16));
            vec![checked(scope)]
        }
        ("invalidate-device", &[device]) => {
            vec![checked(InvalidateScope::Device(RequesterId::new(
                device as u16,
            )))]
        }
        ("invalidate-all", &[]) => vec![checked(InvalidateScope::All)],
        ("fault", &[device, iova, write, reason]) => {
            let fault = Fault {
                device: RequesterId::new(device as u16),
                iova: Iova::new(iova),
                access: if write == 1 {
                    Access::Write
                } else {
                    Access::Read
                },
                reason: REASONS[reason as usize - 1],
            };
            let entry = FaultEntry::new(&fault);
            assert_eq!(u64::from(entry.reason()), reason);
            assert_eq!((entry.device(), entry.iova()), (fault.device, fault.iova));
            assert_eq!(entry.access(), fault.access);
            entry.words().to_vec()
        }
        _ => panic!("unknown vector {kind} {fields:?}"),
    }
}

/// The function finds the context table by this root entry.
fn check_root(contexts: u64, words: &[u64]) {
    let mut rig = Rig::started(&Config::default());
    let context = rig.load(rig::context_entry_in(rig::CONTEXTS));
    rig.store(rig::context_entry_in(rig::CONTEXTS), [0; 2]);
    rig.store(rig::context_entry_in(contexts), context);
    rig.map(0, 0, 0x8000, 64, rig::READ);
    rig.store(rig::ROOT, [words[0], words[1]]);
    let reached = rig.access(rig::riova(0, 0, 0), 64, Access::Read).unwrap();
    assert_eq!(reached.start().get(), 0x8000);
}

/// The function writes this many faults, beginning at this address.
fn check_queue(address: u64, size: u64, word: u64) {
    let mut rig = Rig::new(&Config::default());
    rig.device.write(register::FQ, 8, word);
    assert_eq!(rig.device.read(register::FQ, 8), word);
    let control = register::RECORD_FAULTS;
    rig.device.write(register::CTRL, 4, control.into());
    for n in 0..=1 << size {
        assert_eq!(rig.device.read(register::FQ_TAIL, 4), n);
        rig.access(Iova::new(n + 1), 1, Access::Read).unwrap_err();
    }
    assert_eq!(rig.device.read(register::FQ_TAIL, 4), 1 << size);
    let status = rig.device.read(register::STS, 4);
    assert_eq!(status, register::OVERFLOW.into());
    for n in 0..1 << size {
        assert_eq!(rig.load(address + n * 16)[0], n + 1);
    }
}

/// Reasons 1 to 13, in the order of their codes.
const REASONS: [FaultReason; 13] = [
    FaultReason::Blocked,
    FaultReason::RootNotPresent,
    FaultReason::ContextNotPresent,
    FaultReason::ContextInvalid,
    FaultReason::TableAccess,
    FaultReason::ReservedBit,
    FaultReason::RingBeyondDevice,
    FaultReason::SlotBeyondRing,
    FaultReason::NotPresent,
    FaultReason::ReadDenied,
    FaultReason::WriteDenied,
    FaultReason::BeyondBuffer,
    FaultReason::BadLength,
];

fn checked(scope: InvalidateScope) -> u64 {
    let word = InvalidateWord::new(scope);
    assert_eq!(word.scope(), Some(scope));
    word.get()
}

#[test]
fn every_encoding_has_its_words() {
    let lines = VECTORS
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut reasons = [false; REASONS.len()];
    let mut count = 0;
    for line in lines {
        let (fields, words) = line.split_once(" = ").expect("a line has ` = `");
        let mut fields = fields.split_whitespace();
        let kind = fields.next().expect("a line has a kind");
        let fields: Vec<u64> = fields.map(number).collect();
        let words: Vec<u64> = words.split_whitespace().map(number).collect();
        assert_eq!(encode(kind, &fields, &words), words, "{line}");
        if let ("fault", &[.., reason]) = (kind, fields.as_slice()) {
            reasons[reason as usize - 1] = true;
        }
        count += 1;
    }
    assert!(count >= 50, "{count} vectors");
    assert_eq!(reasons, [true; REASONS.len()]);
}
