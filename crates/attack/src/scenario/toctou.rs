//! A17, A18: the device changes memory between the driver's check and the driver's use.

use ringfence_devices::nic::{Nic, NicCompletion, NicProfile, QueueDir, Rings};
use ringfence_devices::ring::{RingAddresses, RingSize};
use ringfence_lab::LabError;
use ringfence_lab::modes::Mode;
use ringfence_types::{Direction, Nanos, PhysAddr};

use super::ScenarioResult;
use super::sharers;
use super::window::Attacker;
use crate::bench::{Bench, MapId, memory};
use crate::evidence::{Evidence, Executed, Found};
use crate::shipped::BenchApi;

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
    if mode.flush.has_cache() {
        let [held, released] = shared_page(mode)?;
        executed.trial(sharers::HELD, held);
        executed.trial(sharers::RELEASED, released);
    }
    executed.comparison("checked before the unmap", checked_before_unmap(mode)?);
    if let Some(evidence) = checked_in_the_pool(mode)? {
        executed.comparison("checked in the pool, without a copy", evidence);
    }
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

/// Two packets in one page. The driver unmaps the first, checks and uses its header, then the
/// second. Returns the counts of each.
fn shared_page(mode: &Mode) -> Result<[Evidence; 2], LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = [Evidence::default(); 2];
    let headers = [0x10_0000, 0x10_0800].map(PhysAddr::new);
    let direction = Direction::FromDevice;
    for packet in 0..PACKETS {
        let mut ids = Vec::new();
        for header in headers {
            let id = bench.map(0, memory(header.get(), 64)?, direction)?;
            bench.device_write(0, bench.range(id)?.start(), HONEST)?;
            ids.push(id);
        }
        let is_shared = sharers::share(&bench, ids[0], ids[1])?;
        for ((id, header), evidence) in ids.iter().zip(headers).zip(&mut evidence) {
            bench.release(*id)?;
            let checked = bench.load(header)?;
            bench.device_write(0, bench.range(*id)?.start(), FORGED ^ packet)?;
            let used = bench.load(header)?;
            if is_shared {
                evidence.count_if(checked != used, 8);
            }
        }
        bench.advance_to(Nanos(bench.now().0 + 1_000));
    }
    bench.take_false_faults(&mut evidence[0]);
    Ok(evidence)
}

