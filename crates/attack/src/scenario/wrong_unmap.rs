//! A25: unmaps of a defective driver.

use ringfence_lab::modes::Mode;
use ringfence_types::{Direction, Nanos};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// The reasons why the layer stops the wrong unmaps.
const NOTE: &str = "unmap compares the domain or ring of the token with the caller's; the token \
    is consumed, so a double unmap and another length need Mapping::claim, which no mode's layer \
    calls";

/// The driver of one device unmaps a buffer of another. The layer must refuse, and the buffer's
/// own device must keep its access. An unmap consumes its token, and the token holds the length. A
/// double unmap and an unmap of another length therefore need a mapping that the driver rebuilds
/// from an address, with `Mapping::claim`; no mode's layer does so.
pub(crate) fn foreign_unmap(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(Found::NotApplicable("an unmap changes nothing"));
    }
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for round in 0..20 {
        // The other device has a mapping too, in most modes at the same address.
        let own = memory(0x80_0000 + round * 4096, 64)?;
        let own = bench.map(1, own, Direction::FromDevice)?;
        let id = bench.map(
            0,
            memory(0x10_0000 + round * 4096, 64)?,
            Direction::FromDevice,
        )?;
        bench.use_buffer(id)?;
        let refused = bench.unmap_as(id, 1)?;
        evidence.count_if(!refused, 0);
        bench.end_burst(1, Direction::FromDevice)?;
        bench.advance_to(Nanos(bench.now().0 + 1_000));
        let iova = bench.range(id)?.start();
        let device = bench.requester(0)?;
        let reached = bench.access(device, iova, 64, ringfence_types::Access::Write);
        // The buffer is still mapped, so a stopped access is a success of the attack as well.
        evidence.count_if(refused && reached.is_none(), 0);
        bench.release(own)?;
    }
    let mut executed = Executed::default();
    executed.trial("unmap by another device", evidence);
    executed.notes.push(NOTE.to_owned());
    Ok(Found::Executed(executed))
}
