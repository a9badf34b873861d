//! A28, A29: attacks on a cache of mappings.

use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Nanos};

use super::ScenarioResult;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

const NO_CACHE: Found = Found::NotApplicable("the mode keeps no unmapped mappings");
const S: u64 = 1_000_000_000;

/// A28: a page is mapped for the device to write, released, and mapped for the device to read. A
/// page is mapped alone and then as the first of four. The attack succeeds if the device writes
/// the second mapping of the first page. A stopped access to the four pages is a false fault.
pub(crate) fn direction_and_range(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    if !bench.space_traits().caches_unmapped {
        return Ok(NO_CACHE);
    }
    let mut evidence = Evidence::default();
    let page = memory(0x10_0000, 4096)?;
    let written = bench.map(0, page, Direction::FromDevice)?;
    bench.use_buffer(written)?;
    bench.release(written)?;
    let read = bench.map(0, page, Direction::ToDevice)?;
    let iova = bench.range(read)?.start();
    bench.attack(&mut evidence, 0, iova, 64, Access::Write)?;
    bench.attack(&mut evidence, 0, iova, 64, Access::Read)?;
    let alone = bench.map(0, memory(0x20_0000, 4096)?, Direction::ToDevice)?;
    bench.release(alone)?;
    let four = bench.map(0, memory(0x20_0000, 4 * 4096)?, Direction::ToDevice)?;
    let start = bench.range(four)?.start();
    for page in 0..4 {
        let iova = start.wrapping_add(page * 4096);
        bench.attack(&mut evidence, 0, iova, 64, Access::Read)?;
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("reuse in another direction or length", evidence);
    Ok(Found::Executed(executed))
}

/// A29: one of two users of a page releases it, and cycles end. The second user's device must keep
/// its access. The attack succeeds if the access is stopped.
pub(crate) fn two_users(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    if !bench.space_traits().caches_unmapped {
        return Ok(NO_CACHE);
    }
    let mut evidence = Evidence::default();
    let first = bench.map(0, memory(0x10_0000, 64)?, Direction::FromDevice)?;
    let second = bench.map(0, memory(0x10_0800, 64)?, Direction::FromDevice)?;
    bench.release(first)?;
    let iova = bench.range(second)?.start();
    let device = bench.requester(0)?;
    for second in 1..=60 {
        bench.advance_to(Nanos(second * S));
        let reached = bench.access(device, iova, 64, Access::Write);
        evidence.count_if(reached.is_none(), 0);
    }
    bench.take_false_faults(&mut evidence);
    let mut executed = Executed::default();
    executed.trial("access of the second user", evidence);
    Ok(Found::Executed(executed))
}
