//! A driver of a network card whose buffers come from a pool that stays mapped: neither a map nor
//! an unmap touches a table, and the driver copies the headers that it inspects.
//!
//! ```sh
//! cargo run -p ringfence-dma --example nic_pool
//! ```

mod nic;

use ringfence_dma::{MapReason, PoolBuffer, PostedBuffer};
use ringfence_types::Direction;

use nic::Nic;

/// Bytes of a receive buffer, and of the headers that the driver inspects.
const BUFFER: u64 = 2048;
const HEADER: usize = 8;
const FRAMES: [&[u8]; 3] = [b"header 1payload", b"header 2", b"header 3more payload"];
/// Receive buffers in the ring.
const RING: u64 = 2;

/// The driver of a card.
struct Driver(Nic);

impl Driver {
    /// Takes a buffer from the pool. `None` if all are in use: the driver tries again after a
    /// completion.
    fn alloc(&mut self, bytes: u64, direction: Direction) -> Option<PoolBuffer> {
        let (machine, dma, cpu, at) = self.0.parts();
        match dma.alloc_buffer(cpu, machine, at, bytes, direction) {
            Ok(buffer) => Some(buffer),
            Err(error) if matches!(error.reason, MapReason::Shadow(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Passes a frame to the stack: the header that the driver checks, and the payload. Returns
    /// the buffer, to be posted again.
    fn received(&mut self, posted: PostedBuffer, length: u64) -> (Vec<u8>, PoolBuffer) {
        let iova = posted.iova();
        let mut received = posted.unmap(length).expect("a length within the buffer");
        let mut frame = vec![0; length as usize];
        let (header, payload) = frame.split_at_mut(HEADER);
        let Nic { machine, dma, .. } = &self.0;
        dma.read_buffer(machine, &mut received, header)
            .expect("a header");
        assert!(header.starts_with(b"header "), "another frame");
        // The card still reaches the buffer. It cannot change the checked header.
        self.0.card_writes(iova, b"attacked");
        dma.read_buffer(machine, &mut received, payload)
            .expect("a payload");
        assert_eq!(received.left(), 0);
        (frame, received.into_buffer())
    }

    /// Sends an answer: the driver writes it into the pool, and the card reads it there.
    fn send(&mut self, answer: &[u8]) {
        let buffer = self.alloc(answer.len() as u64, Direction::ToDevice);
        let mut buffer = buffer.expect("a free buffer");
        let Nic {
            machine, dma, cpu, ..
        } = &mut self.0;
        dma.fill_buffer(machine, &mut buffer, 0, answer)
            .expect("room for the answer");
        let posted = buffer.for_device();
        // The card completes it, and wrote nothing.
        let sent = posted.unmap(0).expect("a sent buffer");
        dma.free_buffer(cpu, sent.into_buffer())
            .expect("a buffer of this pool");
    }
}

fn main() {
    let mut driver = Driver(Nic::new());
    let ring = (0..RING).filter_map(|_| driver.alloc(BUFFER, Direction::FromDevice));
    let mut ring: std::collections::VecDeque<_> = ring.map(PoolBuffer::for_device).collect();
    for frame in FRAMES {
        let posted = ring.pop_front().expect("a posted buffer");
        driver.0.card_writes(posted.iova(), frame);
        let (found, buffer) = driver.received(posted, frame.len() as u64);
        assert_eq!(found, frame, "a byte that the card changed");
        println!("{} bytes: {}", found.len(), String::from_utf8_lossy(&found));
        ring.push_back(buffer.for_device());
        driver.send(b"thank you");
    }
    driver.0.finish();
}

#[test]
fn checked_headers_never_change() {
    main();
}
