//! Messages that no correct client sends. Each gets an error reply or closes the stream, and the
//! next correct message is served.

use std::os::fd::{AsFd, OwnedFd};

use proptest::prelude::*;
use ringfence_vfio_user::{FramingError, HEADER_BYTES, Inbox, ReceivedFds};

use crate::rig::*;

const EINVAL: u32 = 22;
const ENOTSUP: u32 = 95;
const E2BIG: u32 = 7;

fn fds(count: usize) -> Vec<OwnedFd> {
    let file = sealed(4096);
    (0..count)
        .map(|_| file.as_fd().try_clone_to_owned().unwrap())
        .collect()
}

#[test]
fn every_malformed_request_has_its_error_and_costs_nothing_else() {
    let map = |flags, offset, start, bytes| {
        [words(&[32, flags]), longs(&[offset, start, bytes])].concat()
    };
    let unmap = |flags, start, bytes| [words(&[24, flags]), longs(&[start, bytes])].concat();
    let irqs = |flags, index, start, count| words(&[20, flags, index, start, count]);
    let region = |offset, region, count| [longs(&[offset]), words(&[region, count])].concat();
    let cases: Vec<(&str, u16, Vec<u8>, usize, u32)> = vec![
        ("no command", 0, vec![], 0, ENOTSUP),
        ("unknown command", 77, vec![], 0, ENOTSUP),
        ("region fds", 6, words(&[0; 4]), 0, ENOTSUP),
        ("DMA read by the client", 11, longs(&[0, 0]), 0, ENOTSUP),
        ("DMA write by the client", 12, longs(&[0, 0]), 0, ENOTSUP),
        ("dirty pages", 14, vec![], 0, ENOTSUP),
        ("multiple writes", 15, longs(&[0]), 0, ENOTSUP),
        ("version again", VERSION, b"\0\0\0\0".to_vec(), 0, EINVAL),
        ("short version", VERSION, vec![0; 3], 0, EINVAL),
        ("map short", DMA_MAP, vec![0; 31], 1, EINVAL),
        ("map long", DMA_MAP, vec![0; 33], 1, EINVAL),
        ("map nothing", DMA_MAP, map(3, 0, 0x20_0000, 0), 1, EINVAL),
        (
            "map past the end",
            DMA_MAP,
            map(3, 0, u64::MAX - 10, 4096),
            1,
            EINVAL,
        ),
        ("map everything", DMA_MAP, map(3, 0, 0, u64::MAX), 1, 17),
        (
            "map far, too much",
            DMA_MAP,
            map(3, 0, 1 << 40, 1 << 62),
            1,
            EINVAL,
        ),
        (
            "map unknown flags",
            DMA_MAP,
            map(8, 0, 0x20_0000, 4096),
            1,
            EINVAL,
        ),
        (
            "map two fds",
            DMA_MAP,
            map(3, 0, 0x20_0000, 4096),
            2,
            EINVAL,
        ),
        (
            "map over",
            DMA_MAP,
            map(3, 0, RAM_BYTES - 4096, 8192),
            1,
            17,
        ),
        (
            "map beyond the file",
            DMA_MAP,
            map(3, 4096, 0x20_0000, 4096),
            1,
            EINVAL,
        ),
        (
            "map at no page",
            DMA_MAP,
            map(3, 3, 0x20_0000, 1024),
            1,
            EINVAL,
        ),
        (
            "map offset wraps",
            DMA_MAP,
            map(3, u64::MAX, 0x20_0000, 4096),
            1,
            EINVAL,
        ),
        ("unmap short", DMA_UNMAP, vec![0; 23], 0, EINVAL),
        (
            "unmap with fd",
            DMA_UNMAP,
            unmap(0, 0, RAM_BYTES),
            1,
            EINVAL,
        ),
        ("unmap a part", DMA_UNMAP, unmap(0, 0, 4096), 0, EINVAL),
        (
            "unmap past the end",
            DMA_UNMAP,
            unmap(0, 4096, u64::MAX),
            0,
            EINVAL,
        ),
        (
            "unmap nothing there",
            DMA_UNMAP,
            unmap(0, 1 << 40, 4096),
            0,
            2,
        ),
        ("unmap dirty", DMA_UNMAP, unmap(1, 0, RAM_BYTES), 0, EINVAL),
        (
            "unmap all of a range",
            DMA_UNMAP,
            unmap(2, 0, RAM_BYTES),
            0,
            EINVAL,
        ),
        ("info short", GET_INFO, vec![0; 15], 0, EINVAL),
        ("info with fd", GET_INFO, vec![0; 16], 1, EINVAL),
        ("region info short", GET_REGION_INFO, vec![0; 8], 0, EINVAL),
        ("region 9", GET_REGION_INFO, region_info(9), 0, EINVAL),
        (
            "region 2^32-1",
            GET_REGION_INFO,
            region_info(u32::MAX),
            0,
            EINVAL,
        ),
        ("irq kind 5", GET_IRQ_INFO, words(&[16, 0, 5, 0]), 0, EINVAL),
        ("irqs short", SET_IRQS, vec![0; 19], 0, EINVAL),
        ("irqs no action", SET_IRQS, irqs(1, 2, 0, 1), 0, EINVAL),
        (
            "irqs two actions",
            SET_IRQS,
            irqs(1 | 8 | 32, 2, 0, 1),
            0,
            EINVAL,
        ),
        (
            "irqs two kinds of data",
            SET_IRQS,
            irqs(1 | 2 | 32, 2, 0, 0),
            0,
            EINVAL,
        ),
        ("irqs beyond", SET_IRQS, irqs(1 | 32, 2, 1, 2), 0, EINVAL),
        (
            "irqs wrap",
            SET_IRQS,
            irqs(1 | 32, 2, u32::MAX, u32::MAX),
            0,
            EINVAL,
        ),
        ("irqs masked", SET_IRQS, irqs(1 | 8, 2, 0, 1), 0, ENOTSUP),
        (
            "irqs fds missing",
            SET_IRQS,
            irqs(4 | 32, 2, 0, 2),
            1,
            EINVAL,
        ),
        ("irqs fds extra", SET_IRQS, irqs(4 | 32, 2, 0, 1), 2, EINVAL),
        (
            "irqs no eventfd",
            SET_IRQS,
            irqs(4 | 32, 2, 0, 1),
            1,
            EINVAL,
        ),
        (
            "irqs fds without use",
            SET_IRQS,
            irqs(1 | 32, 2, 0, 1),
            1,
            EINVAL,
        ),
        (
            "irqs bools missing",
            SET_IRQS,
            irqs(2 | 32, 2, 0, 1),
            0,
            EINVAL,
        ),
        ("INTx", SET_IRQS, irqs(1 | 32, 0, 0, 1), 0, EINVAL),
        (
            "read past the BAR",
            REGION_READ,
            region(0x7ffd, 0, 4),
            0,
            EINVAL,
        ),
        (
            "read offset 2^64-1",
            REGION_READ,
            region(u64::MAX, 0, 4),
            0,
            EINVAL,
        ),
        ("read of region 1", REGION_READ, region(0, 1, 4), 0, EINVAL),
        (
            "read of region 2^32-1",
            REGION_READ,
            region(0, u32::MAX, 4),
            0,
            EINVAL,
        ),
        ("read too much", REGION_READ, region(0, 0, 4097), 0, E2BIG),
        ("read 4 GiB", REGION_READ, region(0, 0, u32::MAX), 0, E2BIG),
        (
            "read config past its end",
            REGION_READ,
            region(255, 7, 2),
            0,
            EINVAL,
        ),
        (
            "write count too small",
            REGION_WRITE,
            [region(0, 0, 1), vec![0; 2]].concat(),
            0,
            EINVAL,
        ),
        (
            "write count too large",
            REGION_WRITE,
            [region(0, 0, 4), vec![0; 2]].concat(),
            0,
            EINVAL,
        ),
        (
            "write with fd",
            REGION_WRITE,
            [region(0, 0, 1), vec![0]].concat(),
            1,
            EINVAL,
        ),
        ("reset with a body", RESET, vec![0], 0, EINVAL),
    ];
    let mut client = ready();
    for (name, command, body, count, errno) in cases {
        assert_eq!(
            client.send_with(command, &body, fds(count)).errno,
            errno,
            "{name}"
        );
        // The session continues, and the mappings are unchanged.
        assert_eq!(client.config(0, 2), 0x1af4u16.to_le_bytes(), "{name}");
        assert_eq!(client.map(0, 4096, 0, 3).errno, 17, "{name}");
    }
    assert_eq!(client.unmap(0, RAM_BYTES, 0).errno, 0);
}

