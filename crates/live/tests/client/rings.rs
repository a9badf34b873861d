//! Rings and descriptors that no driver makes. Each costs its request or the queue, never the
//! process.

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma};
use ringfence_live::iommu::VirtioIommu;
use ringfence_live::pviommu::PvIommu;
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::Device;
use ringfence_live::virtio::iommu::IommuDevice;
use ringfence_live::virtio::pviommu::PvIommuDevice;
use ringfence_live::virtio::rng::Rng;
use ringfence_types::RequesterId;

use crate::rig::*;

const HEADER: u64 = 0x8000;
const STATUS: u64 = 0x9000;

/// Address, bytes, flags, next.
type Descriptor = (u64, u32, u16, u16);

#[test]
fn queues_outside_memory_break() {
    for at in [
        RAM_BYTES,
        RAM_BYTES - 0x1000,
        1 << 40,
        !0xfff,
        (1 << 63) - 0x1000,
    ] {
        let mut client = ready();
        client.negotiate(0);
        // The parts follow `at`; some addresses wrap.
        client.set(0x16, &[0, 0]);
        for (register, part) in [(0x20, 0u64), (0x28, 0x1000), (0x30, 0x2000)] {
            client.set(register, &at.wrapping_add(part).to_le_bytes());
        }
        client.set(0x1c, &[1, 0]);
        client.set(0x14, &[15]);
        client.ring(0);
        let status = client.register(0x14, 1);
        assert_eq!(status & 64, 64, "{at:#x}: {status}");
    }
}

/// The ring's index is in memory, its entries are not. The queue breaks, and the device neither
/// waits nor retries.
#[test]
fn a_ring_that_memory_ends_in_breaks_the_queue() {
    fn ends<D: Device, A: Dma>(mut client: Client<D, A>) {
        client.agree();
        assert_eq!(client.map(0, 0x200b, 0, 3).errno, 0);
        client.negotiate(0);
        client.set(0x16, &[0, 0]);
        for (register, part) in [(0x20, 0u64), (0x28, 0x2000), (0x30, 0x1000)] {
            client.set(register, &part.to_le_bytes());
        }
        client.set(0x1c, &[1, 0]);
        client.set(0x14, &[15]);
        // Seven available heads, of which the first three are in memory.
        client.poke(0x2002, &7u16.to_le_bytes());
        client.ring(0);
        // The missing entry ends the work, at once or in a later turn.
        for _ in 0..3 {
            client.session.function().continue_work();
        }
        assert_eq!(client.register(0x14, 1) & 64, 64);
        assert!(!client.session.function().unfinished());
    }
    ends(fresh());
    let counters = Arc::new(DeviceCounters::default());
    let iommu = VirtioIommu::new(Arc::clone(&counters)).unwrap();
    let device = IommuDevice::new(iommu.clone(), Arc::clone(&counters));
    ends(Client::new(device, iommu.memory(), false, counters));
    let counters = Arc::new(DeviceCounters::default());
    let iommu = PvIommu::new(&[RequesterId::new(0x20)], Arc::clone(&counters)).unwrap();
    let device = PvIommuDevice::new(iommu.clone(), Arc::clone(&counters));
    ends(Client::new(device, iommu.memory(), false, counters));
    let counters = Arc::new(DeviceCounters::default());
    let rng = Rng::new(Arc::clone(&counters));
    ends(Client::new(rng, Direct::default(), false, counters));
}

#[test]
fn loops_and_nested_tables_end() {
    let table = 0xa000;
    let cases: [(&str, &[Descriptor]); 7] = [
        (
            "a loop",
            &[(HEADER, 16, NEXT, 1), (STATUS, 1, NEXT | WRITE, 0)],
        ),
        ("itself", &[(HEADER, 16, NEXT, 0)]),
        ("out of the table", &[(HEADER, 16, NEXT, 999)]),
        ("nested tables", &[(table, 32, INDIRECT, 0)]),
        ("a table of no descriptor", &[(table, 0, INDIRECT, 0)]),
        ("half a descriptor", &[(table, 24, INDIRECT, 0)]),
        ("a table of 4 GiB", &[(table, !15, INDIRECT, 0)]),
    ];
    for (name, chain) in cases {
        let mut client = ready();
        client.begin(1 << 28);
        client.poke(HEADER, &request(0, 0));
        // The first descriptor of the indirect table refers to a table again.
        client.poke(table, &descriptor(table, 32, INDIRECT, 0));
        for (index, (at, bytes, flags, next)) in (0..).zip(chain) {
            client.descriptor(index, *at, *bytes, *flags, *next);
        }
        client.offer(0, 1);
        assert_eq!(client.used().0, 1, "{name}: returned");
        assert_eq!(client.register(0x14, 1), 15, "{name}: the device goes on");
        client.poke(HEADER, &request(4, 0));
        client.descriptor(0, HEADER, 16, NEXT, 1);
        client.descriptor(1, STATUS, 1, WRITE, 0);
        client.offer(0, 2);
        assert_eq!(
            (client.used(), client.peek(STATUS, 1)),
            ((2, 1), vec![0]),
            "{name}: the next"
        );
    }
}

