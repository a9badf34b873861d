//! Data flow through the layers: the exact order of events for a two-segment, 9000-byte scatterlist
//! towards the device, in every flush policy and on a failure half-way. `docs/WALK.md` names the
//! functions of each step; the last test checks that they exist.

mod rig;
mod traced;

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{
    Burst, Deferred, FlushQueue, PerCpuQueue, PerWrap, QueueConfig, Strict,
};
use ringfence_dma::{DmaSegment, MapReason, SgLimits};
use ringfence_pgtable::MapError;
use ringfence_types::{
    Access, CachedLevels, Direction, DomainId, FaultReason, Invalidation, Iova, IovaRange, Nanos,
    Pfn, PfnRange,
};

use crate::bench::memory;
use rig::{Board, FIRST, Walk, bits, tree};
use traced::Event::{self, *};

const DOMAIN: DomainId = DomainId::new(1);

/// Returns the invalidation of exactly the four pages.
fn by_address() -> Invalidation {
    Invalidation::Pages {
        domain: DOMAIN,
        range: PfnRange::new(Pfn::new(FIRST), 4).unwrap(),
        levels: CachedLevels::Leaves,
    }
}

/// Returns the expected events up to unmap's return. Policies differ only in the events after
/// `Clear`.
fn expected(find_at_unmap: bool, rest: &[Event]) -> Vec<Event> {
    let mut events = vec![
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Install(FIRST + 2, 2),
        Sync,
        Reach(0x10_0800, 4100),
        Reach(0x20_0010, 4900),
        Stop(FaultReason::WriteDenied),
    ];
    if find_at_unmap {
        events.push(Find(FIRST));
    }
    events.push(Clear(FIRST, 4));
    events.extend_from_slice(rest);
    events
}

