//! Fault injection at every allocation: after an error the layer is unchanged and every buffer is
//! returned.

use ringfence_dma::flush::{FlushPolicy, Strict};
use ringfence_dma::{
    DmaSegment, MapError, MapMultiRequest, MapReason, SgLimits, SgRequest, UnmapFailure,
};
use ringfence_iova::AllocError;
use ringfence_types::{Direction, FrameSource, InvalidationError, PhysRange};

use crate::rig::*;

/// The kinds of map calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Single,
    List,
    Multi,
    Coherent,
}

const SHAPES: [Shape; 4] = [Shape::Single, Shape::List, Shape::Multi, Shape::Coherent];

/// Pieces that together need a second and a third leaf table.
fn pieces() -> [PhysRange; 3] {
    [
        memory(0x10_0000, 0x180 * PAGE),
        memory(0x40_0010, 0x100 * PAGE),
        memory(0x80_0000, 0x40 * PAGE - 7),
    ]
}

/// Maps and, on success, unmaps. Checks that the returned buffers are those passed in.
fn perform<A: Make, T: MakeTable>(
    rig: &mut Rig<A, T, Strict, u64>,
    shape: Shape,
) -> Result<(), MapError>
where
    Strict: FlushPolicy<Space<A, T>, u64, Outcome = ringfence_dma::Released<u64>>,
{
    let (board, dma, cpu, at) = rig.parts();
    let pieces = pieces();
    match shape {
        Shape::Single => {
            let memory = memory(0x20_0800, 0x300 * PAGE);
            match dma.map_single(cpu, board, at, 7, memory, Direction::ToDevice) {
                Ok((mapping, _)) => {
                    assert_eq!(dma.unmap_single(cpu, board, at, mapping).unwrap().0, 7);
                    Ok(())
                }
                Err((buffer, error)) => {
                    assert_eq!((buffer, error.buffer), (7, Some(memory)));
                    Err(error)
                }
            }
        }
        Shape::List => {
            let mut out = [DmaSegment {
                range: ringfence_types::IovaRange::new(ringfence_types::Iova::ZERO, 1).unwrap(),
            }; 3];
            let limits = SgLimits::default();
            let direction = Direction::FromDevice;
            match dma.map_sg(
                cpu,
                board,
                at,
                SgRequest {
                    buffer: 8,
                    pieces: &pieces,
                    direction,
                    limits,
                    out: &mut out,
                },
            ) {
                Ok((mapping, count)) => {
                    assert_eq!(count, 3);
                    assert_eq!(dma.unmap_sg(cpu, board, at, mapping).unwrap().0, 8);
                    Ok(())
                }
                Err((buffer, error)) => {
                    assert_eq!((buffer, error.buffer), (8, Some(pieces[0])));
                    Err(error)
                }
            }
        }
        Shape::Multi => {
            let requests = |base: u64| {
                (pieces.iter().zip(base..))
                    .map(|(memory, buffer)| MapMultiRequest {
                        buffer,
                        memory: *memory,
                        direction: Direction::Bidirectional,
                    })
                    .collect::<Vec<_>>()
            };
            match dma.map_multi(cpu, board, at, requests(20)) {
                Ok(mappings) => {
                    let mut back = Vec::new();
                    dma.unmap_multi(cpu, board, at, mappings, |b| back.push(b))
                        .unwrap();
                    assert_eq!(back, [20, 21, 22]);
                    Ok(())
                }
                Err((back, error)) => {
                    let names: Vec<_> = back.iter().map(|r| (r.buffer, r.memory)).collect();
                    let sent: Vec<_> = requests(20).iter().map(|r| (r.buffer, r.memory)).collect();
                    assert_eq!(names, sent);
                    Err(error)
                }
            }
        }
        Shape::Coherent => {
            let memory = dma.alloc_coherent(cpu, board, at, 0x20)?;
            dma.free_coherent(cpu, board, at, memory).unwrap();
            Ok(())
        }
    }
}

fn fresh<A: Make, T: MakeTable>() -> Rig<A, T, Strict, u64>
where
    Strict: FlushPolicy<Space<A, T>, u64, Outcome = ringfence_dma::Released<u64>>,
{
    let mut rig = Rig::new(Strict);
    // A live mapping that must survive.
    let direction = Direction::ToDevice;
    let kept = rig.dma.map_single(
        &mut rig.cpu,
        &mut rig.board,
        &rig.at,
        1,
        memory(0x3000, 100),
        direction,
    );
    drop(kept);
    rig
}