fn region_info(index: u32) -> Vec<u8> {
    words(&[32, 0, index, 0, 0, 0, 0, 0])
}

#[test]
fn nothing_is_served_before_the_version() {
    let mut client = fresh();
    assert_eq!(client.send(GET_INFO, &[0; 16]).errno, EINVAL);
    assert_eq!(client.map(0, RAM_BYTES, 0, 3).errno, EINVAL);
    assert_eq!(client.send(VERSION, &[1, 0, 0, 0]).errno, EINVAL, "major 1");
    assert_eq!(client.send(GET_INFO, &[0; 16]).errno, EINVAL);
    client.agree();
    assert_eq!(client.send(GET_INFO, &[0; 16]).body, words(&[16, 3, 9, 5]));
}

#[test]
fn no_reply_means_none_even_to_an_error() {
    let mut client = ready();
    for command in [REGION_READ, 99] {
        let bytes = encode(7, command, 0x10, &[0; 16]);
        let mut inbox = Inbox::default();
        let message = inbox.feed(&bytes, [], ReceivedFds::All).unwrap().unwrap();
        assert!(client.session.handle(message).reply.is_none());
    }
}

#[test]
fn streams_that_cannot_be_followed_are_given_up() {
    let framed = |size: u32, flags: u32| {
        let mut bytes = encode(7, GET_INFO, flags, &[]);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        Inbox::default()
            .feed(&bytes, [], ReceivedFds::All)
            .map(|_| ())
    };
    assert_eq!(framed(16, 0), Ok(()));
    for size in [0, 1, 15] {
        assert_eq!(framed(size, 0), Err(FramingError::Short { size }));
    }
    for size in [8193, u32::MAX] {
        assert_eq!(framed(size, 0), Err(FramingError::Long { size }));
    }
    for flags in [1, 2, 15, 0x21] {
        assert_eq!(framed(16, flags), Err(FramingError::NotACommand { flags }));
    }
}