#[test]
fn strict() {
    let mut walk = Walk::new(tree(), Strict);
    let rest = [
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Back(7),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
}

#[test]
fn deferred() {
    let flush = Deferred::with(10, 1000, RefCell::new);
    let mut walk = Walk::new(tree(), flush);
    // The driver has the buffer back, and the device still reaches it.
    let rest = [Sync, Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(999);
    dma.tick(cpu, board).unwrap();
    assert_eq!(walk.take(), []);
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(1000);
    dma.tick(cpu, board).unwrap();
    let done = [Sync, Submit(Invalidation::Global), Complete, Free(FIRST, 4)];
    assert_eq!(walk.take(), done);
}

#[test]
fn per_cpu_queue() {
    type One = RefCell<FlushQueue>;
    let config = QueueConfig {
        entries: 10,
        timeout_ns: 1000,
    };
    let flush = PerCpuQueue::<One, RefCell<Vec<std::sync::Arc<One>>>>::new(
        config,
        RefCell::new,
        RefCell::new,
    );
    let mut walk = Walk::new(tree(), flush);
    let rest = [Sync, Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board, dma, cpu, ..
    } = &mut walk;
    board.now = Nanos(1000);
    dma.tick(cpu, board).unwrap();
    let done = [
        Sync,
        Submit(Invalidation::Domain(DOMAIN)),
        Complete,
        Free(FIRST, 4),
    ];
    assert_eq!(walk.take(), done);
}

#[test]
fn burst() {
    let mut walk = Walk::new(tree(), Burst::default());
    let rest = [Withheld, Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let log = Rc::clone(&walk.log);
    let Walk {
        board,
        dma,
        cpu,
        at,
        ..
    } = &mut walk;
    dma.end_burst(cpu, board, at, Direction::ToDevice, |b| {
        log.borrow_mut().push(Back(b))
    })
    .unwrap();
    walk.access(Pfn::new(FIRST).iova(), 1, Access::Read);
    let done = [
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Back(7),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.take(), done);
}

#[test]
fn per_wrap() {
    let mut walk = Walk::new(bits(), PerWrap);
    // Free at once, but not reused before the flush that the second wrap requires.
    let rest = [Sync, Free(FIRST, 4), Back(7), Reach(0x10_0800, 1)];
    assert_eq!(walk.there_and_back(), expected(true, &rest));
    let Walk {
        board,
        dma,
        cpu,
        at,
        ..
    } = &mut walk;
    let mut map = |board: &mut Board| {
        let buffer = memory(0, 4 * 4096);
        let made = dma.map_single(cpu, board, at, 8, buffer, Direction::ToDevice);
        assert!(made.is_ok());
    };
    map(board);
    map(board);
    let done = [
        Alloc(FIRST + 4, 4),
        Install(FIRST + 4, 4),
        Sync,
        Submit(Invalidation::Domain(DOMAIN)),
        Complete,
        Alloc(FIRST, 4),
        Install(FIRST, 4),
    ];
    assert_eq!(walk.take(), done);
}

/// The second piece finds no frame for its leaf table. The first piece is cleared and purged before
/// its addresses are free again.
#[test]
fn rolled_back_half_way() {
    let mut walk = Walk::new(tree(), Strict);
    // The root exists; frames suffice for two tables above the leaves, and the first leaf table.
    walk.board.frames.fail_after(3);
    let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
    let mut out = [DmaSegment { range: nothing }; 2];
    let (buffer, error) = walk.map(SgLimits::default(), &mut out).unwrap_err();
    assert_eq!(buffer, 7);
    assert_eq!(error.reason, MapReason::Table(MapError::OutOfFrames));
    walk.access(Pfn::new(FIRST).iova(), 1, Access::Read);
    let done = [
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Refuse(MapError::OutOfFrames),
        Clear(FIRST, 2),
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
        Stop(FaultReason::NotPresent),
    ];
    assert_eq!(walk.take(), done);
    // With frames again, the map works as without a failure.
    walk.board.frames.recover();
    assert_eq!(walk.there_and_back().len(), expected(true, &[]).len() + 6);
}

/// The output has no room for the device's segments: refused before any event if that is certain,
/// and undone otherwise.
#[test]
fn rolled_back_for_want_of_room() {
    let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
    let mut walk = Walk::new(tree(), Strict);
    let mut map = |limits, room: usize| {
        let mut out = vec![DmaSegment { range: nothing }; room];
        let (_, error) = walk.map(limits, &mut out).unwrap_err();
        assert_eq!(error.reason, MapReason::TooManySegments);
        walk.take()
    };
    assert_eq!(map(SgLimits::default(), 1), []);
    let boundary = SgLimits {
        max_bytes: 65536,
        boundary: Some(4096),
    };
    let undone = [
        Alloc(FIRST, 4),
        Install(FIRST, 2),
        Install(FIRST + 2, 2),
        Sync,
        Find(FIRST),
        Clear(FIRST, 4),
        Sync,
        Submit(by_address()),
        Complete,
        Free(FIRST, 4),
    ];
    assert_eq!(map(boundary, 3), undone);
}

/// Every file and function that `docs/WALK.md` names exists.
#[test]
fn page_names_existing_functions() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let text = std::fs::read_to_string(format!("{root}/docs/WALK.md")).unwrap();
    let mut steps = 0;
    for line in text.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, step, file, functions, ..] = cells[..] else {
            continue;
        };
        if step.parse::<u32>().is_err() {
            continue;
        }
        let Some(file) = file.strip_prefix('`').and_then(|f| f.strip_suffix('`')) else {
            continue;
        };
        let source = std::fs::read_to_string(format!("{root}/crates/{file}"))
            .unwrap_or_else(|_| panic!("{file} does not exist: {line}"));
        for function in functions
            .split(',')
            .map(|name| name.trim().trim_matches('`'))
        {
            let defined = format!("fn {function}");
            let found = source
                .match_indices(&defined)
                .any(|(at, _)| source[at + defined.len()..].starts_with(['(', '<']));
            assert!(found, "{file} has no {function}: {line}");
            steps += 1;
        }
    }
    assert!(steps >= 15, "{steps} steps");
}
