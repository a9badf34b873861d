//! The encodings in `vectors/encodings.txt`. The kernel module's tests run the same file.

use ringfence_pgtable::{Context, RingDevice, RingPte, RingTable, TranslationType};
use ringfence_riommu_device::{FaultEntry, InvalidateScope, InvalidateWord};
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Iova, Permissions, PhysAddr, PhysRange, RequesterId,
    RingId, RingIova, RingSlot,
};

const VECTORS: &str = include_str!("../../vectors/encodings.txt");

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text} is not a number"))
}

/// Encodes the fields of a line.
fn encode(kind: &str, fields: &[u64]) -> Vec<u64> {
    match (kind, fields) {
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
        assert_eq!(encode(kind, &fields), words, "{line}");
        if let ("fault", &[.., reason]) = (kind, fields.as_slice()) {
            reasons[reason as usize - 1] = true;
        }
        count += 1;
    }
    assert!(count >= 25, "{count} vectors");
    assert_eq!(reasons, [true; REASONS.len()]);
}
