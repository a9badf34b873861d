//! `riommu-`: lines are written back, not entries, and before anybody relies on them.

use ringfence_dma::ring::{OwnedRing, RingMapping, SlotChoice};
use ringfence_pgtable::Coherency;
use ringfence_types::Direction;

use crate::rig::*;

const BURST: u32 = 200;

#[test]
fn a_burst_writes_lines_back_and_waits_twice() {
    let mut board = Board::new(Coherency::NonCoherent);
    let ring = board.rings(SlotChoice::Tail, &[512]).remove(0);
    let memory = board.memory.clone();
    let mut ring = OwnedRing::new(ring, &*memory, DOMAIN, DEVICE).unwrap();
    let (lines, drains) = (memory.write_backs(), memory.drains());
    const BURSTS: u32 = 10;
    for burst in 0..BURSTS {
        let made: Vec<RingMapping<u32>> = (0..BURST)
            .map(|n| {
                let memory = buffer(u64::from(n) * 4096 + 7, 1500);
                ring.map(&*board.memory, n, &memory, Direction::FromDevice)
                    .unwrap()
            })
            .collect();
        ring.doorbell(&*board.memory);
        for mapping in &made {
            let slot = (0, (burst * BURST + mapping.buffer()) % 512);
            assert!(board.entry(slot).is_valid(), "told, and not there");
        }
        for mapping in made {
            let _ = ring.unmap(&*board.memory, mapping).unwrap();
        }
        let mut back = 0;
        ring.end_burst(&*memory, &mut board.port, |_| back += 1)
            .unwrap();
        assert_eq!(back, BURST);
        for slot in 0..512 {
            assert!(
                !board.entry((0, slot)).is_valid(),
                "invalidated, and still there"
            );
        }
    }
    let pairs = f64::from(BURST * BURSTS);
    let lines = (memory.write_backs() - lines) as f64 / pairs;
    assert!(lines <= 0.6, "{lines} line write-backs a map and unmap");
    assert_eq!(memory.drains() - drains, u64::from(2 * BURSTS));
}

#[test]
fn a_coherent_ring_writes_nothing_back() {
    let mut board = Board::new(Coherency::Coherent);
    let ring = board.rings(SlotChoice::Tail, &[8]).remove(0);
    let memory = board.memory.clone();
    let mut ring = OwnedRing::new(ring, &*memory, DOMAIN, DEVICE).unwrap();
    let mapping = ring
        .map(&*memory, (), &buffer(9, 9), Direction::ToDevice)
        .unwrap();
    ring.doorbell(&*memory);
    let _ = ring.unmap(&*memory, mapping).unwrap();
    ring.end_burst(&*memory, &mut board.port, |()| {}).unwrap();
    assert_eq!((memory.write_backs(), memory.drains()), (0, 0));
}
