//! FrontEnd-ends that do not answer, do not read, or invalidate translations as fast as they send
//! them.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringfence_softiommu::iotlb::Message as Iotlb;
use ringfence_types::{Iova, IovaRange};

use super::front_end::*;

/// Each update invalidates the previous translation, so an access to two pages never finds both.
/// The device gives the access up.
#[test]
fn unstable_translation_fails_only_the_request() {
    let mut front_end = FrontEnd::new("never-stays", &[]);
    front_end.start(0);
    // The buffer spans two pages, and ends in the status page.
    front_end.offer(3, 8192);
    let mut told = 0;
    while front_end.wait() {
        let (iova, required) = front_end.next_miss();
        let page = iova.get() / PAGE;
        if [DATA.0 / PAGE, STATUS.0 / PAGE].contains(&page) {
            told += 1;
            assert!(told < 10_000, "it asks for ever");
            let other = IovaRange::new(Iova::new(DATA.0 + STATUS.0 - page * PAGE), PAGE);
            let taken = Iotlb::Invalidate(other).encode();
            assert!(front_end.done(IOTLB, &taken, &[]));
        }
        front_end.answer((iova, required));
    }
    assert_eq!(front_end.peek(STATUS, 0, 1), [1], "an I/O error");
    assert_eq!(front_end.counters.faults.get(), 1);
    // The next request is served normally.
    let _ = rustix::io::read(&front_end.call, &mut [0; 8]);
    front_end.offer(3, 4096);
    front_end.serve();
    assert_eq!(front_end.peek(STATUS, 0, 1), [0]);
}

/// A front-end cannot fill the log: the log has the first messages, and notes that more are only
/// counted.
#[test]
fn log_of_a_front_end_is_bounded() {
    let mut front_end = FrontEnd::new("said", &[]);
    for _ in 0..1000 {
        assert!(!front_end.done(SET_VRING_NUM, &halves(&[1, 8]), &[]));
    }
    assert_eq!(front_end.counters.refused.get(), 1000);
    let log = front_end.log();
    let refused: Vec<&String> = log
        .iter()
        .filter(|line| line.starts_with("refused"))
        .collect();
    assert_eq!(refused.len(), 64);
    assert!(
        refused[63].contains("further messages are only counted"),
        "{refused:?}"
    );
}

/// Two back-ends in one process: one serves its guest while the other receives hostile messages.
#[test]
fn another_device_does_not_notice() {
    let mut other = FrontEnd::new("other", &[]);
    other.start(0);
    for round in 0..8_u64 {
        let hostile = FrontEnd::new(&format!("hostile{round}"), &[]);
        let mut main = &hostile.main;
        match round {
            // Half a message.
            0 => main
                .write_all(&frame(SET_FEATURES, 0, &[0; 8])[..15])
                .unwrap(),
            // A message that is too long.
            1 => main
                .write_all(&halves(&[SET_FEATURES, 1, 1 << 20]))
                .unwrap(),
            // Another protocol.
            2 => main.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap(),
            // Descriptors that belong to no request.
            3 => hostile.send(GET_FEATURES, &[], &[hostile.kick.as_fd(); 8]),
            // A reply without a request.
            4 => (&hostile.channel).write_all(&frame(1, 4, &[0; 8])).unwrap(),
            // Malformed data on the back-end channel.
            5 => (&hostile.channel).write_all(&[0xff; 64]).unwrap(),
            // The channel closes without data.
            6 => hostile.channel.shutdown(std::net::Shutdown::Both).unwrap(),
            _ => main.shutdown(std::net::Shutdown::Write).unwrap(),
        }
        other.offer(round, 4096);
        other.serve();
        assert_eq!(other.peek(STATUS, 0, 1), [0]);
        assert_eq!(other.peek(DATA, 0, 4096), content(round, 4096));
        // The back-end closes each connection. A front-end that sent half a message may complete it
        // or disconnect.
        if round == 0 {
            main.shutdown(std::net::Shutdown::Both).unwrap();
        }
        assert!(!matches!(main.read(&mut [0; 64]), Ok(1..)), "{round}");
        let mut next = UnixStream::connect(&hostile.path).unwrap();
        next.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        next.write_all(&frame(GET_FEATURES, 0, &[])).unwrap();
        next.read_exact(&mut [0; 20]).unwrap();
        let log = hostile.log();
        let said = |text: &str| log.iter().any(|line| line.starts_with(text));
        assert_eq!(
            said("closed: "),
            [1, 2].contains(&round),
            "{round}: {log:?}"
        );
        assert_eq!(
            said("refused: "),
            (3..=5).contains(&round),
            "{round}: {log:?}"
        );
        assert!(said("Disconnected"), "{round}: {log:?}");
    }
}
