//! This crate's device behind rings in guest memory, through the queue adapter.

use ringfence_virtio_iommu::Queues;
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use super::direct::Direct;

const READABLE: u64 = 0x1_0000;
const WRITABLE: u64 = 0x2_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Bytes per descriptor: most chains have several.
const PIECE: usize = 7;

pub(crate) struct Queued {
    direct: Direct,
    queues: Queues,
    memory: GuestMemoryMmap,
}

impl Queued {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            direct: Direct::new(setup),
            queues: Queues::default(),
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4_0000)]).expect("memory"),
        }
    }

    /// Adds one chain to a queue.
    fn chain(&self, readable: usize, writable: usize) -> Queue {
        let mut descriptors = Vec::new();
        for (base, bytes, flags) in [(READABLE, readable, 0), (WRITABLE, writable, WRITE)] {
            for at in (0..bytes).step_by(PIECE) {
                let length = PIECE.min(bytes - at) as u32;
                descriptors.push((base + at as u64, length, flags));
            }
        }
        if descriptors.is_empty() {
            descriptors.push((READABLE, 0, 0));
        }
        let last = descriptors.len() - 1;
        let raw: Vec<RawDescriptor> = descriptors
            .iter()
            .enumerate()
            .map(|(number, &(at, length, flags))| {
                let flags = if number == last { flags } else { flags | NEXT };
                let next = number as u16 + 1;
                RawDescriptor::from(Descriptor::new(at, length, flags, next))
            })
            .collect();
        let rings = MockSplitQueue::new(&self.memory, 256);
        rings.build_multiple_desc_chains(&raw).expect("a chain");
        rings.create_queue().expect("a queue")
    }

    /// Returns the used length of the chain, once the used index shows that it was returned.
    fn used(&self, queue: &Queue) -> Option<usize> {
        let used = GuestAddress(queue.used_ring());
        let index: u16 = self.memory.read_obj(used.unchecked_add(2)).expect("index");
        (index == 1).then(|| {
            let length: u32 = self.memory.read_obj(used.unchecked_add(8)).expect("length");
            length as usize
        })
    }
}

impl Subject for Queued {
    fn endpoints(&self) -> [u32; 3] {
        self.direct.endpoints()
    }

    fn offered(&self) -> u64 {
        self.direct.offered()
    }

    fn accept(&mut self, features: u64) {
        self.direct.accept(features);
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        self.direct.read_config(offset, bytes);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        self.direct.write_config(offset, bytes);
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        let memory = &self.memory;
        memory
            .write_slice(readable, GuestAddress(READABLE))
            .expect("written");
        memory
            .write_slice(writable, GuestAddress(WRITABLE))
            .expect("written");
        let mut queue = self.chain(readable.len(), writable.len());
        let served = self
            .queues
            .serve_requests(&mut self.direct.device, &mut queue, &self.memory, |_, _| {})
            .expect("a sound queue");
        assert!(served.buffers == 1 && served.notify);
        self.memory
            .read_slice(writable, GuestAddress(WRITABLE))
            .expect("read");
        self.used(&queue).ok_or(NotReturned::Kept)
    }

    fn reset(&mut self) {
        self.direct.reset();
    }

    fn reset_system(&mut self) -> bool {
        self.direct.reset_system()
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        self.direct.access(endpoint, iova, access)
    }

    fn begin_access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<bool> {
        self.direct.begin_access(endpoint, iova, access)
    }

    fn access_is_outstanding(&self) -> bool {
        self.direct.access_is_outstanding()
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.memory
            .write_slice(buffer, GuestAddress(WRITABLE))
            .expect("written");
        let mut queue = self.chain(0, buffer.len());
        self.queues
            .serve_events(&mut self.direct.device, &mut queue, &self.memory)
            .expect("a sound queue");
        self.memory
            .read_slice(buffer, GuestAddress(WRITABLE))
            .expect("read");
        self.used(&queue)
    }

    fn dropped_events(&self) -> Option<u64> {
        self.direct.dropped_events()
    }
}
