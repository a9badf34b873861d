//! The same in the modes of `compare`: TCP_STREAM's reuse of pages, replayed.

use ringfence_trace::{
    Chunk, DeviceIndex, Devices, MapClass, MapFlags, MappingId, Op, OpKind, SegmentSpan,
};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use super::counted;
use super::rig::PAGE;
use crate::compare::{Options, runner};
use crate::error::LabError;
use crate::experiments::finding::Findings;
use crate::modes::Mode;
use crate::plan::{Plan, Planner};

const MODES: [&str; 3] = ["pviommu", "pviommu+rtc", "pviommu+rtc+hopt"];
/// What the document's benchmark takes, in nanoseconds.
const DURATION: u64 = 10_000_000_000;
/// The first page: with its neighbours in one table of the second stage.
const FIRST: u64 = 512;

/// `creates` mappings, one after the other, of `pages` pages in turns.
fn stream(creates: u64, pages: u64) -> Result<Chunk, LabError> {
    let mut chunk = Chunk::default();
    for number in 0..creates {
        let page = FIRST + number % pages.max(1);
        let piece = PhysRange::new(PhysAddr::new(page * PAGE), PAGE);
        chunk
            .segments
            .push(piece.ok_or(LabError::Internal("a page"))?);
        let id = MappingId(0);
        let map = OpKind::Map {
            id,
            direction: Direction::FromDevice,
            class: MapClass::Single,
            flags: MapFlags::NONE,
            segments: SegmentSpan {
                first: number as u32,
                count: 1,
            },
        };
        let apart = DURATION / creates.max(1);
        for (half, kind) in [map, OpKind::Unmap { id }].into_iter().enumerate() {
            chunk.ops.push(Op {
                time: Nanos(DURATION + number * apart + half as u64 * apart / 2),
                device: DeviceIndex(0),
                cpu: 0,
                lines: 1,
                kind,
            });
        }
    }
    Ok(chunk)
}

/// What the host does for them in each mode.
pub(super) fn in_modes(found: &mut Findings, creates: u64, pages: u64) -> Result<(), LabError> {
    let options = Options {
        modes: Vec::new(),
        repetitions: 0,
        hostile: false,
        ..Options::new()
    };
    let chunk = stream(creates, pages)?;
    for name in MODES {
        let mode = Mode::find(name).ok_or(LabError::Internal("a mode"))?;
        let mut judge = runner(&mode, &options)?.metered;
        let mut planner =
            Planner::new().with_cycles(options.cycling.of(&mode).map(|of| of.cycle_ns));
        let mut plan = Plan::default();
        planner.plan(&chunk, &mut plan);
        planner.finish(&mut plan);
        judge.run(&plan, &Devices::new())?;
        let outcomes = judge.finish(&planner.alive());
        let tally = outcomes.tally;
        if outcomes.refused_maps > 0 || tally.violations() + tally.false_faults > 0 {
            return Err(LabError::Internal("a device that misses its buffers"));
        }
        let (traffic, lookups) = (outcomes.traffic, outcomes.traffic.lookups);
        for (what, value) in [
            ("requests", traffic.requests),
            ("walks of the second stage", lookups.walks),
            ("words of the second stage read", lookups.reads),
            ("frames that the guest waits for", lookups.frames_awaited),
        ] {
            let what = format!("{creates} mappings of {pages} pages in {name}: {what}");
            found.push(counted(what, "", value as f64));
        }
    }
    Ok(())
}
