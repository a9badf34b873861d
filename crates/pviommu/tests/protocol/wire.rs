//! The wire format: what is encoded is decoded again, what is not a message is refused, and the vectors say the same.

use std::collections::BTreeSet;

use proptest::prelude::*;
use ringfence_pviommu::wire::{
    Config, Devid, Event, EventReason, Gpa, Malformed, Request, Status, Stream, StreamErrorKind,
    StreamWriter, encode_map, encode_unmap,
};
use ringfence_types::{Access, Direction, Iova, IovaRange};

use crate::rig::cases;
use crate::vectors;

/// What the layout alone says of every vector, and that encoding gives the same bytes again.
#[test]
fn vectors_are_read_and_written_again() {
    let mut statuses = BTreeSet::new();
    let mut sound = 0;
    for (setting, vectors) in vectors::all() {
        for vector in vectors {
            statuses.insert(vector.status);
            let name = &vector.name;
            match Request::decode(&vector.bytes, setting.config.pages_max()) {
                Err(_) => assert_eq!(vector.status, Status::Malformed, "{name}"),
                Ok(request) => {
                    assert_ne!(vector.status, Status::Malformed, "{name}");
                    assert_eq!(encode(&request), vector.bytes, "{name}");
                    sound += 1;
                }
            }
        }
    }
    assert_eq!(statuses, BTreeSet::from(Status::ALL));
    assert!(sound > 80, "{sound} sound requests");
}

fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    match request {
        Request::Map(map) => encode_map(&mut out, map.device, map.direction, map.pairs()),
        Request::Unmap(unmap) => encode_unmap(&mut out, unmap.device, unmap.giovas.iter()),
    }
    .expect("within the limits");
    out
}

#[test]
fn requests_without_pages_are_not_written() {
    let mut out = vec![7];
    let none: [(Iova, Gpa); 0] = [];
    let refused = encode_map(
        &mut out,
        Devid::new(1),
        Direction::ToDevice,
        none.into_iter(),
    );
    assert_eq!(refused, Err(Malformed::Pages(0)));
    let many = (0..65_537_u32).map(|page| Iova::new(u64::from(page) << 12));
    let many: Vec<Iova> = many.collect();
    let refused = encode_unmap(&mut out, Devid::new(1), many.into_iter());
    assert_eq!(refused, Err(Malformed::Pages(65_537)));
    assert_eq!(out, [7]);
}

#[test]
fn reserved_statuses_are_failures() {
    for raw in 0..=u8::MAX {
        let status = Status::from_raw(raw);
        if raw <= 8 {
            assert_eq!(status.raw(), raw);
        } else {
            assert_eq!(status, Status::Failed);
        }
    }
}

#[test]
fn a_configuration_is_32_bytes_at_the_offsets_of_the_document() {
    let window = IovaRange::inclusive(Iova::new(0x1000), Iova::new(0xffff_ffff)).unwrap();
    let config = Config::new(window, 256, 8, 0x28).unwrap();
    let bytes = config.encode();
    let mut expected = [0; 32];
    expected[..8].copy_from_slice(&0x1000_u64.to_le_bytes());
    expected[8..16].copy_from_slice(&0xffff_ffff_u64.to_le_bytes());
    expected[16..20].copy_from_slice(&256_u32.to_le_bytes());
    expected[20..24].copy_from_slice(&8_u32.to_le_bytes());
    expected[24..28].copy_from_slice(&0x28_u32.to_le_bytes());
    expected[28..].copy_from_slice(&1_u32.to_le_bytes());
    assert_eq!(bytes, expected);
    assert_eq!(Config::decode(&bytes), Ok(config));
    for (name, at, value) in [
        ("a window that begins in a page", 0, 0x1001_u64),
        ("a window behind its end", 0, 0x1_0000_0000),
        ("a window up to the last page", 8, u64::MAX),
        ("no pages", 16, 8 << 32),
        ("too many pages", 16, 8 << 32 | 65_537),
        ("devices that end before they begin", 24, 1 << 32 | 7),
        ("version 0", 24, 0x28),
        ("version 2", 24, 2 << 32 | 0x28),
    ] {
        let mut wrong = bytes;
        wrong[at..at + 8].copy_from_slice(&value.to_le_bytes());
        assert!(Config::decode(&wrong).is_err(), "{name}");
    }
}

