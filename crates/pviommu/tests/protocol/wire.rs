//! The wire format: decoding inverts encoding, malformed messages are rejected, and both agree with
//! the vectors.

use std::collections::{BTreeSet, HashSet};
use std::mem::discriminant;

use proptest::prelude::*;
use ringfence_pviommu::wire::{
    CONFIG_BYTES, Config, ConfigError, Devid, Event, Gpa, Malformed, MigrationStream, PAGES_LIMIT,
    Request, Status, StreamWriter, encode_map, encode_unmap,
};
use ringfence_types::{Direction, Iova, IovaRange};

use crate::rig::{PAGE, cases};
use crate::vectors::{self, StreamRecord, StreamResult, StreamVector};

/// Decodes every request of the vectors by layout alone, and encodes it again.
#[test]
fn vectors_are_read_and_written_again() {
    let (mut statuses, mut directions) = (BTreeSet::new(), BTreeSet::new());
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
                    if let Request::Map(map) = request {
                        let word = u64::from_le_bytes(vector.bytes[16..24].try_into().unwrap());
                        assert_eq!(u64::from(raw(map.direction)), word, "{name}");
                        directions.insert(word);
                    }
                    sound += 1;
                }
            }
        }
    }
    assert_eq!(statuses, BTreeSet::from(Status::ALL));
    assert_eq!(directions, BTreeSet::from([0, 1, 2]));
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
fn configurations_are_read_and_written_again() {
    let mut faults = BTreeSet::new();
    for vector in vectors::configurations() {
        let name = vector.name;
        assert_eq!(Config::decode(&vector.bytes), vector.says, "{name}");
        match vector.says {
            Ok(config) => assert_eq!(config.encode() == vector.bytes, vector.written, "{name}"),
            Err(fault) => _ = faults.insert(fault.to_string()),
        }
    }
    assert!(faults.len() > 6, "all of them, with their numbers");
}

/// A truncated list or header is rejected at every length.
#[test]
fn a_configuration_that_is_cut_off_is_refused() {
    let window = IovaRange::inclusive(Iova::new(0x1000), Iova::new(0xffff)).unwrap();
    let whole = Config::new(window, 1, [8, 16, 24]).unwrap().encode();
    for bytes in 0..whole.len() {
        let fault = if bytes < CONFIG_BYTES {
            ConfigError::TooShort
        } else {
            ConfigError::Devices
        };
        assert_eq!(Config::decode(&whole[..bytes]), Err(fault), "{bytes} bytes");
    }
    assert!(Config::decode(&whole).is_ok());
}

proptest! {
    #![proptest_config(cases(2000, 0x5eed))]

    /// A hostile host's configuration space is rejected, or it is valid and encodes to the same
    /// bytes.
    #[test]
    fn any_configuration_is_sound_or_refused(
        header in prop::array::uniform8(prop_oneof![any::<u32>(), 0..4_u32, Just(0x1000)]),
        list in prop::collection::vec(0..12_u32, 0..6),
    ) {
        let mut header = header;
        header[7] = 2;
        let bytes: Vec<u8> = header
            .iter()
            .chain(&list)
            .flat_map(|word| word.to_le_bytes())
            .collect();
        if let Ok(config) = Config::decode(&bytes) {
            let devices: Vec<_> = config.devices().collect();
            prop_assert!(devices.is_sorted_by(|a, b| a < b) && devices.len() == header[5] as usize);
            prop_assert!(
                config.window().bytes() >= 4096 && (1..=PAGES_LIMIT).contains(&config.pages_max())
            );
            prop_assert_eq!(Config::decode(&config.encode()), Ok(config));
        }
    }
}

#[test]
fn events_are_read_and_written_again() {
    let (mut reported, mut dropped) = (0, 0);
    for (name, bytes, says) in vectors::events() {
        let read = bytes.as_array().and_then(Event::decode);
        assert_eq!(read, says, "{name}");
        match says {
            Some(event) => {
                assert_eq!(event.encode(), bytes[..], "{name}");
                reported += 1;
            }
            None => dropped += 1,
        }
    }
    assert!(
        reported > 5 && dropped > 10,
        "{reported} events, {dropped} that are none"
    );
}

