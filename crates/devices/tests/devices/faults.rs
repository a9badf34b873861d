//! Failures at every step below a driver. The driver returns a typed error and leaks nothing: after
//! the close, every buffer and frame is returned, no mapping remains, and no access went outside
//! the mappings.

use std::cell::Cell;

use ringfence_devices::api::{
    ApiError, DeviceRing, DmaApi, FailedMap, MapFailure, Mapped, NotFreed,
};
use ringfence_devices::block::ahci::{AhciDriver, AhciPort};
use ringfence_devices::block::nvme::{NvmeController, NvmeQueue};
use ringfence_devices::block::{BlockError, DiskRequest, Operation, PAGE_BYTES, RamDisk};
use ringfence_devices::nic::{
    Environment, Fill, Nic, NicDevice, NicError, NicProfile, QueueDir, Replace, Rings,
};
use ringfence_devices::ring::RingSize;
use ringfence_devices::{Buffer, Pool};
use ringfence_dma::ring::{RingSetup, SlotChoice};
use ringfence_dma::{Coherent, MapError, MapReason, Mapping};
use ringfence_pgtable::Coherency;
use ringfence_types::PhysRange;

use super::disks::rings_of;
use super::hardware::FailureInjector;
use super::rig::{self, OracleChecked, RingRig};

/// Kind of failure of a map.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Refusal {
    /// The layer is out of memory.
    Failed,
    /// The ring has no free entry now.
    Busy,
}

/// A layer that fails maps or allocations of descriptors at chosen calls.
struct Flaky<'t, A> {
    inner: A,
    maps: &'t FailureInjector,
    allocs: &'t FailureInjector,
    refusal: Refusal,
}

const NO_MEMORY: MapError = MapError {
    device: rig::NIC,
    buffer: None,
    reason: MapReason::OutOfMemory,
};

impl<A: DmaApi> DmaApi for Flaky<'_, A> {
    type Handle = A::Handle;
    type Memory = A::Memory;

    fn memory(&self) -> &A::Memory {
        self.inner.memory()
    }
    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<A::Handle>, FailedMap> {
        if self.maps.strikes() {
            let stop = match self.refusal {
                Refusal::Failed => MapFailure::Failed(NO_MEMORY),
                Refusal::Busy => MapFailure::Busy,
            };
            return Err(FailedMap {
                buffer,
                failure: stop,
            });
        }
        self.inner.map(ring, buffer, memory)
    }
    fn unmap(&mut self, ring: DeviceRing, handle: A::Handle) -> Result<Option<Buffer>, ApiError> {
        self.inner.unmap(ring, handle)
    }
    fn end_burst(&mut self, ring: DeviceRing, back: impl FnMut(Buffer)) -> Result<(), ApiError> {
        self.inner.end_burst(ring, back)
    }
    fn sync_map(&mut self, ring: DeviceRing) {
        self.inner.sync_map(ring);
    }
    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        if self.allocs.strikes() {
            return Err(ApiError::Map(NO_MEMORY));
        }
        self.inner.alloc_coherent(ring, pages)
    }
    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        self.inner.free_coherent(ring, memory)
    }
}

/// Failure injectors of the layer.
#[derive(Default)]
struct Troubles {
    maps: FailureInjector,
    allocs: FailureInjector,
    busy: Cell<bool>,
}

impl Troubles {
    fn api<'t, 'w, W: Environment>(&'t self, env: &'w mut W) -> Flaky<'t, W::Api<'w>> {
        Flaky {
            inner: env.api(),
            maps: &self.maps,
            allocs: &self.allocs,
            refusal: if self.busy.get() {
                Refusal::Busy
            } else {
                Refusal::Failed
            },
        }
    }
}

/// A driver with its device, which the test opens, uses and closes.
trait Driven<W> {
    /// Runs the driver once. Returns the number of errors, or `Err` if it could not be closed
    /// without loss.
    fn live(env: &mut W, troubles: &Troubles) -> Result<u32, String>;
}

/// An adapter with two buffers per packet, which maps first or unmaps first.
struct Adapter<const MAP_FIRST: bool>;