#[test]
fn events_are_24_bytes_at_the_offsets_of_the_document() {
    for (access, raw_access) in [(Access::Read, 1_u32), (Access::Write, 2)] {
        for (reason, raw_reason) in [(EventReason::NotMapped, 1_u32), (EventReason::Direction, 2)] {
            let event = Event {
                device: Devid::new(0x1_0008),
                access,
                reason,
                giova: Iova::new(0x1234_5678_9abc),
            };
            let mut expected = [0; 24];
            expected[..8].copy_from_slice(&0x1_0008_u64.to_le_bytes());
            expected[8..12].copy_from_slice(&raw_access.to_le_bytes());
            expected[12..16].copy_from_slice(&raw_reason.to_le_bytes());
            expected[16..].copy_from_slice(&0x1234_5678_9abc_u64.to_le_bytes());
            assert_eq!(event.encode(), expected);
            assert_eq!(Event::decode(&expected), Some(event));
            for (at, wrong) in [(8, 0), (8, 3), (12, 0), (12, 3)] {
                let mut bytes = expected;
                bytes[at] = wrong;
                assert_eq!(Event::decode(&bytes), None);
            }
        }
    }
}

fn direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(Direction::ALL.to_vec())
}

/// Mappings of some devices, sorted, with neighbours.
fn mappings() -> impl Strategy<Value = Vec<(u64, u64, u64, Direction)>> {
    let one = (0..3_u64, 0..12_u64, any::<u64>(), direction());
    prop::collection::vec(one, 0..24).prop_map(|mut all| {
        all.sort_by_key(|(device, page, ..)| (*device, *page));
        all.dedup_by_key(|(device, page, ..)| (*device, *page));
        all
    })
}

fn stream(mappings: &[(u64, u64, u64, Direction)]) -> Vec<u8> {
    let mut writer = StreamWriter::new();
    for (device, page, gpa, direction) in mappings {
        writer
            .page(
                Devid::new(*device),
                Iova::new(page << 12),
                Gpa::new(*gpa),
                *direction,
            )
            .expect("in order");
    }
    writer.finish()
}

/// As a naive reader would: the layout of the document by hand.
fn by_hand(bytes: &[u8]) -> Vec<(u64, u64, u64, u32)> {
    let le64 = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let le32 = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut found = Vec::new();
    let mut at = 16;
    for _ in 0..le64(8) {
        let pages = u64::from(le32(at + 8));
        assert_eq!(le64(at + 24), le64(at + 16) + pages * 4096);
        for page in 0..pages {
            let gpa = le64(at + 32 + page as usize * 8);
            found.push((le64(at), (le64(at + 16) >> 12) + page, gpa, le32(at + 12)));
        }
        at += 32 + pages as usize * 8;
    }
    assert_eq!(at + 4, bytes.len());
    found
}

fn raw(direction: Direction) -> u32 {
    match direction {
        Direction::Bidirectional => 0,
        Direction::ToDevice => 1,
        Direction::FromDevice => 2,
    }
}

#[test]
fn a_writer_takes_mappings_in_order_only() {
    let mut writer = StreamWriter::new();
    let mut page = |device, page: u64| {
        writer
            .page(
                Devid::new(device),
                Iova::new(page << 12),
                Gpa::new(0),
                Direction::ToDevice,
            )
            .is_ok()
    };
    assert_eq!(
        [
            (1, 5),
            (1, 5),
            (1, 4),
            (0, 9),
            (1, 6),
            (2, 0),
            (2, (1 << 52) - 1)
        ]
        .map(|(d, p)| page(d, p)),
        [true, false, false, false, true, true, false]
    );
    let bytes = writer.finish();
    assert_eq!(by_hand(&bytes).len(), 3);
    assert!(Stream::decode(&bytes).is_ok());
}

