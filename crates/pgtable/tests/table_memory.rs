//! The memory of a unit's tables: frames that the unit reaches, and words that it sees.

mod common;

use std::sync::atomic::Ordering;

use common::{Memory, frames, memory};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, TableError, TableMemory};
use ringfence_types::{FrameSource, PhysAddr, PhysMemory, PhysRange};

fn seen(mem: &Memory, at: PhysAddr) -> u64 {
    let word = mem.device_view().word(at).unwrap();
    word.load(Ordering::Acquire)
}

#[test]
fn a_unit_that_does_not_snoop_sees_frames_and_stores() {
    let mem = memory();
    let frames = frames(&mem);
    let tables = TableMemory::new(&mem, Coherency::NonCoherent, 48);
    let frame = tables.frame(&frames).unwrap();
    assert_eq!(seen(&mem, frame.wrapping_add(4088)), 0);
    let at = frame.wrapping_add(0x40);
    tables.store(at, &[1, 2]).unwrap();
    assert_eq!((seen(&mem, at), seen(&mem, at.wrapping_add(8))), (1, 2));
    tables.store_entry(at, &[3, 4, 5]).unwrap();
    let words = [0, 8, 16].map(|offset| tables.load(at.wrapping_add(offset)));
    assert_eq!(words, [Ok(3), Ok(4), Ok(5)]);
    assert_eq!(seen(&mem, at), 3);
    let (write_backs, drains) = (mem.write_backs(), mem.drains());
    let snooping = TableMemory::new(&mem, Coherency::Coherent, 48);
    snooping.store(at, &[6]).unwrap();
    assert_eq!((mem.write_backs(), mem.drains()), (write_backs, drains));
}

/// The first word, which holds the valid bit, does not change if another one cannot be stored.
#[test]
fn an_entry_that_leaves_memory_does_not_become_valid() {
    let mem = Arena::new(4096).unwrap();
    let tables = TableMemory::new(&mem, Coherency::Coherent, 48);
    let at = PhysAddr::new(4088);
    assert_eq!(tables.store_entry(at, &[1, 2]), Err(TableError::Memory));
    assert_eq!(tables.load(at), Ok(0));
    let beyond = PhysAddr::new(4096);
    assert_eq!(tables.load(beyond), Err(TableError::Memory));
    assert_eq!(tables.store(beyond, &[1]), Err(TableError::Memory));
}

#[test]
fn frames_and_tables_lie_in_memory_and_within_the_units_addresses() {
    let mem = Arena::new(1 << 20).unwrap();
    let holds = |bits, at, bytes| {
        let tables = TableMemory::new(&mem, Coherency::Coherent, bits);
        tables.holds(PhysAddr::new(at), bytes)
    };
    for (bits, at, bytes, expected) in [
        (20, 0, 1 << 20, true),
        (64, 0, 1 << 20, true),
        (20, 8, 1 << 20, false),
        (64, (1 << 20) - 8, 4, true),
        (64, (1 << 20) - 8, 12, false),
        (64, 1 << 20, 4, false),
        (19, 0, 1 << 19, true),
        (19, 8, 1 << 19, false),
        (64, u64::MAX - 7, 8, false),
        (64, u64::MAX - 7, 16, false),
    ] {
        assert_eq!(holds(bits, at, bytes), expected, "{bits} {at:x} {bytes:x}");
    }
    // One frame lies beyond 19 bits, the other beyond memory.
    let larger = Arena::new(2 << 20).unwrap();
    for (start, bits) in [(1 << 19, 19), (1 << 20, 64)] {
        let source = Frames::new(&larger, PhysRange::new(PhysAddr::new(start), 4096).unwrap());
        let tables = TableMemory::new(&mem, Coherency::Coherent, bits);
        assert_eq!(tables.frame(&source), Err(TableError::Memory));
        assert_eq!(source.in_use(), 0);
    }
    let source = Frames::new(&mem, PhysRange::new(PhysAddr::new(0), 4096).unwrap());
    let tables = TableMemory::new(&mem, Coherency::Coherent, 19);
    let frame = tables.frame(&source).unwrap();
    assert_eq!(tables.frame(&source), Err(TableError::OutOfFrames));
    source.free(frame);
}
