//! A07, A08, A09, A19, A34: bytes outside the buffer in mapped pages.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Iova, PhysAddr};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};
use crate::expect::Kind;
use crate::shipped::{BEYOND_MASK, Untranslated};

/// Word that the driver keeps in the page of a buffer.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
/// Bytes of a slot of the bounce pool.
const SLOT: u64 = 2048;
/// Word that the device writes.
const FORGED: u64 = 0xbad0_bad0_bad0_bad0;

/// A07: reads of another object in the page of a buffer.
pub(crate) fn read_beside(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let id = bench.map(0, memory(0x10_0800, 64)?, Direction::ToDevice)?;
    bench.use_buffer(id)?;
    let range = bench.range(id)?;
    let before = Iova::new(range.start().get().wrapping_sub(1));
    for iova in [before, range.last().wrapping_add(1)] {
        bench.attack(&mut evidence, 0, iova, 1, Access::Read)?;
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("read beside the buffer", evidence);
    Ok(Found::Executed(executed))
}

/// A08: a callback pointer follows a receive buffer in its page. The attack succeeds if the
/// driver loads another pointer than it stored.
pub(crate) fn overwrite_callback(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let callback = PhysAddr::new(0x10_0840);
    bench.store(callback, SECRET)?;
    let id = bench.map(0, memory(0x10_0800, 64)?, Direction::FromDevice)?;
    bench.use_buffer(id)?;
    let beside = bench.range(id)?.last().wrapping_add(1);
    bench.device_write(0, beside, FORGED)?;
    let changed = bench.load(callback)? != SECRET;
    evidence.count_if(changed, 8);
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("callback pointer", evidence);
    Ok(Found::Executed(executed))
}

/// A09: two buffers share a page. The device reaches the released one through the live one.
pub(crate) fn page_mate(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let released = bench.map(0, memory(0x10_0000, 64)?, Direction::ToDevice)?;
    let live = bench.map(0, memory(0x10_0800, 64)?, Direction::ToDevice)?;
    bench.use_buffer(released)?;
    bench.use_buffer(live)?;
    bench.release(released)?;
    let start = bench.range(live)?.start().get();
    bench.attack(
        &mut evidence,
        0,
        Iova::new(start.wrapping_sub(0x800)),
        1,
        Access::Read,
    )?;
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("through the live buffer", evidence);
    Ok(Found::Executed(executed))
}

/// A19: accesses that begin inside a buffer and end after it: in the buffer's last page, and in
/// later pages.
pub(crate) fn straddle(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for (name, lengths) in [
        ("within the page", &[0x81, 0x100][..]),
        ("across the page", &[0x101, 0x1000, 0x2000, 1 << 20][..]),
    ] {
        let mut bench = Bench::new(mode)?;
        let mut evidence = Evidence::default();
        let id = bench.map(0, memory(0x10_0f00, 0x80)?, Direction::Bidirectional)?;
        bench.use_buffer(id)?;
        let start = bench.range(id)?.start();
        for bytes in lengths {
            for access in [Access::Read, Access::Write] {
                bench.attack(&mut evidence, 0, start, *bytes, access)?;
            }
        }
        // Without translation, such an access reaches all of memory.
        if mode.translates() {
            wrap_around(&mut bench, &mut evidence, start)?;
        }
        bench.take_false_faults(&mut evidence);
        executed.trial(name, evidence);
        // A page table bounds the access at the end of the page.
        executed.beyond_bound = evidence.successes;
    }
    Ok(Found::Executed(executed))
}

/// Accesses whose end exceeds the address space, so that an addition of the length wraps.
fn wrap_around(bench: &mut Bench, evidence: &mut Evidence, start: Iova) -> Result<(), LabError> {
    let to_the_end = u64::MAX - start.get();
    for bytes in [to_the_end + 1, u64::MAX] {
        let device = bench.requester(0)?;
        let reached = bench.access(device, start, bytes, Access::Read);
        evidence.count(reached.as_ref().map(|reached| &reached.verdict));
    }
    Ok(())
}

/// A34: the slot of a small buffer holds bytes of its former owner. The attack succeeds if the
/// device loads them.
pub(crate) fn residue(mode: &Mode) -> ScenarioResult {
    if Kind::of(mode) == Kind::None {
        return Ok(Found::NotApplicable(
            "the device addresses memory itself: a buffer has no slot",
        ));
    }
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for offset in (0..0x100).step_by(8) {
        bench.store(PhysAddr::new(0x10_0000 + offset), SECRET)?;
    }
    let id = bench.map(0, memory(0x10_0000, 64)?, Direction::ToDevice)?;
    bench.use_buffer(id)?;
    let start = bench.range(id)?.start();
    let device = bench.requester(0)?;
    for offset in (64..0x100).step_by(8) {
        let reached = bench.access(device, start.wrapping_add(offset), 8, Access::Read);
        let from = reached.and_then(|reached| reached.ranges.first().map(|range| range.start()));
        let read = from.map(|at| bench.load(at)).transpose()?;
        evidence.count_if(read == Some(SECRET), 8);
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("padding of the slot", evidence);
    executed.comparison("bounce pool", bounced_residue(mode)?);
    Ok(Found::Executed(executed))
}

/// The layer's bounce pool gives the slot of a large buffer to a small one. The mode maps the slot,
/// and the device reads the bytes behind the small copy.
fn bounced_residue(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let mut layer = Untranslated::new(&mut bench)?;
    for offset in (0..SLOT).step_by(8) {
        bench.store(PhysAddr::new(BEYOND_MASK + offset), SECRET)?;
    }
    let (large, former) = layer.bounce(memory(BEYOND_MASK, SLOT)?, Direction::ToDevice)?;
    layer.free(large)?;
    let small = memory(BEYOND_MASK + 0x1_0000, 64)?;
    let (small, copy) = layer.bounce(small, Direction::ToDevice)?;
    // Other bytes behind the copy are no residue.
    if copy.start() == former.start() {
        let id = bench.map(0, copy, Direction::ToDevice)?;
        let start = bench.range(id)?.start();
        let device = bench.requester(0)?;
        for offset in (64..SLOT).step_by(8) {
            let reached = bench.access(device, start.wrapping_add(offset), 8, Access::Read);
            let at = reached.and_then(|reached| reached.ranges.first().map(|range| range.start()));
            let read = at.map(|at| bench.load(at)).transpose()?;
            evidence.count_if(read == Some(SECRET), 8);
        }
    }
    layer.free(small)?;
    Ok(evidence)
}