fn frames_run_out<A: Make, T: MakeTable>()
where
    Strict: FlushPolicy<Space<A, T>, u64, Outcome = ringfence_dma::Released<u64>>,
{
    for shape in SHAPES {
        let mut clean = fresh::<A, T>();
        let asked = clean.board.frames.requests();
        perform(&mut clean, shape).unwrap();
        let asked = clean.board.frames.requests() - asked;
        assert!(asked > 0);
        for nth in 0..asked {
            let mut rig = fresh::<A, T>();
            let (state, words) = (rig.state(), rig.board.words());
            rig.board.frames.fail_after(nth);
            let error = perform(&mut rig, shape).unwrap_err();
            let expected = if shape == Shape::Coherent && nth < 0x20 {
                MapReason::OutOfMemory
            } else {
                MapReason::Table(ringfence_pgtable::MapError::OutOfFrames)
            };
            assert_eq!(error.reason, expected, "{shape:?} {nth}");
            assert_eq!(error.device, DEVICE);
            assert_eq!(rig.state(), state, "{shape:?} {nth}");
            rig.assert_no_frame_lost();
            if shape == Shape::Single {
                assert_eq!(rig.board.words(), words, "{shape:?} {nth}");
            }
            rig.board.frames.recover();
            perform(&mut rig, shape).unwrap();
            assert_eq!(rig.state(), state);
            rig.assert_no_frame_lost();
        }
    }
}

#[test]
fn out_of_table_frames() {
    frames_run_out::<Tree, Plain>();
    frames_run_out::<Product, Cached>();
    frames_run_out::<Tree, Gas>();
    frames_run_out::<Bits, Plain>();
}

#[test]
fn out_of_addresses() {
    for shape in SHAPES {
        for error in [
            AllocError::OutOfMemory,
            AllocError::NeedsFlush,
            AllocError::Exhausted {
                pages: 1,
                limit: ringfence_types::Pfn::MAX,
            },
        ] {
            for nth in 0..if shape == Shape::Multi { 3 } else { 1 } {
                let mut rig = fresh::<Tree, Plain>();
                let (state, words) = (rig.state(), rig.board.words());
                rig.accounts().fail_after(nth, error);
                let refused = perform(&mut rig, shape).unwrap_err();
                let expected = |reason| match error {
                    // The domain was flushed, and no address became free.
                    AllocError::NeedsFlush => {
                        matches!(reason, MapReason::FlushRetriesExhausted { .. })
                    }
                    other => reason == MapReason::Alloc(other),
                };
                assert!(expected(refused.reason), "{shape:?}: {refused}");
                assert_eq!(rig.state(), state);
                if shape != Shape::Multi {
                    assert_eq!(rig.board.words(), words);
                }
                rig.accounts().fail.set(None);
                perform(&mut rig, shape).unwrap();
                assert_eq!(rig.state(), state);
                rig.assert_no_frame_lost();
            }
        }
    }
}

/// If both the map and the invalidation that should undo it fail, the layer reuses nothing that a
/// device may reach, and reports it.
#[test]
fn a_roll_back_that_fails_is_reported() {
    for (trouble, expected) in [
        (InvalidationFailure::Full, InvalidationError::QueueFull),
        (InvalidationFailure::Failed, InvalidationError::Failed),
    ] {
        for shape in [Shape::List, Shape::Multi, Shape::Coherent] {
            // The bitmap allocates upwards: the first piece fits into the existing leaf table, the
            // next one does not.
            let mut rig = fresh::<Bits, Plain>();
            let (board, dma, cpu, at) = rig.parts();
            if shape == Shape::Coherent {
                let filler = memory(0x10_0000, 0x1f0 * PAGE);
                let filler = dma.map_single(cpu, board, at, 9, filler, Direction::ToDevice);
                drop(filler);
                // Frames freed in descending order become separate pieces.
                let taken: Vec<_> = (0..0x20)
                    .map(|_| board.frames.alloc_zeroed().unwrap())
                    .collect();
                taken.iter().for_each(|frame| board.frames.free(*frame));
            }
            let frames = if shape == Shape::Coherent { 0x20 } else { 0 };
            rig.board.frames.fail_after(frames);
            rig.board.port.fail(0, usize::MAX / 2, trouble);
            let before = rig.state();
            let out = rig.board.frames.outstanding() as u64;
            let error = perform(&mut rig, shape).unwrap_err();
            assert_eq!(
                error.reason,
                MapReason::RollbackFailed(UnmapFailure::NotFlushed(expected)),
                "{shape:?}"
            );
            assert!(!rig.board.port.log.is_empty());
            // The addresses are leaked, and no leaf refers to the memory. For coherent memory, the
            // frames are leaked too.
            let after = rig.state();
            assert_eq!(after.leaves, before.leaves);
            assert!(after.ranges.len() > before.ranges.len(), "{shape:?}");
            assert_eq!(rig.board.frames.outstanding() as u64, out + frames);
        }
    }
}
