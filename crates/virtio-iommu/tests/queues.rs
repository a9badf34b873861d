//! The queue adapter: the order of publication, and malformed chains.
#![cfg(feature = "virtio-queue")]

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;
use ringfence_virtio_iommu::{
    Device, DomainId, EndpointId, Mapping, Options, Queues, ServeError, Sink, SinkError, SinkHandle,
};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const SIZE: u16 = 64;
const READABLE: u64 = 0x1_0000;
const WRITABLE: u64 = 0x2_0000;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4_0000)]).expect("memory")
}

fn used_index(memory: &GuestMemoryMmap, used: u64) -> u16 {
    memory.read_obj(GuestAddress(used + 2)).expect("the index")
}

/// A sink that logs the used index at each call.
struct Watch {
    memory: GuestMemoryMmap,
    used: u64,
    log: Rc<RefCell<Vec<(&'static str, u16)>>>,
    refuses: bool,
    /// True if it cannot wait for its readers.
    stuck: bool,
}

impl Watch {
    /// Creates a sink without faults, over `queue` in `memory`.
    fn new(memory: &GuestMemoryMmap, queue: &Queue) -> Self {
        Self {
            memory: memory.clone(),
            used: queue.used_ring(),
            log: Rc::default(),
            refuses: false,
            stuck: false,
        }
    }

