//! A37: the addresses that a device reaches after the driver has every buffer back.

use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Access, Direction, Iova, IovaRange, Nanos, RingId, RingIova, RingSlot};

use super::ScenarioResult;
use super::window::SCHEDULE;
use crate::bench::{Bench, DEVICES, PAGES_32_BIT, SLOTS, access_of, memory};
use crate::evidence::{Evidence, Executed, Found};

/// Buffers that the driver maps and unmaps.
const BUFFERS: u64 = 64;
const PAGE: u64 = 4096;

/// Buffers that the driver has back, with their devices.
type Released = Vec<(u16, IovaRange, Direction)>;

/// The driver maps 64 buffers for each device; the devices use each; the driver unmaps them. Then
/// the scan reads the highest `pages` pages of a 32-bit space, which all allocators use first, and
/// every slot of every ring: at once, and after the schedule has ended. The exposure integrates the
/// bytes of released buffers that the device still reaches over time.
pub(crate) fn scan(mode: &Mode, pages: u64) -> ScenarioResult {
    let mut executed = Executed::default();
    let (mut bench, released) = released(mode)?;
    let (exposure, byte_ns) = exposure(&mut bench, &released)?;
    executed.trial("released buffers", exposure);
    executed.notes.push(format!(
        "exposure in 50 s: {:.6} MB s",
        byte_ns as f64 / 1e9 / 1e6
    ));
    executed.trial(
        "scan of the address space",
        enumerate(&mut bench, 0, mode, pages)?,
    );
    // The IOTLB holds entries of the device that used its buffers last.
    let (mut bench, _) = self::released(mode)?;
    executed.trial(
        "scan at the release",
        enumerate(&mut bench, DEVICES - 1, mode, pages)?,
    );
    Ok(Found::Executed(executed))
}

/// Maps, uses and unmaps the buffers.
fn released(mode: &Mode) -> Result<(Bench, Released), LabError> {
    let mut bench = Bench::new(mode)?;
    let mut released = Vec::new();
    for device in 0..DEVICES {
        let mut ids = Vec::new();
        for n in 0..BUFFERS {
            let direction = Direction::ALL[n as usize % 3];
            let start = 0x100_0000 * (1 + u64::from(device)) + n * 2 * PAGE;
            let id = bench.map(device, memory(start, PAGE + 64)?, direction)?;
            bench.use_buffer(id)?;
            ids.push((id, direction));
        }
        for (id, direction) in ids {
            // The device uses the buffer up to its unmap.
            bench.use_buffer(id)?;
            bench.unmap(id)?;
            released.push((device, bench.range(id)?, direction));
        }
        for direction in Direction::ALL {
            bench.end_burst(device, direction)?;
        }
    }
    Ok((bench, released))
}

/// Integrates the released bytes that the devices reach, by the schedule of the window classes.
fn exposure(
    bench: &mut Bench,
    released: &[(u16, IovaRange, Direction)],
) -> Result<(Evidence, u128), LabError> {
    let mut evidence = Evidence::default();
    let (mut byte_ns, start) = (0_u128, bench.now().0);
    for (index, after) in SCHEDULE.iter().enumerate() {
        // The first accesses precede all timers.
        if *after > 0 {
            bench.advance_to(Nanos(start + after));
        }
        let bytes_before = evidence.bytes;
        for (device, range, direction) in released {
            for page in [range.start(), range.last().align_down(PAGE)] {
                let piece = IovaRange::new(page, PAGE - page.offset_in(PAGE));
                let piece = piece.map_or(1, |piece| piece.bytes().min(range.bytes()));
                let piece = piece.min(range.last().get() - page.get() + 1);
                bench.attack(&mut evidence, *device, page, piece, access_of(*direction))?;
            }
        }
        let until = SCHEDULE.get(index + 1).copied().unwrap_or(*after);
        byte_ns += u128::from(evidence.bytes - bytes_before) * u128::from(until - after);
    }
    bench.take_false_faults(&mut evidence);
    Ok((evidence, byte_ns))
}

/// Reads the first byte of the highest `pages` pages of a 32-bit space, or of every slot of every
/// ring.
fn enumerate(
    bench: &mut Bench,
    device: u16,
    mode: &Mode,
    pages: u64,
) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let device = bench.requester(device)?;
    let mut read = |iova: Iova| {
        let reached = bench.access(device, iova, 1, Access::Read);
        evidence.count(reached.as_ref().map(|reached| &reached.verdict));
    };
    if mode.has_rings() {
        for ring in 0..8 {
            for slot in 0..SLOTS {
                let slot = RingSlot::new(slot).unwrap_or(RingSlot::MAX);
                read(RingIova::start(RingId::new(ring), slot).iova());
            }
        }
    } else {
        for page in PAGES_32_BIT.saturating_sub(pages)..PAGES_32_BIT {
            read(Iova::new(page * PAGE));
        }
    }
    // The scan runs at one moment, so its last success is no length of a window.
    evidence.last_success_ns = None;
    Ok(evidence)
}
