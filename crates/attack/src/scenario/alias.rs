//! A10: a page with two mappings is freed after the unmap of one.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Nanos, PhysAddr};

use super::ScenarioResult;
use super::window::SCHEDULE;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Data of the kernel in the next allocation of the page.
const SECRET: u64 = 0x6b65_726e_656c_2121;

/// The driver maps a page twice, unmaps it once and frees it. The page then holds kernel data. The
/// device uses the mapping that remains. The oracle counts the references of mappings to the page
/// at the moment it is freed: a correct driver leaves none.
///
/// The second trial frees the page after both unmaps. Its last success measures the mode alone.
pub(crate) fn alias(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    let (evidence, references) = freed_after(mode, 1)?;
    executed.trial("freed after one unmap", evidence);
    executed
        .notes
        .push(format!("mapping references at the free: {references}"));
    let (evidence, references) = freed_after(mode, 2)?;
    executed.comparison("freed after both unmaps", evidence);
    executed
        .notes
        .push(format!("after both unmaps: {references}"));
    Ok(Found::Executed(executed))
}

/// Frees the page after `unmaps` of its two mappings have ended. Returns the counts of the attacks
/// through both, and the mapping references at the free.
fn freed_after(mode: &Mode, unmaps: usize) -> Result<(Evidence, u64), LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let page = memory(0x10_0000, 4096)?;
    let both = Direction::Bidirectional;
    let ids = [bench.map(0, page, both)?, bench.map(0, page, both)?];
    let mut iovas = Vec::new();
    for id in ids {
        bench.use_buffer(id)?;
        iovas.push(bench.range(id)?.start());
    }
    for id in &ids[..unmaps] {
        bench.release(*id)?;
    }
    let references = bench.oracle.reallocate(&page);
    bench.store(PhysAddr::new(0x10_0000), SECRET)?;
    let device = bench.requester(0)?;
    for after in SCHEDULE {
        bench.advance_to(Nanos(after));
        for iova in &iovas {
            let reached = bench.access(device, *iova, 8, Access::Read);
            let at = reached.as_ref().and_then(|reached| reached.ranges.first());
            let read = at.map(|range| range.start());
            let read = read.map(|at| bench.load(at)).transpose()?;
            // The oracle and the data agree: the access counts if it read the kernel's data.
            let verdict = reached.as_ref().map(|reached| &reached.verdict);
            evidence.count(verdict.filter(|_| read == Some(SECRET)));
        }
    }
    // The stopped accesses are no false faults: the page no longer belongs to the driver.
    bench.take_false_faults(&mut Evidence::default());
    Ok((evidence, references))
}