/// A stream made by hand, and what each way of spoiling it is called.
#[test]
fn spoiled_streams_have_names() {
    fn record(device: u64, pages: u32, direction: u32, first: u64, end: u64) -> Vec<u8> {
        let mut bytes = device.to_le_bytes().to_vec();
        bytes.extend(pages.to_le_bytes());
        bytes.extend(direction.to_le_bytes());
        bytes.extend(first.to_le_bytes());
        bytes.extend(end.to_le_bytes());
        bytes.extend((0..u64::from(pages.min(8))).flat_map(|page| (page << 12).to_le_bytes()));
        bytes
    }
    // The checksum from a stream without records, continued: any stream has the same front.
    fn sealed(count: u64, records: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = b"PVIOMMU\x01".to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend(records.concat());
        let mut crc = !0_u32;
        for byte in &bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    crc >> 1 ^ 0x82f6_3b78
                } else {
                    crc >> 1
                };
            }
        }
        bytes.extend((!crc).to_le_bytes());
        bytes
    }
    let kind = |bytes: &[u8]| Stream::decode(bytes).err().map(|error| error.kind);
    let good = record(1, 2, 1, 0x1000, 0x3000);
    let next = record(1, 1, 0, 0x3000, 0x4000);
    assert_eq!(kind(&sealed(0, &[])), None);
    assert_eq!(kind(&sealed(2, &[good.clone(), next.clone()])), None);
    for (name, bytes, wanted) in [
        ("no bytes", vec![], StreamErrorKind::Magic),
        ("version 2", b"PVIOMMU\x02".to_vec(), StreamErrorKind::Magic),
        (
            "the magic alone",
            b"PVIOMMU\x01".to_vec(),
            StreamErrorKind::TooShort,
        ),
        (
            "no checksum",
            sealed(0, &[])[..16].to_vec(),
            StreamErrorKind::TooShort,
        ),
        (
            "no room for the count",
            sealed(0, &[])[..19].to_vec(),
            StreamErrorKind::TooShort,
        ),
        (
            "a record too few",
            sealed(2, std::slice::from_ref(&good)),
            StreamErrorKind::TooShort,
        ),
        (
            "2^64 - 1 records",
            sealed(u64::MAX, std::slice::from_ref(&good)),
            StreamErrorKind::TooShort,
        ),
        (
            "2^32 - 1 pages",
            sealed(1, &[record(1, u32::MAX, 1, 0, u64::from(u32::MAX) << 12)]),
            StreamErrorKind::TooShort,
        ),
        (
            "a record too many",
            sealed(1, &[good.clone(), next.clone()]),
            StreamErrorKind::TooLong,
        ),
        (
            "direction 3",
            sealed(1, &[record(1, 1, 3, 0x1000, 0x2000)]),
            StreamErrorKind::Direction(3),
        ),
        (
            "no pages",
            sealed(1, &[record(1, 0, 1, 0x1000, 0x1000)]),
            StreamErrorKind::Range,
        ),
        (
            "misaligned",
            sealed(1, &[record(1, 1, 1, 0x1001, 0x2001)]),
            StreamErrorKind::Range,
        ),
        (
            "another end",
            sealed(1, &[record(1, 1, 1, 0x1000, 0x3000)]),
            StreamErrorKind::Range,
        ),
        (
            "past the end of all",
            sealed(1, &[record(1, 2, 1, u64::MAX - 0xfff, 0x1000)]),
            StreamErrorKind::Range,
        ),
        (
            "overlapping",
            sealed(2, &[good.clone(), record(1, 1, 1, 0x2000, 0x3000)]),
            StreamErrorKind::Order,
        ),
        (
            "twice",
            sealed(2, &[good.clone(), good.clone()]),
            StreamErrorKind::Order,
        ),
        (
            "devices out of order",
            sealed(2, &[good, record(0, 1, 1, 0x9000, 0xa000)]),
            StreamErrorKind::Order,
        ),
    ] {
        assert_eq!(kind(&bytes), Some(wanted), "{name}");
    }
}

