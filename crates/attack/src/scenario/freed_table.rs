//! A20: a page of the I/O page table is freed and holds data that look like entries.

use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Iova};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Memory that the forged entries point to.
const TARGET: u64 = 0x7777_7000;
/// Frames that the attacker's data take from the pool that the table's frames come from.
const FRAMES: usize = 8;

/// Unmaps the only buffer of a table page, fills freed frames with forged entries, and accesses
/// the other pages of the same table. Only a walk cache that still holds the freed table
/// translates them.
pub(crate) fn freed_table(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(Found::NotApplicable("the table never changes"));
    }
    if mode.has_rings() {
        return Ok(Found::NotApplicable(
            "a ring's table exists as long as its device",
        ));
    }
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let id = bench.map(0, memory(0x10_0000, 4096)?, Direction::Bidirectional)?;
    bench.use_buffer(id)?;
    let own = bench.range(id)?.start().get();
    bench.release(id)?;
    for _ in 0..FRAMES {
        let frame = bench.machine().alloc_frame()?;
        for word in 0..512 {
            bench.store(frame.wrapping_add(word * 8), TARGET | 3)?;
        }
    }
    let base = own & !0x1f_ffff;
    for page in (0..512).map(|page| base + page * 4096) {
        // The page itself may be in the IOTLB, which is A02.
        if page != own {
            bench.attack(&mut evidence, 0, Iova::new(page), 8, Access::Read)?;
        }
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("forged entries", evidence);
    Ok(Found::Executed(executed))
}
