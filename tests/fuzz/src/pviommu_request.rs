//! A hostile guest's requests as bytes: their decoding, and the backend's view of mappings, in a
//! window of 2^40 bytes with tables that only record. The target `pviommu` covers the backend over
//! tables that a unit walks.
//!
//! Input: a byte of limits (pages of a request in bits 0 to 1, mappings of a device in bits 2 to 4,
//! 2 MiB areas in bits 5 to 6), then requests. A byte before each gives its length; 255 means the
//! rest of the input.

use std::collections::BTreeSet;

use ringfence_pviommu::backend::{Backend, BackendLimits, DeviceSlot, DeviceState, Resident};
use ringfence_pviommu::wire::{
    Config, Devid, Gpa, Malformed, MigrationStream, PAGES_LIMIT, Request, Status, encode_map,
    encode_unmap,
};
use ringfence_types::{AddressRange, Direction, Iova, IovaRange, PhysAddr};

use crate::OutcomeHook;
use crate::pviommu::judge::{Model, Rules};
use crate::pviommu::recorded::Recorded;

/// Outcomes that the corpus reaches: every reason to reject bytes as a request, and every status of
/// a host without failures.
pub const OUTCOMES: &[&str] = &[
    "a map",
    "an unmap",
    "malformed: TooShort",
    "malformed: Type",
    "malformed: Pages",
    "malformed: Length",
    "malformed: Direction",
    "status: Ok",
    "status: NoDevice",
    "status: BadGiova",
    "status: BadGpa",
    "status: Mapped",
    "status: NotMapped",
    "status: NoRoom",
];

const PAGE: u64 = 4096;
const BYTES: u64 = 1 << 40;
const DEVICES: [u64; 2] = [0x10, 0x12];

