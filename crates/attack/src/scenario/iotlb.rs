//! A24: a fault storm, eviction of the victim's IOTLB entries, and a timing channel.
//!
//! The attacker's device uses only its own mappings, and addresses without a mapping. It measures
//! time by the words that walks read, which a profile would multiply by the cost of a read.

use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Iova, IovaRange};

use super::ScenarioResult;
use crate::bench::{Bench, MapId, memory};
use crate::evidence::{Evidence, Executed, Found};

const VICTIM: u16 = 0;
const ATTACKER: u16 = 1;
/// Accesses of the storm: more than the registers of any fault log.
const STORM: u64 = 1000;
/// Buffers of the victim.
const VICTIM_BUFFERS: u64 = 8;
/// Bits that the victim leaks through the channel.
const BITS: u32 = 64;
const SECRET: u64 = 0xb5c3_9a27_4ed1_68f0;

/// Executes the three parts. Each decides: the class succeeds if one of them does.
pub(crate) fn contention(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    let mut bench = Bench::new(mode)?;
    let id = bench.map(VICTIM, memory(0x10_0000, 64)?, Direction::ToDevice)?;
    bench.use_buffer(id)?;
    let stats = bench.machine().stats();
    if stats.iotlb_hits + stats.iotlb_misses == 0 {
        return Ok(Found::NotApplicable(
            "the IOMMU looks nothing up, so no table, cache or log is shared",
        ));
    }
    let (evidence, lost) = storm(&mut bench)?;
    executed.trial("fault storm", evidence);
    executed
        .notes
        .push(format!("faults lost by the log: {lost}"));
    let (evidence, [quiet, attacked]) = thrash(mode)?;
    executed.trial("evicted victim", evidence);
    executed.notes.push(format!(
        "misses of the victim in {} accesses: {quiet} without the attacker, {attacked} with it",
        evidence.attempts
    ));
    let (evidence, correct) = channel(mode)?;
    executed.trial("timing channel", evidence);
    executed
        .notes
        .push(format!("bits received: {correct} of {BITS}"));
    Ok(Found::Executed(executed))
}

/// The attacker fills the fault log, then a fault of the victim's device occurs. Succeeds if the
/// log loses it.
fn storm(bench: &mut Bench) -> Result<(Evidence, u64), LabError> {
    let mut evidence = Evidence::default();
    let attacker = bench.requester(ATTACKER)?;
    for n in 0..STORM {
        let _ = bench.access(attacker, Iova::new((1 << 45) + n * 4096), 1, Access::Read);
    }
    let victim = bench.requester(VICTIM)?;
    let before = bench.machine().fault_counts();
    let stopped = bench.access(victim, Iova::new(1 << 45), 1, Access::Read);
    let after = bench.machine().fault_counts();
    let lost = stopped.is_none() && after.recorded == before.recorded;
    evidence.count_if(lost && after.lost > before.lost, 0);
    Ok((evidence, after.lost))
}

/// Maps the buffers of the attacker. With a table, they have as many pages as the IOTLB has
/// entries. With rings, each ring of the device has one.
fn attacker_buffers(bench: &mut Bench, mode: &Mode) -> Result<Vec<IovaRange>, LabError> {
    if mode.has_rings() {
        let made = Direction::ALL.iter().zip(0_u64..).map(|(direction, n)| {
            let id = bench.map(ATTACKER, memory(0x80_0000 + n * 4096, 4096)?, *direction)?;
            bench.range(id)
        });
        return made.collect();
    }
    let entries = iotlb_entries();
    if bench.space_traits().lends {
        // No buffer of a pool is so large.
        let made = (0..entries).map(|n| {
            let page = memory(0x80_0000 + n * 4096, 4096)?;
            let id = bench.map(ATTACKER, page, Direction::Bidirectional)?;
            bench.range(id)
        });
        return made.collect();
    }
    let buffer = memory(0x80_0000, entries * 4096)?;
    let id = bench.map(ATTACKER, buffer, Direction::Bidirectional)?;
    let start = bench.range(id)?.start();
    let pages = (0..entries).map(|page| {
        let page = IovaRange::new(start.wrapping_add(page * 4096), 4096);
        page.ok_or(LabError::Internal("a page"))
    });
    pages.collect()
}

