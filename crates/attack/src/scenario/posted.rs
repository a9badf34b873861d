//! A23: a posted write reaches memory after the unmap.

use ringfence_devices::posted::{PostingUnit, WriteDraining};
use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::{Translate, Translation};
use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Safety};
use ringfence_types::{
    Access, Direction, Fault, FaultReason, Invalidation, InvalidationError, Invalidator, Iova,
    PhysMemory, PhysRange, RequesterId, Ticket,
};

use super::{ScenarioResult, sharers};
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// The device posts a write to a mapped buffer, the driver unmaps the buffer, and the write reaches
/// memory. The attack succeeds if the driver had the buffer back before. With draining, an
/// invalidation completes only after the writes before it.
pub(crate) fn posted_write(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    let [drained, _] = in_flight(mode, WriteDraining::Drained, &[0])?;
    executed.trial("invalidation drains writes", drained);
    if mode.flush.has_cache() {
        let [held, released] = in_flight(mode, WriteDraining::Drained, &[0, 0x800])?;
        if mode.safety() >= Safety::Strict {
            executed.beyond_bound += released.successes;
        }
        executed.trial(sharers::HELD, held);
        executed.trial(sharers::RELEASED, released);
    }
    let [late, _] = in_flight(mode, WriteDraining::NotDrained, &[0])?;
    executed.comparison("invalidation without draining", late);
    Ok(Found::Executed(executed))
}

/// The mode's IOMMU in front of the posting buffers. The bench translates a write before it is
/// posted, and reports the invalidations that the mode's IOMMU has completed.
#[derive(Default)]
struct Translated(Vec<PhysRange>);

impl Translate for Translated {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        _: &M,
        device: RequesterId,
        iova: Iova,
        _: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        Translation::many(&self.0).ok_or(Fault {
            device,
            iova,
            access,
            reason: FaultReason::NotPresent,
        })
    }
}

impl Invalidator for Translated {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

/// The writes that have reached memory.
#[derive(Default)]
struct Arrived(Vec<PhysRange>);

impl Observer for Arrived {
    fn allowed(&mut self, _: &DmaRequest, ranges: &[PhysRange]) {
        self.0.extend_from_slice(ranges);
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

/// Maps a buffer at each of `offsets` in a page. Posts a write to each, and unmaps it. Returns the
/// counts of the first and of the second.
fn in_flight(
    mode: &Mode,
    draining: WriteDraining,
    offsets: &[u64],
) -> Result<[Evidence; 2], LabError> {
    let mut bench = Bench::new(mode)?;
    let behind = bench.machine().memory();
    let (unit, arrived) = (Translated::default(), Arrived::default());
    let mut posting = PostingUnit::new(unit, &*behind, arrived, draining, 64);
    let mut evidence = [Evidence::default(); 2];
    let (device, direction) = (bench.requester(0)?, Direction::FromDevice);
    for round in 0..20 {
        let page = 0x10_0000 + round * 4096;
        let buffers = offsets.iter().map(|offset| {
            let buffer = memory(page + offset, 2048)?;
            bench.map(0, buffer, direction)
        });
        let ids = buffers.collect::<Result<Vec<_>, _>>()?;
        if let [one, other] = ids[..]
            && !sharers::share(&bench, one, other)?
        {
            continue;
        }
        for (id, evidence) in ids.into_iter().zip(&mut evidence) {
            let iova = bench.range(id)?.start();
            if let Some(reached) = bench.access(device, iova, 64, Access::Write) {
                posting.unit().0 = reached.ranges;
                let posted = posting.post(device, iova, &[0x5a; 64]);
                posted.map_err(|_| LabError::Internal("a translated write that is refused"))?;
            }
            let mut invalidated = || {
                let completed = posting.submit(Invalidation::Global);
                let _ = completed.and_then(|ticket| posting.poll(ticket));
            };
            bench.unmap_with(id, &mut invalidated)?;
            if !bench.is_back(id)? {
                bench.end_burst_with(0, direction, &mut invalidated)?;
            }
            // The driver uses its buffer from here on.
            posting.observer().0.clear();
            posting.deliver(usize::MAX);
            let late = posting.observer().0.first();
            let (oracle, now) = (&bench.oracle, bench.now());
            let verdict = late.map(|range| oracle.judge(device, range, Access::Write, now));
            evidence.count(verdict.as_ref());
            bench.end_burst(0, direction)?;
        }
    }
    bench.take_false_faults(&mut evidence[0]);
    Ok(evidence)
}
