//! A17, A18: the device changes memory between the driver's check and the driver's use.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Direction, Nanos, PhysAddr};

use super::ScenarioResult;
use super::window::Attacker;
use crate::bench::{Bench, memory};
use crate::evidence::{Evidence, Executed, Found};

const HONEST: u64 = 0x0800_4500_0040_0000;
const FORGED: u64 = 0xdead_4500_0040_0000;
/// Packets of each trial.
const PACKETS: u64 = 100;

/// A17: the driver checks the header of a received packet, the device rewrites it, the driver uses
/// it. If the driver checks after the unmap, only a stale translation lets the device do so. If the
/// driver checks before, the buffer is still mapped, and no mode can stop the device.
pub(crate) fn payload(mode: &Mode) -> ScenarioResult {
    let mut executed = Executed::default();
    for attacker in Attacker::ALL {
        executed.trial(attacker.name(), checked_after_unmap(mode, attacker)?);
    }
    executed.comparison("checked before the unmap", checked_before_unmap(mode)?);
    Ok(Found::Executed(executed))
}

fn checked_after_unmap(mode: &Mode, attacker: Attacker) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let header = PhysAddr::new(0x10_0000);
    for packet in 0..PACKETS {
        let id = bench.map(0, memory(header.get(), 2048)?, Direction::FromDevice)?;
        let iova = bench.range(id)?.start();
        bench.device_write(0, iova, HONEST)?;
        if attacker == Attacker::Racer {
            bench.use_buffer(id)?;
        }
        bench.unmap(id)?;
        if !bench.is_back(id)? {
            bench.end_burst(0, Direction::FromDevice)?;
        }
        let checked = bench.load(header)?;
        if attacker != Attacker::Passive {
            bench.device_write(0, iova, FORGED ^ packet)?;
        }
        let used = bench.load(header)?;
        evidence.count_if(checked != used, 8);
        bench.end_burst(0, Direction::FromDevice)?;
        bench.advance_to(Nanos(bench.now().0 + 1_000));
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

fn checked_before_unmap(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    let header = PhysAddr::new(0x10_0000);
    for packet in 0..PACKETS {
        let id = bench.map(0, memory(header.get(), 2048)?, Direction::FromDevice)?;
        let iova = bench.range(id)?.start();
        bench.device_write(0, iova, HONEST)?;
        let checked = bench.load(header)?;
        bench.device_write(0, iova, FORGED ^ packet)?;
        bench.release(id)?;
        evidence.count_if(checked != bench.load(header)?, 8);
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

/// A18: the device changes a descriptor in the coherent ring between the driver's write and the
/// driver's read. The ring is always mapped in both directions, so no mode stops the device. A
/// driver that keeps a private copy detects the change.
pub(crate) fn descriptors(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let (mut trusting, mut copying) = (Evidence::default(), Evidence::default());
    let ring = 0x10_0000;
    let id = bench.map(0, memory(ring, 4096)?, Direction::Bidirectional)?;
    let iova = bench.range(id)?.start();
    for slot in 0..PACKETS {
        let at = PhysAddr::new(ring + slot * 16);
        let own_copy = 0x20_0000 + slot * 2048;
        bench.store(at, own_copy)?;
        bench.device_write(0, iova.wrapping_add(slot * 16), FORGED)?;
        // The address that the driver would unmap and pass on.
        let read_back = bench.load(at)?;
        trusting.count_if(read_back != own_copy, 8);
        // The driver compares with its copy, and passes on nothing that differs.
        let passed_on = (read_back == own_copy).then_some(read_back);
        copying.count_if(passed_on.is_some_and(|address| address != own_copy), 8);
    }
    bench.take_false_faults(&mut trusting);
    let mut executed = Executed::default();
    executed.trial("driver reads the ring back", trusting);
    executed.comparison("driver keeps a private copy", copying);
    Ok(Found::Executed(executed))
}