fn iotlb_entries() -> u64 {
    let profile = Profile::r210_2015();
    u64::from(profile.iotlb_sets) * u64::from(profile.iotlb_ways)
}

/// The attacker's device touches all of its buffers. Returns the words that walks read meanwhile.
fn touch_all(bench: &mut Bench, buffers: &[IovaRange]) -> Result<u64, LabError> {
    let attacker = bench.requester(ATTACKER)?;
    let before = bench.machine().stats().walk_references;
    for buffer in buffers {
        for access in [Access::Read, Access::Write] {
            if bench.access(attacker, buffer.start(), 1, access).is_some() {
                break;
            }
        }
    }
    Ok(bench.machine().stats().walk_references - before)
}

fn victim_buffers(bench: &mut Bench) -> Result<Vec<MapId>, LabError> {
    let pages = 0..VICTIM_BUFFERS;
    let made = pages.map(|n| {
        // With rings, each direction has a ring: three entries in all.
        let direction = Direction::ALL[n as usize % 3];
        bench.map(VICTIM, memory(0x20_0000 + n * 4096, 4096)?, direction)
    });
    made.collect()
}

/// Returns the victim's misses during one use of each of `ids`.
fn victim_misses(bench: &mut Bench, ids: &[MapId]) -> Result<u64, LabError> {
    let before = bench.machine().stats().iotlb_misses;
    for id in ids {
        bench.use_buffer(*id)?;
    }
    Ok(bench.machine().stats().iotlb_misses - before)
}

/// The victim uses three warm buffers, first alone, then after each pass of the attacker. Succeeds
/// if the attacker causes misses.
fn thrash(mode: &Mode) -> Result<(Evidence, [u64; 2]), LabError> {
    const ROUNDS: u64 = 20;
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let ids = victim_buffers(&mut bench)?;
    let ids = &ids[..3];
    let buffers = attacker_buffers(&mut bench, mode)?;
    victim_misses(&mut bench, ids)?;
    let mut quiet = 0;
    for _ in 0..ROUNDS {
        quiet += victim_misses(&mut bench, ids)?;
    }
    let mut attacked = 0;
    for _ in 0..ROUNDS {
        // Twice, so that the attacker's entries are younger than the victim's in every set.
        touch_all(&mut bench, &buffers)?;
        touch_all(&mut bench, &buffers)?;
        attacked += victim_misses(&mut bench, ids)?;
    }
    evidence.attempts = ROUNDS * ids.len() as u64;
    evidence.successes = attacked.saturating_sub(quiet).min(evidence.attempts);
    bench.take_false_faults(&mut evidence);
    Ok((evidence, [quiet, attacked]))
}

/// The victim uses its buffers if the secret's bit is 1, and is idle otherwise. The attacker fills
/// the IOTLB before, and measures its own walks after. Succeeds if it receives every bit.
fn channel(mode: &Mode) -> Result<(Evidence, u32), LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let ids = victim_buffers(&mut bench)?;
    let buffers = attacker_buffers(&mut bench, mode)?;
    let mut received = 0_u64;
    // The attacker's own use without the victim.
    touch_all(&mut bench, &buffers)?;
    let idle = touch_all(&mut bench, &buffers)?;
    for bit in 0..BITS {
        touch_all(&mut bench, &buffers)?;
        if SECRET >> bit & 1 == 1 {
            victim_misses(&mut bench, &ids)?;
        }
        let walks = touch_all(&mut bench, &buffers)?;
        received |= u64::from(walks > idle) << bit;
    }
    let correct = (!(received ^ SECRET)).count_ones();
    evidence.count_if(correct == BITS, 0);
    bench.take_false_faults(&mut evidence);
    Ok((evidence, correct))
}
