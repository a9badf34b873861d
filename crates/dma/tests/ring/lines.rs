//! `riommu-`: the driver writes back lines, not entries, and before any walker needs them.

use std::cell::RefCell;

use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{OwnedRing, Ring, RingMapping, SlotChoice};
use ringfence_dma::space::Rings;
use ringfence_dma::{Attachment, Dma, Mapping};
use ringfence_pgtable::Coherency;
use ringfence_types::{Direction, Iova};

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
        ring.sync_map(&*board.memory);
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
    ring.sync_map(&*memory);
    let _ = ring.unmap(&*memory, mapping).unwrap();
    ring.end_burst(&*memory, &mut board.port, |()| {}).unwrap();
    assert_eq!((memory.write_backs(), memory.drains()), (0, 0));
}

type Shared = Dma<Rings<Ring, RefCell<Ring>>, Burst, u32>;

const TO: Direction = Direction::ToDevice;

/// Creates a ring that CPUs share.
fn shared(board: &Board, slots: u32) -> (Shared, Attachment) {
    let mut dma = Dma::new(Burst::default());
    let rings = board.rings(SlotChoice::Tail, &[slots]);
    let at = dma
        .attach(DEVICE, Iova::new(u64::MAX), |domain| {
            Ok::<_, ()>(Rings::new(domain, DEVICE, rings, RefCell::new))
        })
        .unwrap();
    (dma, at)
}

#[test]
fn the_layer_writes_lines_back_too() {
    let mut board = Board::new(Coherency::NonCoherent);
    let (dma, at) = shared(&board, 512);
    let (mut cpu, memory) = (dma.cpu(), board.memory.clone());
    let (lines, drains) = (memory.write_backs(), memory.drains());
    const BURSTS: u32 = 10;
    for _ in 0..BURSTS {
        let made: Vec<Mapping<u32>> = (0..BURST)
            .map(|n| {
                let memory = buffer(u64::from(n) * 4096 + 7, 1500);
                let mapped = dma.map_single(&mut cpu, &mut board, &at, n, memory, TO);
                mapped.unwrap().0
            })
            .collect();
        dma.sync_map(&mut cpu, &mut board, &at);
        for mapping in made {
            let _ = dma
                .unmap_single(&mut cpu, &mut board, &at, mapping)
                .unwrap();
        }
        let mut back = 0;
        dma.end_burst(&mut cpu, &mut board, &at, TO, |_| back += 1)
            .unwrap();
        assert_eq!(back, BURST);
    }
    let pairs = f64::from(BURST * BURSTS);
    let lines = (memory.write_backs() - lines) as f64 / pairs;
    assert!(lines <= 0.6, "{lines} line write-backs a map and unmap");
    assert_eq!(memory.drains() - drains, u64::from(2 * BURSTS));
}

/// A fence of one CPU does not wait for another CPU's write-backs. A CPU that rings the doorbell or
/// invalidates must therefore have written back its own changes, whichever CPU used the ring since.
#[test]
fn cpus_wait_for_their_own_changes() {
    let mut here = Board::new(Coherency::NonCoherent);
    let mut there = here.processor();
    // Four lines.
    let (dma, at) = shared(&here, 16);
    let (mut mine, mut other) = (dma.cpu(), dma.cpu());
    let map = |cpu: &mut _, board: &mut Board, n: u32| -> Mapping<u32> {
        let memory = buffer(u64::from(n) * 4096, 64);
        dma.map_single(cpu, board, &at, n, memory, TO).unwrap().0
    };

    // One CPU advances to the next line; the other overtakes it.
    let mut live: Vec<_> = (0..5).map(|n| map(&mut mine, &mut here, n)).collect();
    live.extend((5..9).map(|n| map(&mut other, &mut there, n)));
    dma.sync_map(&mut other, &mut there, &at);
    dma.sync_map(&mut mine, &mut here, &at);
    for slot in 0..9 {
        assert!(here.entry((0, slot)).is_valid(), "slot {slot} was told");
    }

    let mut live = live.into_iter();
    let (first, fifth) = (live.next().unwrap(), live.nth(3).unwrap());
    let _ = dma.unmap_single(&mut mine, &mut here, &at, first).unwrap();
    let _ = dma
        .unmap_single(&mut other, &mut there, &at, fifth)
        .unwrap();
    let mut back = Vec::new();
    dma.end_burst(&mut mine, &mut here, &at, TO, |n| back.push(n))
        .unwrap();
    assert_eq!(back, [0]);
    assert!(
        !here.entry((0, 0)).is_valid(),
        "buffer 0 is back, and the device still finds it"
    );
    drop(live);
}