    fn note(&self, what: &'static str) {
        let index = used_index(&self.memory, self.used);
        self.log.borrow_mut().push((what, index));
    }
}

impl SinkHandle for Watch {
    type Handle<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl Sink for Watch {
    fn begin(&mut self) -> Result<(), SinkError> {
        if self.refuses {
            return Err(SinkError::WouldBlock);
        }
        Ok(())
    }

    fn create(&mut self, _: DomainId) -> Result<(), SinkError> {
        Ok(())
    }

    fn destroy(&mut self, _: DomainId) {}

    fn attach(
        &mut self,
        _: EndpointId,
        _: DomainId,
        _: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        Ok(())
    }

    fn bypass(&mut self, _: EndpointId) -> Result<(), SinkError> {
        Ok(())
    }

    fn block(&mut self, _: EndpointId) {
        self.note("block");
    }

    fn map(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        self.note("map");
        Ok(())
    }

    fn unmap(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        self.note("unmap");
        Ok(())
    }

    fn commit(&mut self) -> Result<(), SinkError> {
        self.note("commit");
        if self.stuck {
            return Err(SinkError::CommitFailed);
        }
        Ok(())
    }
}

fn device<S: Sink>(sink: S) -> Device<S> {
    let mut device = Device::new(Options::default(), sink).expect("sound options");
    device
        .add_endpoint(EndpointId::new(1), &[])
        .expect("an endpoint");
    device.accept_features(device.features());
    device
}

fn request(kind: u8) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0, 7, 0, 0, 0];
    if kind == 1 {
        bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    } else {
        bytes.extend(0x1000_u64.to_le_bytes());
        bytes.extend(0x1fff_u64.to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend([3, 0, 0, 0]);
    }
    bytes
}

/// Creates a queue with one chain for each request.
fn queue_of(memory: &GuestMemoryMmap, requests: &[Vec<u8>]) -> Queue {
    let mut chains = Vec::new();
    for (number, bytes) in (0_u64..).zip(requests) {
        let (at, to) = (READABLE + number * 256, WRITABLE + number * 256);
        memory
            .write_slice(bytes, GuestAddress(at))
            .expect("written");
        let next = number as u16 * 2 + 1;
        chains.push(Descriptor::new(at, bytes.len() as u32, NEXT, next));
        chains.push(Descriptor::new(to, 4, WRITE, 0));
    }
    let raw: Vec<RawDescriptor> = chains.into_iter().map(RawDescriptor::from).collect();
    let rings = MockSplitQueue::new(memory, SIZE);
    rings.build_multiple_desc_chains(&raw).expect("chains");
    rings.create_queue().expect("a queue")
}

/// Statement 37, at the ring: the driver sees no reply before the sink has committed, and one
/// commit serves the batch.
#[test]
fn nothing_is_published_before_the_sink_has_committed() {
    let memory = memory();
    let requests: Vec<_> = [1, 3, 4, 3, 4].into_iter().map(request).collect();
    let mut queue = queue_of(&memory, &requests);
    let mut device = device(Watch::new(&memory, &queue));
    device.sink().log.borrow_mut().clear();
    let mut seen = 0;
    let served = Queues::default()
        .serve_requests(&mut device, &mut queue, &memory, |_, handled| {
            assert_eq!(handled.result, Ok(()));
            seen += 1;
        })
        .expect("a sound queue");
    assert_eq!((served.buffers, seen), (5, 5));
    let expected = ["map", "unmap", "map", "unmap", "commit"].map(|call| (call, 0));
    assert_eq!(*device.sink().log.borrow(), expected);
    assert_eq!(used_index(&memory, queue.used_ring()), 5);
    for number in 0..5_u64 {
        let reply: u32 = memory
            .read_obj(GuestAddress(WRITABLE + number * 256))
            .expect("a reply");
        assert_eq!(reply, 0);
    }
}

/// If the sink fails, the driver gets no reply. Requests that it cannot begin stay in the queue.
/// Requests that it cannot commit are executed, and the queue stops until a commit succeeds.
#[test]
fn failed_begin_or_commit_gets_no_reply() {
    for begins in [false, true] {
        let memory = memory();
        let mut queue = queue_of(&memory, &[request(1), request(3)]);
        let mut device = device(Watch::new(&memory, &queue));
        let mut queues = Queues::default();
        device.sink_mut().refuses = !begins;
        device.sink_mut().stuck = begins;
        let result = queues.serve_requests(&mut device, &mut queue, &memory, |_, _| {});
        match result {
            Err(ServeError::Sink(SinkError::WouldBlock)) => assert!(!begins),
            Err(ServeError::CommitFailed(SinkError::CommitFailed)) => assert!(begins),
            other => panic!("{other:?}"),
        }
        assert_eq!(used_index(&memory, queue.used_ring()), 0);
        assert_eq!(device.mappings(), usize::from(begins));
        if begins {
            let calls = |device: &Device<Watch>| -> Vec<&str> {
                let log = std::mem::take(&mut *device.sink().log.borrow_mut());
                log.into_iter().map(|(call, _)| call).collect()
            };
            // A reset detaches the endpoint, although the commit before it failed.
            calls(&device);
            assert_eq!(device.reset(), Err(SinkError::CommitFailed));
            assert_eq!(device.mappings(), 0);
            assert_eq!(calls(&device), ["block", "commit"]);
            device.sink_mut().stuck = false;
            assert_eq!(device.reset(), Ok(()));
            assert_eq!(calls(&device), ["block", "commit"]);
        } else {
            device.sink_mut().refuses = false;
            let served = queues
                .serve_requests(&mut device, &mut queue, &memory, |_, _| {})
                .expect("a sound queue");
            assert_eq!((served.buffers, device.mappings()), (2, 1));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Loops, nested indirect tables, addresses outside memory, lengths of 2^32 - 1, in any order.
    /// Each chain is returned once or the queue is rejected, and no used length exceeds the reply.
    #[test]
    fn malformed_chains_are_returned(
        table in prop::collection::vec(
            (0_u64..0x5_0000, any::<bool>(), any::<u16>(), 0_u16..8, 0_u16..SIZE + 2),
            SIZE as usize,
        ),
        heads in prop::collection::vec(0_u16..SIZE + 2, 1..SIZE as usize),
        bytes in prop::collection::vec(any::<u8>(), 1024),
        events in any::<bool>(),
    ) {
        let memory = memory();
        memory.write_slice(&bytes, GuestAddress(READABLE)).unwrap();
        let rings = MockSplitQueue::new(&memory, SIZE);
        let mut queue: Queue = rings.create_queue().unwrap();
        for (number, (at, far, length, flags, next)) in (0_u64..).zip(table) {
            let at = if far { u64::MAX - at } else { at };
            // Occasionally a huge length.
            let length = if length > 60_000 { u32::MAX } else { u32::from(length % 600) };
            let flags = flags & (NEXT | WRITE | INDIRECT);
            let raw = RawDescriptor::from(Descriptor::new(at, length, flags, next));
            memory.write_obj(raw, GuestAddress(queue.desc_table() + number * 16)).unwrap();
        }
        for (number, head) in (0_u64..).zip(&heads) {
            memory.write_obj(*head, GuestAddress(queue.avail_ring() + 4 + number * 2)).unwrap();
        }
        memory.write_obj(heads.len() as u16, GuestAddress(queue.avail_ring() + 2)).unwrap();
        let mut device = device(());
        for number in 0..100 {
            let range = ringfence_types::IovaRange::new(ringfence_types::Iova::new(number), 1);
            let denied = device.translate(
                EndpointId::new(1), range.unwrap(), ringfence_types::Access::Read,
            );
            device.report(denied.unwrap_err());
        }
        let mut queues = Queues::default();
        let served = if events {
            queues.serve_events(&mut device, &mut queue, &memory)
        } else {
            queues.serve_requests(&mut device, &mut queue, &memory, |_, handled| {
                assert!(handled.used <= 516);
            })
        };
        if let Ok(served) = served {
            prop_assert!(served.buffers <= heads.len());
        }
    }
}

/// Memory in several regions: rings, requests and replies in separate ones, and requests and
/// replies that cross a boundary.
#[test]
fn regions_are_distinguished() {
    let half = 0x1_0080;
    let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[
        (GuestAddress(0), 0x1_0000),
        (GuestAddress(READABLE), 0x90),
        (GuestAddress(READABLE + 0x90), 0x1000),
        (GuestAddress(WRITABLE), 0x82),
        (GuestAddress(WRITABLE + 0x82), 0x1000),
    ])
    .expect("memory");
    let requests = [request(1), request(3), request(4)];
    let mut chains = Vec::new();
    for ((number, bytes), at) in (0..).zip(&requests).zip([READABLE, half, READABLE + 0x200]) {
        memory
            .write_slice(bytes, GuestAddress(at))
            .expect("written");
        let to = at - READABLE + WRITABLE;
        chains.push(Descriptor::new(
            at,
            bytes.len() as u32,
            NEXT,
            number * 2 + 1,
        ));
        chains.push(Descriptor::new(to, 4, WRITE, 0));
        memory
            .write_slice(&[0xff; 4], GuestAddress(to))
            .expect("written");
    }
    let raw: Vec<RawDescriptor> = chains.into_iter().map(RawDescriptor::from).collect();
    let rings = MockSplitQueue::new(&memory, SIZE);
    rings.build_multiple_desc_chains(&raw).expect("chains");
    let mut queue: Queue = rings.create_queue().expect("a queue");
    let mut device = device(());
    let mut results = Vec::new();
    let served = Queues::default()
        .serve_requests(&mut device, &mut queue, &memory, |_, handled| {
            results.push(handled.result);
        })
        .expect("a sound queue");
    assert_eq!((served.buffers, results), (3, vec![Ok(()); 3]));
    for at in [WRITABLE, half - READABLE + WRITABLE, WRITABLE + 0x200] {
        let answer: [u8; 4] = memory.read_obj(GuestAddress(at)).expect("in memory");
        assert_eq!(answer, [0; 4]);
    }
}

/// Virtio 1.3, section 2.7.5.3.1: no chain is longer than the queue, not even an indirect one. The
/// device reads no further than that, and a longer chain has no effect.
#[test]
fn an_indirect_chain_longer_than_the_queue_is_returned_unread() {
    let memory = memory();
    let table: u64 = 0x3_0000;
    let attach = [1, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (descriptors, used_length) in [(SIZE, 4), (SIZE + 1, 0), (0xf00, 0)] {
        let ring = MockSplitQueue::create(&memory, GuestAddress(0), SIZE);
        let mut queue: Queue = ring.create_queue().expect("a queue");
        let mut device = device(());
        memory
            .write_slice(&attach, GuestAddress(READABLE))
            .expect("room");
        // The request first, then empty descriptors, then the tail.
        for at in 0..descriptors {
            let last = at + 1 == descriptors;
            let (address, bytes, flags) = match at {
                0 => (READABLE, attach.len() as u32, NEXT),
                _ if last => (WRITABLE, 4, WRITE),
                _ => (READABLE, 0, NEXT),
            };
            let descriptor = Descriptor::new(address, bytes, flags, at + 1);
            let to = GuestAddress(table + u64::from(at) * 16);
            memory
                .write_obj(RawDescriptor::from(descriptor), to)
                .expect("room");
        }
        let bytes = u32::from(descriptors) * 16;
        let indirect = Descriptor::new(table, bytes, INDIRECT, 0);
        ring.add_desc_chains(&[RawDescriptor::from(indirect)], 0)
            .expect("a chain");
        let mut queues = Queues::default();
        let served = queues
            .serve_requests(&mut device, &mut queue, &memory, |_, _| {})
            .expect("sound rings");
        assert_eq!(served.buffers, 1);
        let length: u32 = memory
            .read_obj(GuestAddress(queue.used_ring() + 8))
            .expect("an element");
        assert_eq!(length, used_length, "{descriptors} descriptors");
        assert_eq!(device.domains(), usize::from(used_length != 0));
    }
}
