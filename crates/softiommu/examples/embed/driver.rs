//! The guest's side: requests that a real guest's kernel would send.

use std::error::Error;

use virtio_queue::Queue;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const RINGS: GuestAddress = GuestAddress(0x10_0000);
const REQUESTS: u64 = 0x20_0000;
/// `VIRTQ_DESC_F_NEXT` and `VIRTQ_DESC_F_WRITE` (virtio 1.3, section 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Creates a queue with two requests (virtio 1.3, section 5.13.6): attach endpoint 0x20 to domain
/// 1, and map a writable page in the domain.
pub(crate) fn attach_and_map(memory: &GuestMemoryMmap) -> Result<Queue, Box<dyn Error>> {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let longs = |longs: &[u64]| longs.iter().flat_map(|l| l.to_le_bytes()).collect();
    let attach: [Vec<u8>; 2] = [vec![1, 0, 0, 0], words(&[1, 0x20, 0, 0])];
    let map = [
        vec![3, 0, 0, 0],
        words(&[1]),
        longs(&[0x10000, 0x10fff, 0x5000]),
        words(&[3]),
    ];
    let rings = MockSplitQueue::create(memory, RINGS, 16);
    let mut chains: Vec<RawDescriptor> = Vec::new();
    for (request, at) in [attach.concat(), map.concat()].iter().zip([0, 0x100]) {
        let (at, reply) = (REQUESTS + at, REQUESTS + 0x1000 + at);
        memory.write_slice(request, GuestAddress(at))?;
        let next = u16::try_from(chains.len())? + 1;
        let bytes = u32::try_from(request.len())?;
        chains.push(Descriptor::new(at, bytes, NEXT, next).into());
        chains.push(Descriptor::new(reply, 4, WRITE, 0).into());
    }
    rings.add_desc_chains(&chains, 0)?;
    Ok(rings.create_queue()?)
}

/// Reads guest memory at `at` up to the first zero byte.
pub(crate) fn text(memory: &GuestMemoryMmap, at: u64) -> Result<String, Box<dyn Error>> {
    let mut bytes = [0; 64];
    memory.read_slice(&mut bytes, GuestAddress(at))?;
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}