/// A driver that reads its buffer in the pool after the unmap, without copying the bytes first. The
/// layer's own driver cannot do that. `None` in modes without such a pool.
fn checked_in_the_pool(mode: &Mode) -> Result<Option<Evidence>, LabError> {
    let mut bench = Bench::new(mode)?;
    let mut evidence = Evidence::default();
    for packet in 0..PACKETS {
        let id = bench.map(0, memory(0x10_0000, 2048)?, Direction::FromDevice)?;
        let Some(header) = bench.lent_memory(id)? else {
            return Ok(None);
        };
        let iova = bench.range(id)?.start();
        bench.device_write(0, iova, HONEST)?;
        bench.release(id)?;
        let checked = bench.load(header)?;
        bench.device_write(0, iova, FORGED ^ packet)?;
        evidence.count_if(checked != bench.load(header)?, 8);
    }
    bench.take_false_faults(&mut evidence);
    Ok(Some(evidence))
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
/// driver that reads the ring back uses the change. The network driver keeps its own record of each
/// descriptor and checks each completion against it.
pub(crate) fn descriptors(mode: &Mode) -> ScenarioResult {
    let mut bench = Bench::new(mode)?;
    let mut trusting = Evidence::default();
    let ring = 0x10_0000;
    let id = bench.map(0, memory(ring, 4096)?, Direction::Bidirectional)?;
    let iova = bench.range(id)?.start();
    for slot in 0..PACKETS {
        // Coherent memory has no copy: the driver uses the very bytes that the device reaches.
        let iova = iova.wrapping_add(slot * 16);
        let at = match bench.reached_at(0, iova)? {
            Some(reached) => reached,
            None => PhysAddr::new(ring + slot * 16),
        };
        let own_copy = 0x20_0000 + slot * 2048;
        bench.store(at, own_copy)?;
        bench.device_write(0, iova, FORGED)?;
        // The address that the driver would unmap and pass on.
        trusting.count_if(bench.load(at)? != own_copy, 8);
    }
    bench.take_false_faults(&mut trusting);
    let mut executed = Executed::default();
    executed.trial("driver reads the ring back", trusting);
    executed.comparison(
        "network driver, forged descriptor",
        forged_descriptor(mode)?,
    );
    executed.comparison(
        "network driver, forged completion",
        forged_completions(mode)?,
    );
    Ok(Found::Executed(executed))
}

/// Opens the port of a network driver with one buffer for each packet.
fn open_port(mode: &Mode) -> Result<(BenchApi, Nic<MapId>, RingAddresses), LabError> {
    let size = RingSize::new(8).ok_or(LabError::Internal("a ring size"))?;
    let rings = Rings { count: 1, size };
    let profile = NicProfile {
        buffers_per_packet: 1,
        receive: rings,
        transmit: rings,
        ..NicProfile::BRCM
    };
    let mut api = BenchApi::new(Bench::new(mode)?)?;
    let bytes = Nic::<MapId>::buffer_bytes(&profile, 8);
    let nic = Nic::open(profile, memory(0x10_0000, bytes)?, &mut api);
    let nic = nic.map_err(|_| LabError::Internal("a port that does not open"))?;
    let found = nic.rings().find(|(dir, ..)| *dir == QueueDir::Rx);
    let (_, _, rings) = found.ok_or(LabError::Internal("a port without a ring"))?;
    Ok((api, nic, rings))
}

const GOOD: NicCompletion = NicCompletion {
    bytes: 60,
    first: 60,
    descriptor: 0,
    status: 0,
};

/// Writes a completion of the first lap to the first entry.
fn complete(
    api: &mut BenchApi,
    rings: &RingAddresses,
    completion: NicCompletion,
) -> Result<bool, LabError> {
    let mut raw = completion.encode();
    raw[14] |= 1;
    let raw = u128::from_le_bytes(raw);
    api.device_writes(rings.completions.entry(0), [raw as u64, (raw >> 64) as u64])
}

/// The device replaces the address in the first descriptor before it completes it. The driver must
/// deliver its own buffer, which the device has filled, not the memory of the forged address.
fn forged_descriptor(mode: &Mode) -> Result<Evidence, LabError> {
    const OTHER: u64 = 0x78_0000;
    let mut evidence = Evidence::default();
    for page in 0..8 {
        let (mut api, mut nic, rings) = open_port(mode)?;
        let other = PhysAddr::new(OTHER + page * 4096);
        api.bench.store(other, FORGED)?;
        let forged = [other.get(), 60];
        let written = api.device_writes(rings.descriptors.entry(0), forged)?;
        if written && complete(&mut api, &rings, GOOD)? {
            let mut delivered = None;
            let each = |frame: &[u8]| delivered = frame.first_chunk::<8>().copied();
            let received = nic.receive(&mut api, 0, 1, None, each);
            received.map_err(|_| LabError::Internal("a completion that the driver refuses"))?;
            let delivered = delivered.ok_or(LabError::Internal("a frame that is lost"))?;
            evidence.count_if(u64::from_le_bytes(delivered) == FORGED, 8);
        }
    }
    Ok(evidence)
}

/// The device reports a length, a descriptor or a status that no descriptor of the driver has. The
/// attack succeeds if the driver delivers a frame.
fn forged_completions(mode: &Mode) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    let forged = [
        NicCompletion {
            descriptor: 1,
            ..GOOD
        },
        NicCompletion { status: 3, ..GOOD },
        NicCompletion { bytes: 59, ..GOOD },
        NicCompletion {
            bytes: 2048,
            first: 2048,
            ..GOOD
        },
        NicCompletion {
            bytes: u32::MAX,
            first: u32::MAX,
            ..GOOD
        },
        NicCompletion { bytes: 61, ..GOOD },
    ];
    for completion in forged {
        let (mut api, mut nic, rings) = open_port(mode)?;
        if complete(&mut api, &rings, completion)? {
            let mut frames = 0;
            let received = nic.receive(&mut api, 0, 1, None, |_| frames += 1);
            evidence.count_if(received.is_ok() || frames > 0, 0);
        }
    }
    Ok(evidence)
}
