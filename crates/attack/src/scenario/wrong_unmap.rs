//! A25: unmaps of a defective driver.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, IovaRange, Nanos, PhysAddr};

use super::ScenarioResult;
use crate::bench::{Bench, ClaimOutcome, MapId, memory};
use crate::evidence::{Evidence, Executed, Found};

/// The interface of each attempt.
const NOTE: &str = "unmap compares the domain or ring of the token with the caller's, and consumes \
    the token; a second unmap and another length need Mapping::claim, which trusts the length";

/// The driver of one device unmaps a buffer of another. The layer must refuse, and the buffer's
/// own device must keep its access.
///
/// An unmap consumes its token, and the token holds the length. A driver that keeps addresses
/// instead rebuilds a token with `Mapping::claim`. It unmaps an address again, or rebuilds two
/// tokens of one mapping and unmaps both; both decide. For comparison, because `claim` trusts the
/// caller, it unmaps another length, and an address that another buffer has since.
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
    if mode.has_rings() {
        executed.trial("unmap in another ring", other_ring(mode)?);
    }
    executed.trial("second unmap", second_unmap(mode)?);
    executed.trial("mapping claimed twice", claimed_twice(mode)?);
    executed.notes.push(NOTE.to_owned());
    let (mut lengths, both) = (Evidence::default(), [(2, 1, "shorter"), (1, 2, "longer")]);
    for (pages, unmapped, name) in both {
        let note = other_length(mode, pages, unmapped, &mut lengths)?;
        executed
            .notes
            .push(format!("unmap of a {name} range: {note}"));
    }
    executed.comparison("claim with another length", lengths);
    executed.comparison("claim of a reused address", reused_address(mode)?);
    Ok(Found::Executed(executed))
}

/// The driver unmaps a buffer of one ring in another ring of the same device, which also has a
/// mapping at its first slot. The layer must refuse because of the ring, and both buffers must stay
/// mapped.
fn other_ring(mode: &Mode) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    for direction in Direction::ALL {
        for ring in Direction::ALL.into_iter().filter(|ring| *ring != direction) {
            let mut bench = Bench::new(mode)?;
            let kept = bench.map(0, memory(0x80_0000, 64)?, ring)?;
            let id = bench.map(0, memory(0x10_0000, 64)?, direction)?;
            let before = reach(&mut bench, [kept, id])?;
            let refused = bench.unmap_in_ring(id, ring)?;
            let changed = reach(&mut bench, [kept, id])? != before;
            evidence.count_if(!refused || changed || before[1].is_none(), 0);
        }
    }
    Ok(evidence)
}

/// The driver unmaps a mapping again, by its address. The layer must refuse, and a buffer beside it
/// must stay mapped.
fn second_unmap(mode: &Mode) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        let mut bench = Bench::new(mode)?;
        let kept = bench.map(0, memory(0x80_0000, 64)?, direction)?;
        let id = bench.map(0, memory(0x10_0000, 64)?, direction)?;
        bench.use_buffer(id)?;
        bench.release(id)?;
        let before = reach(&mut bench, [kept, id])?;
        let refused = bench.unmap_claimed(id, bench.range(id)?)? == ClaimOutcome::NotMapped;
        let changed = reach(&mut bench, [kept, id])? != before;
        evidence.count_if(!refused || changed, 0);
    }
    Ok(evidence)
}