/// Decodes every stream by layout alone, and encodes it again.
#[test]
fn streams_are_read_and_written_again() {
    let mut kinds = HashSet::new();
    for (_, vectors) in vectors::streams() {
        for StreamVector { name, bytes, end } in vectors {
            let read = MigrationStream::decode(&bytes);
            let (records, canonical) = match end {
                StreamResult::Malformed(error) => {
                    kinds.insert(discriminant(&error.kind));
                    assert_eq!(read.err(), Some(error), "{name}");
                    continue;
                }
                StreamResult::Refused { record, .. } => {
                    assert!(read.unwrap().len() > record, "{name}");
                    continue;
                }
                StreamResult::Accepted { records, canonical } => (records, canonical),
            };
            let found = read.unwrap().records().map(|record| {
                let gpas = record.gpas.iter().collect();
                (record.device, record.direction, record.first, gpas)
            });
            assert_eq!(found.collect::<Vec<StreamRecord>>(), records, "{name}");
            let mut writer = StreamWriter::new();
            for (device, direction, first, gpas) in records {
                for (gpa, page) in gpas.into_iter().zip(0..) {
                    let giova = first.wrapping_add(page * PAGE);
                    writer.page(device, giova, gpa, direction).unwrap();
                }
            }
            assert_eq!(writer.finish() == bytes, canonical, "{name}");
        }
    }
    assert_eq!(kinds.len(), 7, "every kind");
}

fn direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(Direction::ALL.to_vec())
}

/// Sorted mappings of several devices, with adjacent pages.
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

/// Decodes a stream naively, by the layout in `docs/PVIOMMU.md`.
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

/// Returns the value of a direction, by `docs/PVIOMMU.md`.
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
    assert!(MigrationStream::decode(&bytes).is_ok());
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
        // A limit below the length, and every wrong length.
        let pages = map.giovas.len() as u32;
        prop_assert_eq!(Request::decode(&bytes, pages - 1), Err(Malformed::Pages(pages)));
        for less in 0..bytes.len() {
            prop_assert!(Request::decode(&bytes[..less], 40).is_err());
        }
        bytes.push(0);
        prop_assert!(Request::decode(&bytes, 40).is_err());
    }

    #[test]
    fn unmaps_come_back(
        device in any::<u64>(),
        giovas in prop::collection::vec(any::<u64>(), 1..40),
    ) {
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
        if let Some(fields) = bytes.get_mut(8..16) {
            fields[..4].copy_from_slice(&kind.to_le_bytes());
            fields[4..].copy_from_slice(&pages.to_le_bytes());
        }
        if let Ok(request) = Request::decode(&bytes, 4) {
            prop_assert_eq!(encode(&request), bytes);
        }
    }

    #[test]
    fn streams_come_back(mappings in mappings()) {
        let bytes = stream(&mappings);
        let raw: Vec<_> = mappings
            .iter()
            .map(|(d, p, g, direction)| (*d, *p, *g, raw(*direction)))
            .collect();
        prop_assert_eq!(by_hand(&bytes), raw);
        let stream = MigrationStream::decode(&bytes).unwrap();
        let mut found = Vec::new();
        for record in stream.records() {
            for (giova, gpa) in record.pairs() {
                found.push((record.device.get(), giova.get() >> 12, gpa.get(), record.direction));
            }
        }
        prop_assert_eq!(found, mappings);
        // No two adjacent records could be merged.
        let records: Vec<_> = stream.records().collect();
        for pair in records.windows(2) {
            let joined = pair[0].device == pair[1].device
                && pair[0].direction == pair[1].direction
                && pair[0].end() == pair[1].first;
            prop_assert!(!joined);
        }
    }

    #[test]
    fn a_changed_bit_is_noticed(
        mappings in mappings(),
        at in any::<prop::sample::Index>(),
        bit in 0..8_u32,
    ) {
        let mut bytes = stream(&mappings);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(MigrationStream::decode(&bytes).is_err());
    }
}

/// The window may end inside a page; that page cannot be mapped.
#[test]
fn a_page_that_the_window_cuts_cannot_be_mapped() {
    let window = IovaRange::inclusive(Iova::new(0x1000), Iova::new(0x37ff)).unwrap();
    let config = Config::new(window, 1, [0]).unwrap();
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
