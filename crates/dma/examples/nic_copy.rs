//! A driver of a network card whose packets are copied: the card never reaches the driver's memory.
//!
//! ```sh
//! cargo run -p ringfence-dma --example nic_copy
//! ```

mod nic;

use ringfence_dma::flush::Released;
use ringfence_dma::{MapReason, Mapping};
use ringfence_types::{Direction, PhysRange};

use nic::{Nic, bytes};

/// Bytes of a receive buffer, and the frames that the card receives.
const BUFFER: u64 = 2048;
const FRAMES: [&[u8]; 3] = [b"a short frame", b"another one", b"the last frame"];
/// Receive buffers in the ring.
const RING: u64 = 4;

/// The driver of a card.
struct Driver(Nic);

impl Driver {
    /// Maps a buffer. `None` if all copies are in use: the driver tries again after a completion.
    fn map(&mut self, buffer: PhysRange, direction: Direction) -> Option<Mapping<PhysRange>> {
        let (machine, dma, cpu, at) = self.0.parts();
        match dma.map_single(cpu, machine, at, buffer, buffer, direction) {
            Ok((mapping, _)) => Some(mapping),
            Err((_, error)) if matches!(error.reason, MapReason::Shadow(_)) => None,
            Err((_, error)) => panic!("{error}"),
        }
    }

    /// Returns the buffer of a received frame. Only the frame's bytes are copied to it.
    fn received(&mut self, mapping: Mapping<PhysRange>, length: u64) -> PhysRange {
        let (machine, dma, cpu, at) = self.0.parts();
        let unmapped = dma.unmap_received(cpu, machine, at, mapping, length);
        let Released(buffer) = unmapped.expect("a length within the buffer");
        buffer
    }

    /// Returns the buffer of a sent frame.
    fn sent(&mut self, mapping: Mapping<PhysRange>) -> PhysRange {
        let (machine, dma, cpu, at) = self.0.parts();
        let unmapped = dma.unmap_single(cpu, machine, at, mapping);
        let Released(buffer) = unmapped.expect("a live mapping");
        buffer
    }

    /// The card writes a frame, and as many bytes beyond the buffer as its page has.
    fn card_receives(&self, mapping: &Mapping<PhysRange>, frame: &[u8]) {
        let mut stray = vec![0xff; (4096 - mapping.iova().offset_in(4096)) as usize];
        stray[..frame.len()].copy_from_slice(frame);
        self.0.card_writes(mapping.iova(), &stray);
    }
}

fn main() {
    let mut driver = Driver(Nic::new());
    let buffers = (0..RING).map(|slot| bytes(0x10_0000 + slot * BUFFER, BUFFER));
    let ring: Vec<_> = buffers
        .filter_map(|at| driver.map(at, Direction::FromDevice))
        .collect();
    let mut ring = ring.into_iter();
    for frame in FRAMES {
        let posted = ring.next().expect("a posted buffer");
        driver.card_receives(&posted, frame);
        let buffer = driver.received(posted, frame.len() as u64);
        let mut found = vec![0; BUFFER as usize];
        let memory = &driver.0.machine.memory;
        memory
            .read_bytes(buffer.start(), &mut found)
            .expect("memory");
        assert_eq!(&found[..frame.len()], frame);
        assert!(
            found[frame.len()..].iter().all(|byte| *byte == 0),
            "stray bytes of the card"
        );
        println!("{} bytes: {}", frame.len(), String::from_utf8_lossy(frame));
        // Send an answer: the card reads a copy of it, and zeroes beside it.
        let answer = driver
            .map(bytes(0x20_0000, 64), Direction::ToDevice)
            .expect("a free copy");
        driver.sent(answer);
    }
    driver.0.finish();
}

#[test]
fn frames_arrive_without_stray_bytes() {
    main();
}