proptest! {
    #![proptest_config(cases(256, 20_251_121))]

    #[test]
    fn maps_come_back(
        device in any::<u64>(),
        direction in direction(),
        pairs in prop::collection::vec((any::<u64>(), any::<u64>()), 1..40),
    ) {
        let pairs: Vec<_> = pairs.iter().map(|(g, p)| (Iova::new(*g), Gpa::new(*p))).collect();
        let mut bytes = Vec::new();
        encode_map(&mut bytes, Devid::new(device), direction, pairs.iter().copied()).unwrap();
        prop_assert_eq!(bytes.len(), 24 + 16 * pairs.len());
        let Ok(Request::Map(map)) = Request::decode(&bytes, 40) else { panic!("no map") };
        prop_assert_eq!((map.device, map.direction), (Devid::new(device), direction));
        prop_assert_eq!(map.pairs().collect::<Vec<_>>(), pairs);
        // The limit, and every length but the right one.
        let pages = map.giovas.len() as u32;
        prop_assert_eq!(Request::decode(&bytes, pages - 1), Err(Malformed::Pages(pages)));
        for less in 0..bytes.len() {
            prop_assert!(Request::decode(&bytes[..less], 40).is_err());
        }
        bytes.push(0);
        prop_assert!(Request::decode(&bytes, 40).is_err());
    }

    #[test]
    fn unmaps_come_back(device in any::<u64>(), giovas in prop::collection::vec(any::<u64>(), 1..40)) {
        let giovas: Vec<_> = giovas.into_iter().map(Iova::new).collect();
        let mut bytes = Vec::new();
        encode_unmap(&mut bytes, Devid::new(device), giovas.iter().copied()).unwrap();
        prop_assert_eq!(bytes.len(), 16 + 8 * giovas.len());
        let Ok(Request::Unmap(unmap)) = Request::decode(&bytes, 40) else { panic!("no unmap") };
        prop_assert_eq!(unmap.device, Devid::new(device));
        prop_assert_eq!(unmap.giovas.iter().collect::<Vec<_>>(), giovas);
    }

    #[test]
    fn any_bytes_are_a_request_that_is_written_the_same_or_none(
        bytes in prop::collection::vec(any::<u8>(), 0..80),
        kind in 0..3_u32,
        pages in 0..4_u32,
    ) {
        let mut bytes = bytes;
        if let Some(place) = bytes.get_mut(8..16) {
            place[..4].copy_from_slice(&kind.to_le_bytes());
            place[4..].copy_from_slice(&pages.to_le_bytes());
        }
        if let Ok(request) = Request::decode(&bytes, 4) {
            prop_assert_eq!(encode(&request), bytes);
        }
    }

    #[test]
    fn streams_come_back(mappings in mappings()) {
        let bytes = stream(&mappings);
        let raw: Vec<_> = mappings.iter().map(|(d, p, g, direction)| (*d, *p, *g, raw(*direction))).collect();
        prop_assert_eq!(by_hand(&bytes), raw);
        let stream = Stream::decode(&bytes).unwrap();
        let mut found = Vec::new();
        for record in stream.records() {
            for (giova, gpa) in record.pairs() {
                found.push((record.device.get(), giova.get() >> 12, gpa.get(), record.direction));
            }
        }
        prop_assert_eq!(found, mappings);
        // No two records could be one.
        let records: Vec<_> = stream.records().collect();
        for pair in records.windows(2) {
            let joined = pair[0].device == pair[1].device && pair[0].direction == pair[1].direction && pair[0].end() == pair[1].first;
            prop_assert!(!joined);
        }
    }

    #[test]
    fn a_changed_bit_is_noticed(mappings in mappings(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
        let mut bytes = stream(&mappings);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(Stream::decode(&bytes).is_err());
    }
}

/// The window ends where it likes; a page that it cuts is not in it.
#[test]
fn a_page_that_the_window_cuts_cannot_be_mapped() {
    let window = IovaRange::inclusive(Iova::new(0x1000), Iova::new(0x37ff)).unwrap();
    let config = Config::new(window, 1, 0, 0).unwrap();
    for (giova, can) in [
        (0, false),
        (0x1000, true),
        (0x1800, false),
        (0x2000, true),
        (0x3000, false),
        (0x4000, false),
    ] {
        assert_eq!(config.can_map(Iova::new(giova)), can, "{giova:#x}");
    }
}