#[test]
fn too_many_descriptors_are_closed_and_refused() {
    let mut client = ready();
    let bytes = encode(7, GET_INFO, 0, &[0; 16]);
    for (count, received) in [
        (17, ReceivedFds::All),
        (1, ReceivedFds::Truncated),
        (0, ReceivedFds::Truncated),
    ] {
        let mut inbox = Inbox::default();
        let message = inbox.feed(&bytes, fds(count), received).unwrap().unwrap();
        assert!(message.fds.len() <= 16);
        assert_eq!(reply(client.session.handle(message)).errno, EINVAL);
    }
    assert_eq!(client.send(GET_INFO, &[0; 16]).errno, 0);
}

proptest! {
    /// The assembler returns the same messages however the stream is cut. Each has the descriptors
    /// that came with its first byte.
    #[test]
    fn messages_come_out_however_they_are_cut(
        bodies in prop::collection::vec((0usize..300, 0usize..3), 1..8),
        cuts in prop::collection::vec(1usize..40, 1..200),
    ) {
        let mut inbox = Inbox::default();
        let mut cuts = cuts.into_iter().cycle();
        for (at, (body, descriptors)) in bodies.iter().enumerate() {
            let body = vec![at as u8; *body];
            let bytes = encode(at as u16, GET_INFO, 0, &body);
            let mut rest = &bytes[..];
            let mut given = fds(*descriptors);
            let message = loop {
                prop_assert!(
                    inbox.bytes_wanted() >= 1 && inbox.bytes_wanted() <= rest.len(),
                    "never past the message"
                );
                let cut = cuts.next().unwrap().min(inbox.bytes_wanted());
                let (now, later) = rest.split_at(cut);
                rest = later;
                if let Some(message) = inbox.feed(now, given.drain(..), ReceivedFds::All).unwrap() {
                    break message;
                }
            };
            prop_assert!(rest.is_empty());
            prop_assert_eq!(message.header.id, at as u16);
            prop_assert_eq!(message.header.size, HEADER_BYTES + body.len());
            prop_assert_eq!(message.body, body);
            prop_assert_eq!(message.fds.len(), *descriptors);
        }
    }

    /// Any message with any content gets one well-formed reply, and the session continues.
    #[test]
    fn every_message_gets_a_reply(
        messages in prop::collection::vec(
            (
                0u16..18,
                prop::collection::vec(any::<u8>(), 0..64),
                0usize..3,
            ),
            1..40,
        ),
    ) {
        let mut client = ready();
        for (command, body, descriptors) in messages {
            client.send_with(command, &body, fds(descriptors));
        }
        prop_assert_eq!(client.send(GET_INFO, &[0; 16]).errno, 0);
    }

    /// Any access to any register of a running disk: no panic, and the registers stay readable.
    #[test]
    fn any_register_takes_anything(
        accesses in prop::collection::vec(
            (
                any::<bool>(),
                0u64..0x40,
                prop::collection::vec(any::<u8>(), 1..9),
            ),
            1..100,
        ),
        config in prop::collection::vec(
            (0u64..256, prop::collection::vec(any::<u8>(), 1..9)),
            0..20,
        ),
    ) {
        let mut client = ready();
        client.begin(1 << 29);
        for (write, offset, data) in accesses {
            if write {
                client.write(0, offset, &data);
                client.ring(0);
            } else {
                client.read(0, offset, data.len() as u32);
            }
        }
        for (offset, data) in config {
            client.write(7, offset, &data);
            client.read(7, offset, data.len() as u32);
        }
        prop_assert_eq!(client.register(0x12, 2), 1, "one queue");
        prop_assert_eq!(client.config(0, 4), [0xf4, 0x1a, 0x42, 0x10]);
    }
}