fn number(bytes: &[u8], at: usize, count: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + count)?;
    let digits = bytes.iter().rev();
    Some(digits.fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Returns every error of `bytes` according to the table of fields, offset by offset, in no
/// particular order.
fn complaints(bytes: &[u8], pages_max: u32) -> Vec<Malformed> {
    let short = Malformed::TooShort { bytes: bytes.len() };
    let (Some(kind), Some(pages)) = (number(bytes, 8, 4), number(bytes, 12, 4)) else {
        return vec![short];
    };
    let mut all = Vec::new();
    let (header, arrays) = match kind {
        0 => (24, 2),
        1 => (16, 1),
        _ => return vec![Malformed::Type(kind as u32)],
    };
    if bytes.len() < header {
        all.push(short);
    }
    if pages == 0 || pages > u64::from(pages_max) {
        all.push(Malformed::Pages(pages as u32));
    }
    if bytes.len() as u64 != header as u64 + 8 * arrays * pages {
        all.push(Malformed::Length {
            bytes: bytes.len(),
            pages: pages as u32,
        });
    }
    let direction = number(bytes, 16, 8).filter(|_| kind == 0);
    if let Some(direction) = direction.filter(|direction| *direction > 2) {
        all.push(Malformed::Direction(direction));
    }
    all
}

/// Decodes a request and compares every field with the table of fields. Encoding it again gives the
/// same bytes.
fn read(bytes: &[u8], pages_max: u32, reached: OutcomeHook<'_>) {
    let complaints = complaints(bytes, pages_max);
    let word = |at: usize| number(bytes, at, 8);
    let mut again = Vec::new();
    match Request::decode(bytes, pages_max) {
        Err(error) => {
            assert!(complaints.contains(&error), "{error} of {complaints:?}");
            reached(match error {
                Malformed::TooShort { .. } => "malformed: TooShort",
                Malformed::Type(_) => "malformed: Type",
                Malformed::Pages(_) => "malformed: Pages",
                Malformed::Length { .. } => "malformed: Length",
                Malformed::Direction(_) => "malformed: Direction",
            });
            return;
        }
        Ok(Request::Map(map)) => {
            assert_eq!(Some(map.device.get()), word(0));
            for (index, (giova, gpa)) in map.pairs().enumerate() {
                assert_eq!(Some(giova.get()), word(24 + 8 * index));
                assert_eq!(Some(gpa.get()), word(24 + 8 * (index + map.giovas.len())));
            }
            let direction = match word(16) {
                Some(0) => Direction::Bidirectional,
                Some(1) => Direction::ToDevice,
                _ => Direction::FromDevice,
            };
            assert_eq!(map.direction, direction);
            encode_map(&mut again, map.device, map.direction, map.pairs()).expect("pages");
            reached("a map");
        }
        Ok(Request::Unmap(unmap)) => {
            assert_eq!(Some(unmap.device.get()), word(0));
            for (index, giova) in unmap.giovas.iter().enumerate() {
                assert_eq!(Some(giova.get()), word(16 + 8 * index));
            }
            encode_unmap(&mut again, unmap.device, unmap.giovas.iter()).expect("pages");
            reached("an unmap");
        }
    }
    assert!(complaints.is_empty(), "taken in spite of {complaints:?}");
    assert_eq!(again, bytes);
}

/// Checks that the mappings equal the model: page by page, in number, in the tables, and in a
/// migration stream.
fn compare(backend: &mut Backend<Resident, Recorded>, model: &Model, touched: &BTreeSet<u64>) {
    for (slot, device) in (0..).zip(DEVICES) {
        for at in touched {
            let wanted = model.get(&(device, *at)).copied();
            let found = backend.mapping(Devid::new(device), Iova::new(*at));
            assert_eq!(found.map(|(gpa, to)| (gpa.get(), to)), wanted, "{at:#x}");
            let entry = backend
                .tables()
                .0
                .get(&(DeviceSlot::new(slot), Iova::new(*at)));
            let wanted = wanted.map(|(gpa, to)| (PhysAddr::new(gpa), to));
            assert_eq!(entry.copied(), wanted, "{at:#x}");
        }
        let live = model.range((device, 0)..=(device, u64::MAX)).count() as u64;
        assert_eq!(backend.mapped_pages(Devid::new(device)), live);
    }
    assert_eq!(backend.tables().0.len(), model.len());
    let stream = backend
        .export(|_| DeviceState::Transferred)
        .expect("in order");
    let stream = MigrationStream::decode(&stream).expect("sound");
    let pages = stream.records().flat_map(|record| {
        let of = (record.device.get(), record.direction);
        let pairs = record.pairs().collect::<Vec<_>>();
        let page = move |(giova, gpa): (Iova, Gpa)| ((of.0, giova.get()), (gpa.get(), of.1));
        pairs.into_iter().map(page)
    });
    assert!(pages.eq(model.iter().map(|(at, to)| (*at, *to))));
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((&limits, mut rest)) = data.split_first() else {
        return;
    };
    let rules = Rules {
        pages_max: [1, 4, 16, PAGES_LIMIT][usize::from(limits & 3)],
        devices: DEVICES,
        first: PAGE,
        last: BYTES - PAGE,
        memory_bytes: BYTES,
        mappings: 1 << (limits >> 2 & 7),
        stretches: 1 << (limits >> 5 & 3),
    };
    let window = IovaRange::inclusive(Iova::new(rules.first), Iova::new(BYTES - 1));
    let window = window.expect("a window");
    let config =
        Config::new(window, rules.pages_max, DEVICES.map(|id| id as u32)).expect("a configuration");
    let memory = AddressRange::new(Gpa::new(0), BYTES).expect("a range");
    let limits = BackendLimits {
        mappings: rules.mappings,
        leaves: rules.stretches,
    };
    let backing = Resident::new(vec![memory]);
    let mut backend = Backend::new(config, limits, backing, Recorded::default());
    let mut model = Model::new();
    let mut touched = BTreeSet::new();
    while let Some((&count, later)) = rest.split_first() {
        let count = match count {
            u8::MAX => later.len(),
            count => usize::from(count).min(later.len()),
        };
        let (request, later) = later.split_at(count);
        rest = later;
        read(request, rules.pages_max, reached);
        let (wanted, after) = rules.judge(&model, request);
        touched.extend(after.keys().map(|(_, at)| at & !(PAGE - 1)));
        let status = backend.handle(request);
        assert_eq!(status, wanted);
        match status {
            Status::Ok => {
                model = after;
                reached("status: Ok");
            }
            Status::Malformed => {}
            Status::NoDevice => reached("status: NoDevice"),
            Status::BadGiova => reached("status: BadGiova"),
            Status::BadGpa => reached("status: BadGpa"),
            Status::Mapped => reached("status: Mapped"),
            Status::NotMapped => reached("status: NotMapped"),
            Status::NoRoom => reached("status: NoRoom"),
            Status::Failed => panic!("a host that works"),
        }
    }
    compare(&mut backend, &model, &touched);
    backend.reset().expect("tables that settle");
    compare(&mut backend, &Model::new(), &touched);
}