impl<const MAP_FIRST: bool> Adapter<MAP_FIRST> {
    fn profile() -> NicProfile {
        let rings = Rings {
            count: 1,
            size: RingSize::new(8).unwrap(),
        };
        NicProfile {
            name: "small",
            buffers_per_packet: 2,
            receive: rings,
            transmit: rings,
            replace: match MAP_FIRST {
                true => Replace::BeforeUnmap,
                false => Replace::AfterUnmap,
            },
            fill: Fill::RingByRing,
            ..NicProfile::BRCM
        }
    }
}

impl<W: OracleChecked + Environment<Handle = Mapping<B>>, B, const MAP_FIRST: bool> Driven<W>
    for Adapter<MAP_FIRST>
{
    fn live(env: &mut W, troubles: &Troubles) -> Result<u32, String> {
        let profile = Self::profile();
        let memory = rig::buffers(Nic::<W::Handle>::buffer_bytes(&profile, 16));
        let mut wrong = 0;
        let mut nic = match Nic::open(profile, memory, &mut troubles.api(env)) {
            Ok(nic) => nic,
            Err(NicError::Api(_)) => return Ok(1),
            Err(other) => return Err(other.to_string()),
        };
        let mut device = NicDevice::new(rig::NIC, &profile, 4);
        for (dir, index, at) in nic.rings() {
            device.program(dir, index, &at);
        }
        for round in 0..8_u8 {
            let mut note = |result: Result<(), NicError>| match result {
                Ok(()) => Ok(()),
                Err(NicError::Api(_)) => {
                    wrong += 1;
                    Ok(())
                }
                Err(other) => Err(other.to_string()),
            };
            for _ in 0..3 {
                let frame = [round; 700];
                note(nic.send(&mut troubles.api(env), 0, &frame).map(drop))?;
            }
            for dir in [QueueDir::Rx, QueueDir::Tx] {
                let tail = nic.sync_map(&mut troubles.api(env), dir, 0).unwrap();
                device.doorbell(dir, 0, tail);
            }
            device
                .transmit(&mut env.bus(), 0, |frame| assert!(frame.len() == 700))
                .unwrap();
            for _ in 0..3 {
                let _ = device.receive(&mut env.bus(), 0, &[!round; 900]).unwrap();
            }
            // A frame of this round, or of an earlier one whose burst could not end then.
            let check = |frame: &[u8]| {
                assert!(frame.len() == 900 && frame.iter().all(|byte| *byte == frame[0]));
            };
            let received = nic.receive(&mut troubles.api(env), 0, u32::MAX, None, check);
            note(received.map(drop))?;
            note(nic.reclaim(&mut troubles.api(env), 0, u32::MAX).map(drop))?;
        }
        device.reset();
        nic.close(&mut troubles.api(env))
            .map_err(|error| error.to_string())?;
        Ok(wrong)
    }
}

fn io(pool: &mut Pool, number: u64) -> DiskRequest {
    let pages = 1 + number % 4;
    DiskRequest {
        operation: if number.is_multiple_of(3) {
            Operation::Write
        } else {
            Operation::Read
        },
        block: number * 8,
        bytes: (pages * PAGE_BYTES) as u32 - 512,
        buffers: (0..pages).map(|_| pool.alloc().unwrap()).collect(),
    }
}

/// Checks that an error of a disk's driver is one that a failing layer may cause.
fn note(result: Result<u32, BlockError>, wrong: &mut u32) -> Result<(), String> {
    match result {
        Ok(_) => Ok(()),
        Err(BlockError::Api(_) | BlockError::Full) => {
            *wrong += 1;
            Ok(())
        }
        Err(other) => Err(other.to_string()),
    }
}

struct NvmeDisk;

