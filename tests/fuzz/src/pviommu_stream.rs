//! Migration streams of a hostile sender. The backend accepts a stream as a whole, and then exports
//! the same stream, or refuses it as a whole.
//!
//! Input: a byte of flags, then the stream. Bit 0: append the correct checksum, so that the fields
//! behind the check are reached. Bit 1: a mapping exists already.

use ringfence_pviommu::backend::{Backend, BackendLimits, DeviceState, Resident, RestoreError};
use ringfence_pviommu::wire::{
    Config, Devid, Gpa, MigrationStream, Status, StreamErrorKind, encode_map,
};
use ringfence_types::{AddressRange, Direction, Iova, IovaRange};

use crate::OutcomeHook;
use crate::pviommu::recorded::Recorded;

/// Outcomes that the corpus reaches: every reason to refuse a stream, except failures of the host.
pub const OUTCOMES: &[&str] = &[
    "restored",
    "restored empty",
    "not empty",
    "stream: Magic",
    "stream: Checksum",
    "stream: TooShort",
    "stream: TooLong",
    "stream: Direction",
    "stream: Range",
    "stream: Order",
    "refused: NoDevice",
    "refused: BadGiova",
    "refused: BadGpa",
    "refused: NoRoom",
];

/// Computes the CRC-32C of `docs/PVIOMMU.md` bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((flags, stream)) = data.split_first() else {
        return;
    };
    let mut stream = stream.to_vec();
    if flags & 1 != 0 {
        stream.extend(crc32c(&stream).to_le_bytes());
    }
    let window = IovaRange::new(Iova::new(0x1_0000), 1 << 20).expect("a window");
    let config = Config::new(window, 16, [0x10, 0x12]).expect("a configuration");
    let memory = AddressRange::new(Gpa::new(0), 1 << 20).expect("a range");
    let limits = BackendLimits {
        mappings: 8,
        leaves: 2,
    };
    let devices = [0x10, 0x12].map(Devid::new);
    let backing = Resident::new(vec![memory]);
    let mut backend = Backend::new(config, limits, backing, Recorded::default());
    let mut before = 0;
    if flags & 2 != 0 {
        let mut request = Vec::new();
        let page = [(window.start(), Gpa::new(0))].into_iter();
        encode_map(&mut request, devices[0], Direction::ToDevice, page).expect("a page");
        assert_eq!(backend.handle(&request), Status::Ok);
        before = 1;
    }
    let outcome = backend.restore(&stream);
    let mapped = backend.tables().0.len();
    match outcome {
        Ok(()) => {
            let pages = |bytes: &[u8]| -> Vec<_> {
                let stream = MigrationStream::decode(bytes).expect("taken");
                let records = stream.records().flat_map(|record| {
                    let of = (record.device, record.direction);
                    record.pairs().map(|pair| (of, pair)).collect::<Vec<_>>()
                });
                records.collect()
            };
            let again = backend
                .export(|_| DeviceState::Transferred)
                .expect("in order");
            assert_eq!(pages(&again), pages(&stream));
            assert_eq!(mapped, pages(&stream).len());
            reached(if mapped == 0 {
                "restored empty"
            } else {
                "restored"
            });
        }
        Err(error) => {
            assert_eq!(mapped, before, "refused in part");
            reached(match error {
                RestoreError::NotEmpty(_) => "not empty",
                RestoreError::Stream(error) => match error.kind {
                    StreamErrorKind::Magic => "stream: Magic",
                    StreamErrorKind::Checksum { .. } => "stream: Checksum",
                    StreamErrorKind::TooShort => "stream: TooShort",
                    StreamErrorKind::TooLong => "stream: TooLong",
                    StreamErrorKind::Direction(_) => "stream: Direction",
                    StreamErrorKind::Range => "stream: Range",
                    StreamErrorKind::Order => "stream: Order",
                },
                RestoreError::Refused { status, .. } => match status {
                    Status::NoDevice => "refused: NoDevice",
                    Status::BadGiova => "refused: BadGiova",
                    Status::BadGpa => "refused: BadGpa",
                    Status::NoRoom => "refused: NoRoom",
                    status => panic!("refused with {status}"),
                },
            });
        }
    }
}
