//! The disk, with a scripted driver: against a model, and with requests that no driver makes.

use proptest::prelude::*;
use ringfence_live::dma_fault_injection::{InjectedDma, KEPT_READS};
use ringfence_live::limits::{BoundedLog, GuestLimits};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::delayed::Delayed;
use ringfence_live::virtio::{DmaInjector, QUANTUM_BYTES};

use crate::rig::*;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;
const DATA: u64 = 0x1_0000;

const IN: u32 = 0;
const OUT: u32 = 1;

/// Makes a request with header, one data descriptor and status. Returns the status byte and the
/// used length.
fn ask(client: &mut Disk, count: u16, kind: u32, sector: u64, bytes: u32) -> (u8, u32) {
    client.poke(HEADER, &request(kind, sector));
    client.poke(STATUS, &[0xee]);
    client.descriptor(0, HEADER, 16, NEXT, 1);
    let flags = if kind == OUT { NEXT } else { NEXT | WRITE };
    client.descriptor(1, DATA, bytes, flags, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    client.offer(0, count);
    let (used, length) = client.used();
    assert_eq!(used, count, "it is returned");
    (client.peek(STATUS, 1)[0], length)
}

type Disk = Client<ringfence_live::virtio::blk::Blk, ringfence_live::dma::Direct>;

#[test]
fn configuration_has_the_capacity() {
    let mut client = ready();
    assert_eq!(client.register(0x2000, 8), DISK_SECTORS);
    assert_eq!(client.register(0x200c, 4), 254, "segments");
    client.set(0x2000, &[9; 8]);
    assert_eq!(client.register(0x2000, 8), DISK_SECTORS);
}

#[test]
fn kinds_of_request() {
    let mut client = ready();
    client.begin(1 << 9);
    let mut count = 0;
    let mut ask = |kind, sector, bytes| {
        count += 1;
        ask(&mut client, count, kind, sector, bytes)
    };
    assert_eq!(ask(IN, 0, 512), (0, 513));
    assert_eq!(ask(OUT, 0, 512), (0, 1));
    assert_eq!(ask(IN, DISK_SECTORS - 1, 512), (0, 513));
    assert_eq!(ask(IN, DISK_SECTORS - 1, 1024), (1, 1), "past the end");
    assert_eq!(ask(IN, DISK_SECTORS, 512).0, 1);
    assert_eq!(ask(IN, u64::MAX, 512).0, 1);
    assert_eq!(ask(OUT, u64::MAX / 512, 512).0, 1);
    assert_eq!(ask(IN, 0, 511).0, 1, "no whole sector");
    assert_eq!(ask(IN, 0, 0).0, 0, "nothing is a whole number of sectors");
    assert_eq!(ask(8, 0, 20), (0, 21), "identity");
    assert_eq!(ask(8, 0, 19).0, 1);
    assert_eq!(ask(13, 0, 512).0, 2, "unsupported");
    assert_eq!(ask(u32::MAX, 0, 512).0, 2);
    assert_eq!(&client.peek(DATA, 9), b"ringfence");
    assert_eq!(client.counters.requests.get(), 13);
}

#[test]
fn limits_of_one_request() {
    let counters: std::sync::Arc<ringfence_live::counters::DeviceCounters> =
        std::sync::Arc::default();
    let file = disk_file();
    let mut disk =
        ringfence_live::virtio::blk::Blk::new(file, false, std::sync::Arc::clone(&counters))
            .unwrap();
    let caps = GuestLimits {
        request_bytes: 8192,
        queue_size: 64,
        ..GuestLimits::default()
    };
    let (sender, words) = std::sync::mpsc::channel();
    disk.set_limits(
        &caps,
        BoundedLog::new(move |refused| sender.send(refused.to_string()).unwrap()),
    );
    let direct = ringfence_live::dma::Direct::default();
    let mut client = Client::new(disk, direct, false, counters);
    client.agree();
    client.share_memory();
    assert_eq!(client.register(0x18, 2), 64, "so much is offered");
    client.begin(1 << 9);
    // The status byte does not count as data.
    assert_eq!(ask(&mut client, 1, IN, 0, 8192).0, 0);
    assert_eq!(ask(&mut client, 2, IN, 0, 8704).0, 1);
    assert_eq!(ask(&mut client, 3, OUT, 0, 8704).0, 1);
    assert_eq!(ask(&mut client, 4, IN, 0, 512).0, 0);
    let said: Vec<String> = words.try_iter().collect();
    assert_eq!(
        said,
        ["a request of 8704 bytes exceeds the limit of 8192"; 2]
    );
}

/// A turn is limited in bytes. The device completes the rest in later turns, without a doorbell.
#[test]
fn a_turn_is_bounded_by_bytes() {
    let mut client = ready();
    client.begin(1 << 9);
    const BYTES: u32 = 128 << 10;
    client.poke(HEADER, &request(IN, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, DATA, BYTES, NEXT | WRITE, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    // Ring once for all of them.
    for slot in 0..15_u64 {
        client.poke(QUEUE + 0x1000 + 4 + 2 * slot, &[0, 0]);
    }
    client.offer(0, 15);
    let first = QUANTUM_BYTES.div_ceil(u64::from(BYTES)) as u16;
    assert_eq!(client.used(), (first, BYTES + 1));
    assert!(client.session.function().unfinished());
    client.session.function().continue_work();
    assert_eq!(client.used().0, 15);
    client.session.function().continue_work();
    assert!(!client.session.function().unfinished());
}

/// The injected reads follow the turn that sends the interrupt. They are those of a write's data,
/// are bounded, and end at the first one that is stopped.
#[test]
fn a_disk_keeps_reading_after_the_interrupt() {
    let mut client = fresh();
    let counters = std::sync::Arc::clone(&client.counters);
    let classes = [InjectedDma::KeepReading];
    let injector = DmaInjector::new(&classes, None, |_| (), std::sync::Arc::clone(&counters));
    client.session.function().device().inject_dma(injector);
    client.agree();
    client.share_memory();
    client.begin(1 << 9);
    let counted = || (counters.kept_reads.get(), counters.kept_reads_changed.get());
    let all = u64::from(KEPT_READS);
    let cases = [
        ("a read", IN, true, false, (0, 0)),
        ("a write", OUT, true, false, (all, 0)),
        ("a write whose data changes", OUT, true, true, (all, all)),
        ("a write whose data is unmapped", OUT, false, false, (0, 0)),
    ];
    let mut expected = (0, 0);
    for (count, (name, kind, mapped, changes, more)) in (1..).zip(cases) {
        client.poke(DATA, &[0x11; 512]);
        assert_eq!(ask(&mut client, count, kind, 0, 512).0, 0, "{name}");
        assert_eq!(counted(), expected, "{name}: before the interrupt");
        assert_eq!(client.session.function().unfinished(), kind == OUT);
        if changes {
            client.poke(DATA + 7, &[0x12]);
        }
        if !mapped {
            client.unmap(0, RAM_BYTES, 0);
            assert_eq!(client.map(0, DATA, 0, 3).errno, 0);
        }
        client.session.function().continue_work();
        expected = (expected.0 + more.0, expected.1 + more.1);
        assert_eq!(counted(), expected, "{name}");
        assert!(!client.session.function().unfinished(), "{name}");
    }
}

/// A delayed disk does nothing at a doorbell, and serves all requests when the delay is over. A
/// reset discards the doorbell.
#[test]
fn a_late_disk_waits() {
    let counters: std::sync::Arc<ringfence_live::counters::DeviceCounters> =
        std::sync::Arc::default();
    let disk =
        ringfence_live::virtio::blk::Blk::new(disk_file(), false, std::sync::Arc::clone(&counters));
    let late = Delayed::new(disk.unwrap(), std::time::Duration::from_secs(3600)).unwrap();
    let mut client = Client::new(
        late,
        ringfence_live::dma::Direct::default(),
        false,
        counters,
    );
    client.agree();
    client.share_memory();
    client.begin(1 << 9);
    client.poke(HEADER, &request(IN, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, DATA, 512, NEXT | WRITE, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    for slot in 0..4_u64 {
        client.poke(QUEUE + 0x1000 + 4 + 2 * slot, &[0, 0]);
    }
    assert!(client.session.function().waits_for().is_none());
    for offered in [1, 2] {
        client.offer(0, offered);
        assert_eq!(client.used().0, 0);
        assert!(client.session.function().waits_for().is_some());
    }
    client.session.function().on_ready();
    assert_eq!(client.used(), (2, 513));
    assert!(client.session.function().waits_for().is_none());
    client.offer(0, 3);
    assert_eq!(client.used().0, 2, "late again");
    client.set(0x14, &[0]);
    assert!(client.session.function().waits_for().is_none());
}

#[test]
fn a_read_only_disk_is_not_written() {
    let counters = std::sync::Arc::default();
    let disk =
        ringfence_live::virtio::blk::Blk::new(disk_file(), true, std::sync::Arc::clone(&counters))
            .unwrap();
    let mut client = Client::new(
        disk,
        ringfence_live::dma::Direct::default(),
        false,
        counters,
    );
    client.agree();
    client.share_memory();
    assert_eq!(client.register(0x04, 4) & 1 << 5, 1 << 5, "it says so");
    client.begin(0);
    let before = {
        ask(&mut client, 1, IN, 3, 512);
        client.peek(DATA, 512)
    };
    client.poke(DATA, &[0xaa; 512]);
    assert_eq!(ask(&mut client, 2, OUT, 3, 512).0, 1);
    ask(&mut client, 3, IN, 3, 512);
    assert_eq!(client.peek(DATA, 512), before);
}

#[test]
fn buffers_outside_memory_fail_their_request_only() {
    let mut client = ready();
    client.begin(0);
    for (at, data) in [RAM_BYTES, RAM_BYTES - 100, u64::MAX - 511, u64::MAX]
        .into_iter()
        .enumerate()
    {
        let count = at as u16 + 1;
        client.poke(HEADER, &request(IN, 0));
        client.poke(STATUS, &[0xee]);
        client.descriptor(0, HEADER, 16, NEXT, 1);
        client.descriptor(1, data, 512, NEXT | WRITE, 2);
        client.descriptor(2, STATUS, 1, WRITE, 0);
        client.offer(0, count);
        assert_eq!(client.used(), (count, 1), "data at {data:#x}");
        assert_eq!(client.peek(STATUS, 1), [1]);
    }
    // The status buffer is not writable: the device returns the chain with length 0, and counts it.
    client.descriptor(2, RAM_BYTES, 1, WRITE, 0);
    client.descriptor(1, DATA, 512, NEXT | WRITE, 2);
    client.offer(0, 5);
    assert_eq!(client.used(), (5, 0));
    assert_eq!(client.counters.malformed.get(), 1);
    assert_eq!(ask(&mut client, 6, IN, 0, 512), (0, 513));
}

proptest! {
    /// Compares reads and writes in scattered pieces with an array of bytes.
    #[test]
    fn disk_keeps_written_data(
        operations in prop::collection::vec(
            (
                any::<bool>(),
                0u64..DISK_SECTORS,
                prop::collection::vec(1u32..4, 1..5),
                any::<u8>(),
            ),
            1..40,
        ),
        flush in any::<bool>(),
    ) {
        let mut client = ready();
        client.begin(if flush { 1 << 9 } else { 0 });
        let mut model: Vec<u8> = (0..DISK_SECTORS * 512).map(|i| (i / 7) as u8).collect();
        for (count, (write, sector, pieces, fill)) in (1u16..).zip(operations) {
            client.poke(HEADER, &request(if write { OUT } else { IN }, sector));
            client.descriptor(0, HEADER, 16, NEXT, 1);
            let mut at = DATA;
            let mut index = 1;
            let mut buffers = Vec::new();
            for sectors in &pieces {
                let bytes = sectors * 512;
                client.descriptor(
                    index,
                    at,
                    bytes,
                    NEXT | if write { 0 } else { WRITE },
                    index + 1,
                );
                client.poke(at, &vec![fill ^ index as u8; bytes as usize]);
                buffers.push((at, bytes as usize));
                // Leave gaps between the pieces.
                at += u64::from(bytes) + 64;
                index += 1;
            }
            client.descriptor(index, STATUS, 1, WRITE, 0);
            let total: usize = buffers.iter().map(|(_, bytes)| bytes).sum();
            let start = sector as usize * 512;
            let fits = start + total <= model.len();
            let contents: Vec<u8> = buffers
                .iter()
                .flat_map(|(at, bytes)| client.peek(*at, *bytes))
                .collect();
            client.offer(0, count);
            prop_assert_eq!(client.used().0, count);
            prop_assert_eq!(client.peek(STATUS, 1)[0], u8::from(!fits));
            if fits && write {
                model[start..start + total].copy_from_slice(&contents);
            } else if fits {
                let read: Vec<u8> = buffers
                    .iter()
                    .flat_map(|(at, bytes)| client.peek(*at, *bytes))
                    .collect();
                prop_assert_eq!(&read[..], &model[start..start + total]);
            }
        }
    }
}