impl<W: OracleChecked> Driven<W> for NvmeDisk {
    fn live(env: &mut W, troubles: &Troubles) -> Result<u32, String> {
        let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
        let mut disk = RamDisk::new(1 << 10);
        let mut wrong = 0;
        let size = RingSize::new(8).unwrap();
        let mut queue = match NvmeQueue::open(&mut troubles.api(env), 0, size) {
            Ok(queue) => queue,
            Err(BlockError::Api(_)) => return Ok(1),
            Err(other) => return Err(other.to_string()),
        };
        let mut controller = NvmeController::new(rig::NIC, queue.addresses(), 3);
        for number in 0..20 {
            let io = io(&mut pool, number);
            if let Err(rejected) = queue.submit(&mut troubles.api(env), io) {
                note(Err(rejected.error), &mut wrong)?;
                rejected
                    .buffers
                    .into_iter()
                    .for_each(|b| pool.free(b).unwrap());
            }
            if number % 3 == 2 {
                controller.submission_doorbell(queue.sync_map(&mut troubles.api(env)));
                controller.run(&mut env.bus(), &mut disk).unwrap();
                let done = queue.complete(&mut troubles.api(env), u32::MAX, |done| {
                    done.buffers.into_iter().for_each(|b| pool.free(b).unwrap());
                });
                note(done, &mut wrong)?;
                controller.completion_doorbell(queue.completion_head());
            }
        }
        queue
            .close(&mut troubles.api(env), |b| pool.free(b).unwrap())
            .map_err(|error| error.to_string())?;
        match pool.in_use() {
            0 => Ok(wrong),
            lost => Err(format!("{lost} pages lost")),
        }
    }
}

struct AhciDisk;

impl<W: OracleChecked> Driven<W> for AhciDisk {
    fn live(env: &mut W, troubles: &Troubles) -> Result<u32, String> {
        let mut pool = Pool::new(rig::buffers(1 << 20), PAGE_BYTES).unwrap();
        let mut disk = RamDisk::new(1 << 10);
        let mut wrong = 0;
        let mut driver = match AhciDriver::open(&mut troubles.api(env)) {
            Ok(driver) => driver,
            Err(BlockError::Api(_)) => return Ok(1),
            Err(other) => return Err(other.to_string()),
        };
        let mut port = AhciPort::new(rig::NIC, driver.addresses(), 3);
        for number in 0..20 {
            let io = io(&mut pool, number);
            if let Err(rejected) = driver.submit(&mut troubles.api(env), io) {
                note(Err(rejected.error), &mut wrong)?;
                rejected
                    .buffers
                    .into_iter()
                    .for_each(|b| pool.free(b).unwrap());
            }
            port.issue(driver.sync_map(&mut troubles.api(env)));
            if number % 3 == 2 {
                port.run(&mut env.bus(), &mut disk, 2).unwrap();
                let registers = port.registers();
                let done = driver.complete(&mut troubles.api(env), registers, |done| {
                    done.buffers.into_iter().for_each(|b| pool.free(b).unwrap());
                });
                note(done, &mut wrong)?;
            }
        }
        driver
            .close(&mut troubles.api(env), |b| pool.free(b).unwrap())
            .map_err(|error| error.to_string())?;
        match pool.in_use() {
            0 => Ok(wrong),
            lost => Err(format!("{lost} pages lost")),
        }
    }
}

/// The operation that fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    Frames,
    Invalidations,
    Maps,
    FullRings,
    Descriptors,
}

fn trouble<'a, W: OracleChecked>(
    what: What,
    env: &'a W,
    troubles: &'a Troubles,
) -> &'a FailureInjector {
    let [frames, invalidations] = env.troubles();
    match what {
        What::Frames => frames,
        What::Invalidations => invalidations,
        What::Maps | What::FullRings => &troubles.maps,
        What::Descriptors => &troubles.allocs,
    }
}

/// Runs a driver repeatedly, each time with a failure one step later, until no failure occurs any
/// more. Returns the number of runs with a failure.
fn at_every_step<D: Driven<W>, W: OracleChecked>(env: &mut W, what: What) -> u64 {
    let troubles = Troubles::default();
    troubles.busy.set(what == What::FullRings);
    // Tables that the space keeps are allocated after the first run.
    assert_eq!(D::live(env, &troubles), Ok(0));
    let frames = env.frames_in_use();
    for step in 0.. {
        let asked = trouble(what, env, &troubles);
        asked.after(step, 1);
        let before = asked.turns();
        let run = D::live(env, &troubles);
        let asked = trouble(what, env, &troubles);
        asked.over();
        let turns = asked.turns() - before;
        assert!(run.is_ok(), "{what:?} at step {step}: {run:?}");
        let judge = env.judge();
        let outcome = (judge.live(), judge.violations, judge.faults);
        assert_eq!(outcome, (0, 0, 0), "{what:?} at step {step}");
        assert_eq!(env.frames_in_use(), frames, "{what:?} at step {step}");
        if turns <= step {
            assert_eq!(run, Ok(0), "nothing went wrong");
            return step;
        }
    }
    unreachable!("steps end")
}

