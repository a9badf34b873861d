//! The layer never releases a buffer while a device may reach it, whatever the driver drops.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{Burst, Strict};
use ringfence_dma::{UnmapReason, Withheld};
use ringfence_types::Direction;

use crate::rig::*;

struct Buffer(u64, Rc<RefCell<Vec<u64>>>);

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "buffer {}", self.0)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.1.borrow_mut().push(self.0);
    }
}

#[test]
fn a_dropped_mapping_leaks_its_buffer() {
    let freed = Rc::new(RefCell::new(Vec::new()));
    let mut rig = Rig::<Tree, Plain, _, Buffer>::new(Strict);
    let (board, dma, cpu, at) = rig.parts();
    let mut map = |id, board: &mut Board| {
        let buffer = Buffer(id, Rc::clone(&freed));
        let memory = memory(0x10_0000, 64);
        dma.map_single(cpu, board, at, buffer, memory, Direction::ToDevice)
            .unwrap()
            .0
    };
    drop(map(1, board));
    let (not_invalidated, settled) = (map(2, board), map(3, board));
    board.port.fail(0, 1, InvalidationFailure::Failed);
    match dma
        .unmap_single(cpu, board, at, not_invalidated)
        .unwrap_err()
        .reason
    {
        UnmapReason::NotFlushed(_, not_invalidated) => drop(not_invalidated),
        other => panic!("{other:?}"),
    }
    assert!(freed.borrow().is_empty(), "{freed:?}");
    drop(dma.unmap_single(cpu, board, at, settled).unwrap());
    assert_eq!(*freed.borrow(), [3]);
}

#[test]
fn dropped_cpu_leaks_withheld_buffers() {
    let freed = Rc::new(RefCell::new(Vec::new()));
    let mut rig = Rig::<Tree, Plain, _, Buffer>::new(Burst::default());
    let Rig { board, dma, at, .. } = &mut rig;
    let mut cpu = dma.cpu();
    let buffer = Buffer(1, Rc::clone(&freed));
    let (mapping, _) = dma
        .map_single(
            &mut cpu,
            board,
            at,
            buffer,
            memory(0, 1),
            Direction::ToDevice,
        )
        .unwrap();
    let Withheld = dma.unmap_single(&mut cpu, board, at, mapping).unwrap();
    drop(cpu);
    drop(rig);
    assert!(freed.borrow().is_empty());
}

/// A rejected unmap changes nothing: the device still reaches the buffer. A driver that drops the
/// error does not free it.
#[test]
fn a_dropped_refusal_leaks_its_buffer() {
    let freed = Rc::new(RefCell::new(Vec::new()));
    let mut rig = Rig::<Tree, Plain, _, Buffer>::new(Burst::default().with_most(1));
    let (board, dma, cpu, at) = rig.parts();
    let mut map = |id, board: &mut Board| {
        let buffer = Buffer(id, Rc::clone(&freed));
        let memory = memory(0x10_0000, 64);
        dma.map_single(cpu, board, at, buffer, memory, Direction::ToDevice)
            .unwrap()
            .0
    };
    let (first, second) = (map(1, board), map(2, board));
    let Withheld = dma.unmap_single(cpu, board, at, first).unwrap();
    let error = dma.unmap_single(cpu, board, at, second).unwrap_err();
    assert!(matches!(&error.reason, UnmapReason::BurstFull(b) if b.buffer().0 == 2));
    drop(error);
    assert!(freed.borrow().is_empty(), "{freed:?}");
    dma.end_burst(cpu, board, at, Direction::ToDevice, drop)
        .unwrap();
    assert_eq!(*freed.borrow(), [1]);
}
