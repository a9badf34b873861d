//! Any message that a client may encode decodes to its fields, and no bytes make the parser panic
//! or keep more than one message.

use std::fs::File;
use std::os::fd::OwnedFd;

use proptest::prelude::*;
use ringfence_types::{Iova, IovaRange};
use ringfence_vfio_user::{
    FramingError, HEADER_BYTES, Header, Inbox, IrqAction, IrqData, MAX_DATA_BYTES, MAX_FDS,
    MAX_MESSAGE_BYTES, Message, ReceivedFds, RequestError, VfioUserCommand, VfioUserRequest, errno,
};

/// Encodes a message as a client does.
fn encode(id: u16, command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = [id.to_le_bytes(), command.to_le_bytes()].concat();
    bytes.extend(((HEADER_BYTES + body.len()) as u32).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn descriptors(count: usize) -> Vec<OwnedFd> {
    let open = |_| OwnedFd::from(File::open("/dev/null").unwrap());
    (0..count).map(open).collect()
}

/// Feeds a whole message in one piece.
fn message(command: VfioUserCommand, body: &[u8], fds: usize) -> Message {
    let bytes = encode(7, command as u16, 0, body);
    let fed = Inbox::default().feed(&bytes, descriptors(fds), ReceivedFds::All);
    fed.unwrap().unwrap()
}

fn parse(
    command: VfioUserCommand,
    body: &[u8],
    fds: usize,
) -> Result<VfioUserRequest, RequestError> {
    VfioUserRequest::parse(message(command, body, fds))
}

proptest! {
    /// The reply repeats the identifier and the command, and has the type, size and error number.
    #[test]
    fn headers_and_their_replies(
        id: u16,
        command: u16,
        no_reply: bool,
        body in prop::collection::vec(any::<u8>(), 0..64),
        error in 1_u32..200,
    ) {
        let bytes = encode(id, command, u32::from(no_reply) << 4, &body);
        let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        let size = HEADER_BYTES + body.len();
        prop_assert_eq!(header, Header { id, command, size, no_reply });
        // A reply is a message with type 1 in place of 0; an error sets bit 5 and has no body.
        prop_assert_eq!(header.reply(&body), encode(id, command, 1, &body));
        let mut refused = encode(id, command, 0x21, &[]);
        refused[12..16].copy_from_slice(&error.to_le_bytes());
        prop_assert_eq!(header.error_reply(error), refused);
    }

    #[test]
    fn dma_requests(start: u64, size: u64, offset: u64, rights in 0_u32..4, has_file: bool) {
        let body = [words(&[32, rights]), longs(&[offset, start, size])].concat();
        let parsed = parse(VfioUserCommand::DmaMap, &body, usize::from(has_file));
        let unmapped = [words(&[24, 0]), longs(&[start, size])].concat();
        let unmapped = parse(VfioUserCommand::DmaUnmap, &unmapped, 0);
        let Some(expected) = IovaRange::new(Iova::new(start), size) else {
            prop_assert!(matches!(parsed, Err(RequestError::Range { .. })), "map");
            prop_assert!(matches!(unmapped, Err(RequestError::Range { .. })), "unmap");
            return Ok(());
        };
        match parsed {
            Ok(VfioUserRequest::DmaMap { range, readable, writable, offset: at, file }) => {
                prop_assert_eq!((range, at, file.is_some()), (expected, offset, has_file));
                prop_assert_eq!((readable, writable), (rights & 1 != 0, rights & 2 != 0));
            }
            other => prop_assert!(false, "{:?}", other),
        }
        match unmapped {
            Ok(VfioUserRequest::DmaUnmap { range, flags: 0 }) => {
                prop_assert_eq!(range, Some(expected));
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn region_accesses(region: u32, offset: u64, count in 0..=MAX_DATA_BYTES + 1, byte: u8) {
        let fixed = [longs(&[offset]), words(&[region, count])].concat();
        let data = vec![byte; count as usize];
        let read = parse(VfioUserCommand::RegionRead, &fixed, 0);
        let write = parse(VfioUserCommand::RegionWrite, &[fixed, data.clone()].concat(), 0);
        if count > MAX_DATA_BYTES {
            prop_assert_eq!(read.unwrap_err(), RequestError::TooMuchData { count });
            prop_assert_eq!(write.unwrap_err().errno(), errno::E2BIG);
            return Ok(());
        }
        let read = format!("{:?}", read.unwrap());
        let wanted = VfioUserRequest::RegionRead { region, offset, count };
        prop_assert_eq!(read, format!("{wanted:?}"));
        let write = format!("{:?}", write.unwrap());
        let expected = VfioUserRequest::RegionWrite { region, offset, data };
        prop_assert_eq!(write, format!("{expected:?}"));
    }

    #[test]
    fn interrupt_requests(
        index: u32,
        start: u32,
        count in 0_u32..16,
        action in 0..3,
        kind in 0..3,
    ) {
        let flags = (1_u32 << kind) | (8_u32 << action);
        let fixed = words(&[20, flags, index, start, count]);
        let vectors = count as usize;
        let (data, fds) = match kind {
            1 => (vec![1; vectors], 0),
            2 => (Vec::new(), vectors),
            _ => (Vec::new(), 0),
        };
        let body = [fixed, data].concat();
        match parse(VfioUserCommand::DeviceSetIrqs, &body, fds) {
            Ok(VfioUserRequest::SetIrqs(request)) => {
                let asked = (request.index, request.start, request.count);
                prop_assert_eq!(asked, (index, start, count));
                let actions = [IrqAction::Mask, IrqAction::Unmask, IrqAction::Trigger];
                prop_assert_eq!(request.action, actions[action as usize]);
                let found = match request.data {
                    IrqData::None => (0, 0),
                    IrqData::Bools(bools) => (1, bools.len()),
                    IrqData::Events(events) => (2, events.len()),
                };
                prop_assert_eq!(found, (kind, if kind == 0 { 0 } else { vectors }));
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    /// Pieces of any length, descriptors with any of them, and any bytes in place of a body.
    #[test]
    fn hostile_streams_are_bounded(
        messages in prop::collection::vec(
            (0_u16..16, prop::collection::vec(any::<u8>(), 0..80), 0_usize..20, any::<bool>()),
            1..6,
        ),
        cuts in prop::collection::vec(1_usize..40, 1..8),
        garbage in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut inbox = Inbox::default();
        let mut cuts = cuts.iter().copied().cycle();
        for (command, body, fds, truncated) in &messages {
            let bytes = encode(1, *command, 0, body);
            let (mut rest, mut fds_left) = (&bytes[..], descriptors(*fds));
            let received = if *truncated { ReceivedFds::Truncated } else { ReceivedFds::All };
            let whole = loop {
                let most = inbox.bytes_wanted();
                prop_assert!((1..=rest.len()).contains(&most), "never past the message");
                let (piece, after) = rest.split_at(most.min(cuts.next().unwrap()));
                rest = after;
                if let Some(whole) = inbox.feed(piece, fds_left.drain(..), received).unwrap() {
                    break whole;
                }
            };
            prop_assert!(rest.is_empty());
            prop_assert_eq!(&whole.body, body);
            prop_assert_eq!(whole.fds.len(), (*fds).min(MAX_FDS));
            prop_assert_eq!(whole.too_many_fds, *truncated || *fds > MAX_FDS);
            let refused = whole.too_many_fds;
            let parsed = VfioUserRequest::parse(whole);
            if let Err(error) = &parsed {
                let listed = [errno::EINVAL, errno::ENOTSUP, errno::E2BIG];
                prop_assert!(listed.contains(&error.errno()));
            }
            prop_assert!(parsed.is_err() || !refused);
        }
        // A stream without any structure: it ends, or asks for a bounded number of bytes.
        let mut rest = &garbage[..];
        while !rest.is_empty() {
            let most = inbox.bytes_wanted();
            prop_assert!((1..=MAX_MESSAGE_BYTES).contains(&most));
            let (piece, after) = rest.split_at(most.min(rest.len()));
            rest = after;
            match inbox.feed(piece, [], ReceivedFds::All) {
                Ok(Some(whole)) => drop(VfioUserRequest::parse(whole)),
                Ok(None) => prop_assert!(inbox.part().0.len() < MAX_MESSAGE_BYTES),
                Err(_) => break,
            }
        }
    }
}

/// A size below the header or above the limit, and every type but a command, end the stream.
#[test]
fn invalid_headers() {
    let header = |size: u32, flags: u32| {
        let mut bytes = encode(1, 13, flags, &[]);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        Header::decode(bytes.first_chunk().unwrap())
    };
    let most = MAX_MESSAGE_BYTES as u32;
    assert_eq!(header(15, 0), Err(FramingError::Short { size: 15 }));
    assert_eq!(header(most, 0).unwrap().size, MAX_MESSAGE_BYTES);
    for size in [most + 1, u32::MAX] {
        assert_eq!(header(size, 0), Err(FramingError::Long { size }));
    }
    for flags in 1..16 {
        assert_eq!(header(16, flags), Err(FramingError::NotACommand { flags }));
    }
}

/// `VFIO_DMA_UNMAP_FLAG_ALL` is bit 1, and needs an empty range. No other flag is accepted.
#[test]
fn unmap_flags() {
    let unmap = |flags, start, size| {
        let body = [words(&[24, flags]), longs(&[start, size])].concat();
        parse(VfioUserCommand::DmaUnmap, &body, 0)
    };
    match unmap(1 << 1, 0, 0) {
        Ok(VfioUserRequest::DmaUnmap {
            range: None,
            flags: 2,
        }) => {}
        other => panic!("{other:?}"),
    }
    for (start, size) in [(0, 4096), (4096, 0)] {
        let error = unmap(1 << 1, start, size).unwrap_err();
        assert!(matches!(error, RequestError::Range { .. }), "{error}");
    }
    for flags in [1, 3, 4, u32::MAX] {
        let error = unmap(flags, 0, 0).unwrap_err();
        assert!(matches!(error, RequestError::Flags { .. }), "{error}");
    }
}

/// Every number has one command, and no other number has any.
#[test]
fn command_numbers() {
    for number in 0..=u16::MAX {
        let command = VfioUserCommand::from_number(number);
        assert_eq!(
            command.map(|command| command as u16).unwrap_or(number),
            number
        );
        assert_eq!(command.is_some(), (1..=13).contains(&number), "{number}");
    }
}