/// Invalidations keep failing. The driver reports what the device may still access as lost, and
/// frees everything else. Returns the number of runs.
fn run_with_lost_invalidations<D: Driven<W>, W: OracleChecked>(make: impl Fn() -> W) -> u64 {
    for step in 0.. {
        let (mut env, troubles) = (make(), Troubles::default());
        let asked = trouble(What::Invalidations, &env, &troubles);
        asked.after(step, 5);
        let run = D::live(&mut env, &troubles);
        let turns = trouble(What::Invalidations, &env, &troubles).turns();
        let judge = env.judge();
        assert_eq!((judge.violations, judge.faults), (0, 0), "at step {step}");
        // Lost buffers or descriptor memory still belong to the layer, and the driver has reported
        // them.
        assert!(judge.live() == 0 || run.is_err(), "at step {step}: {run:?}");
        if turns <= step {
            assert_eq!(run, Ok(0), "nothing went wrong");
            return step;
        }
    }
    unreachable!("steps end")
}

fn in_every_mode<D>(rings: &[(DeviceRing, u32)])
where
    D: Driven<rig::Rig<rig::Pages, ringfence_dma::flush::Strict, Buffer, ()>>
        + Driven<rig::Rig<rig::Pages, ringfence_dma::flush::Burst, Buffer, ()>>
        + Driven<rig::Rig<rig::Pages, rig::Queue, Buffer, ()>>
        + Driven<RingRig<()>>,
{
    use What::{Descriptors, Frames, FullRings, Invalidations, Maps};
    let setup = rig::TAIL;
    let steps = [
        run_with_lost_invalidations::<D, _>(rig::strict),
        run_with_lost_invalidations::<D, _>(|| rig::burst(7)),
        run_with_lost_invalidations::<D, _>(|| RingRig::rings(rings.iter().copied(), setup, ())),
    ];
    println!("lives in which invalidations stay away: {steps:?}");
    for what in [Frames, Invalidations, Maps, FullRings, Descriptors] {
        let mut steps = vec![
            at_every_step::<D, _>(&mut rig::strict(), what),
            at_every_step::<D, _>(&mut rig::burst(7), what),
        ];
        if what != Invalidations {
            // A deferred mode returns buffers before any invalidation.
            steps.push(at_every_step::<D, _>(&mut rig::deferred(), what));
        }
        for coherency in [Coherency::Coherent, Coherency::NonCoherent] {
            for choice in [SlotChoice::Tail, SlotChoice::NextFree] {
                let setup = RingSetup { choice, coherency };
                let mut env = RingRig::rings(rings.iter().copied(), setup, ());
                steps.push(at_every_step::<D, _>(&mut env, what));
            }
        }
        println!("{what:?}: lives with a failure {steps:?}");
        assert!(steps.iter().all(|steps| *steps > 2), "{what:?}: {steps:?}");
    }
}

#[test]
fn an_adapter_loses_nothing_whatever_fails() {
    let rings: Vec<_> = Adapter::<false>::profile()
        .api_rings()
        .map(|(ring, live)| (ring, live * 2))
        .collect();
    in_every_mode::<Adapter<false>>(&rings);
    in_every_mode::<Adapter<true>>(&rings);
}

#[test]
fn an_nvme_queue_loses_nothing_whatever_fails() {
    in_every_mode::<NvmeDisk>(&rings_of(0, 64));
}

#[test]
fn an_ahci_port_loses_nothing_whatever_fails() {
    in_every_mode::<AhciDisk>(&rings_of(0, 128));
}