#[test]
fn a_chain_longer_than_allowed_is_refused_whole() {
    let mut client = ready();
    client.begin(1 << 28);
    let table = 0x2_0000;
    let length = 300u64;
    client.poke(HEADER, &request(1, 0));
    for index in 0..length {
        let next = (index + 1) as u16;
        let raw = match index {
            0 => descriptor(HEADER, 16, NEXT, next),
            _ if index == length - 1 => descriptor(STATUS, 1, WRITE, 0),
            _ => descriptor(0x4_0000, 512, NEXT, next),
        };
        client.poke(table + 16 * index, &raw);
    }
    client.descriptor(0, table, 16 * length as u32, INDIRECT, 0);
    client.offer(0, 1);
    assert_eq!(client.used(), (1, 0));
    assert_eq!(client.counters.bytes_written.get(), 0);
}

#[test]
fn an_available_index_beyond_the_queue_breaks_the_queue() {
    let mut client = ready();
    client.begin(0);
    client.poke(QUEUE + 0x1002, &17u16.to_le_bytes());
    client.ring(0);
    assert_eq!(client.register(0x14, 1) & 64, 64);
}

/// The used ring's flags overlap the available index, so the device's writes change its own input.
#[test]
fn rings_that_feed_themselves_break() {
    let mut client = ready();
    client.negotiate(0);
    client.set(0x16, &[0, 0]);
    client.set(0x18, &[16, 0]);
    for (register, at) in [
        (0x20, QUEUE),
        (0x28, QUEUE + 0x1002),
        (0x30, QUEUE + 0x1004),
    ] {
        client.set(register, &at.to_le_bytes());
    }
    client.set(0x1c, &[1, 0]);
    client.set(0x14, &[15]);
    client.ring(0);
    assert_eq!(client.register(0x14, 1) & 64, 64, "the rings make no sense");
    client.set(0x14, &[0]);
    assert!(!client.session.function().unfinished());
    client.begin(0);
    client.poke(HEADER, &request(4, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, STATUS, 1, WRITE, 0);
    client.poke(QUEUE + 0x1000, &[0; 4]);
    client.poke(QUEUE + 0x2000, &[0; 4]);
    client.offer(0, 1);
    assert_eq!((client.used().0, client.peek(STATUS, 1)), (1, vec![0]));
    assert!(!client.session.function().unfinished());
}

#[test]
fn a_turn_ends_after_as_many_chains_as_the_queue_is_long() {
    let mut client = ready();
    client.begin(0);
    client.poke(HEADER, &request(4, 0));
    client.descriptor(0, HEADER, 16, NEXT, 1);
    client.descriptor(1, STATUS, 1, WRITE, 0);
    // All ring entries refer to the same chain.
    client.poke(QUEUE + 0x1002, &16u16.to_le_bytes());
    client.ring(0);
    assert_eq!(client.used(), (16, 1));
    assert!(client.session.function().unfinished(), "there may be more");
    // The device has not asked for a notification, so the driver sends none.
    client.poke(QUEUE + 0x1002, &20u16.to_le_bytes());
    client.session.function().continue_work();
    assert_eq!(client.used(), (20, 1));
    assert!(!client.session.function().unfinished());
}

#[test]
fn readable_after_writable_is_malformed() {
    let mut client = ready();
    client.begin(0);
    client.poke(HEADER, &request(0, 0));
    client.descriptor(0, 0xb000, 512, NEXT | WRITE, 1);
    client.descriptor(1, HEADER, 16, NEXT, 2);
    client.descriptor(2, STATUS, 1, WRITE, 0);
    client.offer(0, 1);
    assert_eq!((client.used(), client.peek(STATUS, 1)), ((1, 1), vec![1]));
    assert_eq!(client.counters.bytes_read.get(), 0);
}

proptest! {
    /// Any descriptors in any ring: the process survives, and the device can be reset.
    #[test]
    fn any_descriptors(
        descriptors in prop::collection::vec(
            (
                prop_oneof![0u64..RAM_BYTES, any::<u64>()],
                prop_oneof![0u32..5000, any::<u32>()],
                0u16..8,
                0u16..20,
            ),
            16,
        ),
        heads in prop::collection::vec(any::<u16>(), 1..16),
        features in prop_oneof![Just(0u64), Just(1 << 28), Just(1 << 29)],
    ) {
        let mut client = ready();
        client.begin(features);
        client.poke(HEADER, &request(1, 3));
        for (index, (at, bytes, flags, next)) in (0..).zip(descriptors) {
            client.descriptor(index, at, bytes, flags, next);
        }
        for (slot, head) in (0u64..).zip(&heads) {
            client.poke(QUEUE + 0x1004 + 2 * slot, &head.to_le_bytes());
        }
        client.poke(QUEUE + 0x1002, &(heads.len() as u16).to_le_bytes());
        client.ring(0);
        client.set(0x14, &[0]);
        client.begin(0);
        prop_assert_eq!(client.register(0x14, 1), 15);
    }
}