/// The driver rebuilds two tokens of a live mapping and unmaps both. The layer must refuse the
/// second with the error that nothing is mapped there, and the device must keep the access that it
/// had before. A buffer beside the mapping must stay mapped.
fn claimed_twice(mode: &Mode) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    for direction in [Direction::ToDevice, Direction::FromDevice] {
        let mut bench = Bench::new(mode)?;
        let kept = bench.map(0, memory(0x80_0000, 64)?, direction)?;
        let id = bench.map(0, memory(0x10_0000, 64)?, direction)?;
        bench.use_buffer(id)?;
        let range = bench.range(id)?;
        let (first, second) = (bench.claim(id, range)?, bench.claim(id, range)?);
        // Buffers of a pool have no address that a driver can claim.
        let accepted = bench.unmap_claim(first) == ClaimOutcome::Accepted;
        if accepted == bench.space_traits().lends {
            return Err(LabError::Internal("an unexpected answer to a first claim"));
        }
        let before = reach(&mut bench, [kept, id])?;
        let refused = bench.unmap_claim(second) == ClaimOutcome::NotMapped;
        let changed = reach(&mut bench, [kept, id])? != before;
        evidence.count_if(!refused || changed, 0);
    }
    Ok(evidence)
}

/// Buffers that the driver maps until one gets the old address.
const REUSES: u64 = 16;

/// The driver keeps a claim over the unmap, until another buffer has the address. Succeeds if the
/// layer accepts it. No attempt if the address does not come back soon.
fn reused_address(mode: &Mode) -> Result<Evidence, LabError> {
    let (mut evidence, direction) = (Evidence::default(), Direction::FromDevice);
    let mut bench = Bench::new(mode)?;
    let id = bench.map(0, memory(0x10_0000, 64)?, direction)?;
    let range = bench.range(id)?;
    let stale = bench.claim(id, range)?;
    bench.release(id)?;
    for page in 1..=REUSES {
        let id = bench.map(0, memory(0x10_0000 + page * 4096, 64)?, direction)?;
        if bench.range(id)? == range {
            let accepted = bench.unmap_claim(stale) == ClaimOutcome::Accepted;
            evidence.count_if(accepted, 0);
            break;
        }
    }
    Ok(evidence)
}

/// Returns the memory that the device of mappings reaches at their first bytes, in their direction.
fn reach(bench: &mut Bench, ids: [MapId; 2]) -> Result<[Option<PhysAddr>; 2], LabError> {
    let mut reached = [None; 2];
    for (reached, id) in reached.iter_mut().zip(ids) {
        *reached = bench.reached_by(id)?;
    }
    match reached {
        [None, _] => Err(LabError::Internal(
            "a live buffer that its device does not reach",
        )),
        reached => Ok(reached),
    }
}

/// The driver maps a buffer of `pages` pages and unmaps `unmapped` pages at its address. Succeeds
/// if the layer accepts. Returns the result in words.
fn other_length(
    mode: &Mode,
    pages: u64,
    unmapped: u64,
    evidence: &mut Evidence,
) -> Result<String, LabError> {
    let mut bench = Bench::new(mode)?;
    let direction = Direction::FromDevice;
    let kept = bench.map(0, memory(0x80_0000, 4096)?, direction)?;
    let id = bench.map(0, memory(0x10_0000, pages * 4096)?, direction)?;
    bench.use_buffer(kept)?;
    bench.use_buffer(id)?;
    let range = bench.range(id)?;
    let wrong = IovaRange::new(range.start(), unmapped * 4096);
    let wrong = wrong.ok_or(LabError::Internal("a range past the space"))?;
    let refused = bench.unmap_claimed(id, wrong)? != ClaimOutcome::Accepted;
    evidence.count_if(!refused, 0);
    let device = bench.requester(0)?;
    let beside = bench.range(kept)?.start();
    let mut reaches = |iova| bench.access(device, iova, 1, Access::Write).is_some();
    let [first, last, beside] = [range.start(), range.last(), beside].map(&mut reaches);
    let keeps = |reached| if reached { "keeps" } else { "loses" };
    Ok(match refused {
        true if first && last && beside => "refused, and nothing changes".to_owned(),
        true => return Err(LabError::Internal("a refused unmap that changes a mapping")),
        false => format!(
            "accepted; the device {} the first page, {} the last and {} another buffer",
            keeps(first),
            keeps(last),
            keeps(beside)
        ),
    })
}
