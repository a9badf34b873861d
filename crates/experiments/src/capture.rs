//! Records a driver's DMA API calls under a workload, as plans that any mode can perform.
//!
//! The testbed runs without protection, so that the recording does not depend on a mode. Frames
//! cross the wire and are verified. The log records every map, unmap, end of a burst and doorbell.
//! Decision 0011 defines a run. Descriptors are not recorded: the driver maps them once.

use ringfence_devices::api::{ApiError, DeviceRing, DmaApi, FailedMap, LayerApi, Mapped, NotFreed};
use ringfence_devices::nic::{Environment, Nic, NicProfile, NicTestbed};
use ringfence_devices::workload::{PACKETS_PER_RUN, Workload};
use ringfence_devices::{Buffer, Bus};
use ringfence_dma::flush::Never;
use ringfence_dma::space::Identity;
use ringfence_dma::{Attachment, Coherent, Cpu, Dma, Mapping, Platform};
use ringfence_hw::VtdUnit;
use ringfence_memory::Arena;
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Iova, Nanos, PhysAddr, PhysRange, RequesterId};
use std::rc::Rc;

use ringfence_lab::LabError;
use ringfence_lab::Profile;
use ringfence_lab::hardware::Vtd;
use ringfence_lab::plan::{Plan, Step, TimedStep};
use ringfence_lab::replay_platform::ReplayPlatform;

/// Nanoseconds between two API calls. A packet without protection takes 1816 cycles at 3.1 GHz and
/// has two buffers, each mapped and unmapped (rIOMMU Fig. 7). Only timers depend on it.
pub(super) const CALL_NS: u64 = 146;

/// Requester ID of the recorded device.
pub(super) const NIC: RequesterId = RequesterId::new(0x0300);

/// Frame counts of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CallTotals {
    /// Frames received and sent.
    pub(super) packets: u64,
    /// Frames that the server received and verified.
    pub(super) received: u64,
    /// Bytes of data in all frames, in both directions.
    pub(super) bytes: u64,
}

/// One run: its calls and its frame counts.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The calls, for layers with one space per device.
    pub(super) plan: Plan,
    /// Ring of each step, for layers with one table per ring.
    pub(super) step_rings: Vec<u16>,
    /// Rings in the order of first use.
    pub(super) rings: Vec<u16>,
    pub(super) traffic: CallTotals,
}

impl Run {
    /// The same calls for layers with one table per ring. Each ring becomes a device, numbered in
    /// the order of first use.
    pub(super) fn by_ring(&self) -> Plan {
        let mut plan = Plan {
            steps: self.plan.steps.clone(),
            segments: self.plan.segments.clone(),
            maps: self.plan.maps,
            unmaps: self.plan.unmaps,
            lines: 0,
            quiet: Vec::new(),
        };
        for (timed, step_ring) in plan.steps.iter_mut().zip(&self.step_rings) {
            let number = self.rings.iter().position(|ring| ring == step_ring);
            let number = DeviceIndex(number.unwrap_or_default() as u16);
            match &mut timed.step {
                Step::Map { device, .. }
                | Step::Unmap { device, .. }
                | Step::EndBurst { device, .. }
                | Step::Doorbell { device, .. } => *device = number,
                Step::EndDescriptor { .. } | Step::Tick => {}
            }
        }
        plan
    }

    /// The calls of the receive rings only. The traffic counts remain those of the whole run.
    pub(super) fn receive_only(&self) -> Self {
        let received = |ring: &u16| ring.is_multiple_of(2);
        let steps = self.plan.steps.iter().zip(&self.step_rings);
        let steps = steps.filter(|(_, ring)| received(ring));
        let (steps, step_rings): (Vec<TimedStep>, Vec<u16>) = steps.unzip();
        let count = |wanted: fn(&Step) -> bool| {
            let steps = steps.iter().filter(|timed| wanted(&timed.step));
            steps.count() as u64
        };
        Self {
            plan: Plan {
                maps: count(|step| matches!(step, Step::Map { .. })),
                unmaps: count(|step| matches!(step, Step::Unmap { .. })),
                segments: self.plan.segments.clone(),
                lines: 0,
                quiet: Vec::new(),
                steps,
            },
            step_rings,
            rings: self.rings.iter().copied().filter(received).collect(),
            traffic: self.traffic,
        }
    }

    /// Number of bursts that ended.
    #[cfg(test)]
    pub(super) fn bursts(&self) -> u64 {
        let ends = |timed: &&TimedStep| matches!(timed.step, Step::EndBurst { .. });
        self.plan.steps.iter().filter(ends).count() as u64
    }
}

/// Log of API calls.
#[derive(Debug, Default)]
struct CallLog {
    run: Run,
    free: Vec<u32>,
    next: u32,
    calls: u64,
    /// By ring: true if it had an unmap since its last end of a burst. A burst without an unmap is
    /// not logged.
    unmapped: Vec<bool>,
}

/// Index of a ring in its port: even for receive rings, odd for transmit rings.
pub(super) fn ring_index(ring: DeviceRing) -> u16 {
    ring.queue * 2 + u16::from(ring.direction == ringfence_types::Direction::ToDevice)
}

impl CallLog {
    fn push(&mut self, ring: DeviceRing, step: Step) {
        self.calls += 1;
        self.note(ring, step);
    }

    /// Logs a step at the time of the last call.
    fn note(&mut self, ring: DeviceRing, step: Step) {
        let time = Nanos(self.calls * CALL_NS);
        self.run.plan.steps.push(TimedStep { time, step });
        let index = ring_index(ring);
        self.run.step_rings.push(index);
        if !self.run.rings.contains(&index) {
            self.run.rings.push(index);
        }
    }

    fn map(&mut self, ring: DeviceRing, memory: PhysRange) -> u32 {
        let id = self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        let first = self.run.plan.segments.len() as u32;
        self.run.plan.segments.push(memory);
        self.run.plan.maps += 1;
        let step = Step::Map {
            id: MappingId(id),
            device: DeviceIndex(0),
            cpu: 0,
            direction: ring.direction,
            first,
            count: 1,
        };
        self.push(ring, step);
        id
    }

    fn unmap(&mut self, ring: DeviceRing, id: u32) {
        self.free.push(id);
        self.run.plan.unmaps += 1;
        let index = usize::from(ring_index(ring));
        if self.unmapped.len() <= index {
            self.unmapped.resize(index + 1, false);
        }
        self.unmapped[index] = true;
        let step = Step::Unmap {
            id: MappingId(id),
            device: DeviceIndex(0),
            cpu: 0,
            direction: ring.direction,
        };
        self.push(ring, step);
    }

    /// Logs a doorbell. The driver's doorbell write itself is part of C_none; making maps visible
    /// before it is the layer's work.
    fn doorbell(&mut self, ring: DeviceRing) {
        let step = Step::Doorbell {
            device: DeviceIndex(0),
            cpu: 0,
            direction: ring.direction,
        };
        self.note(ring, step);
    }

    fn end_burst(&mut self, ring: DeviceRing) {
        let open = self.unmapped.get_mut(usize::from(ring_index(ring)));
        if open.is_some_and(std::mem::take) {
            let step = Step::EndBurst {
                device: DeviceIndex(0),
                cpu: 0,
                direction: ring.direction,
            };
            self.push(ring, step);
        }
    }
}

/// The DMA API without protection, with a log of its calls.
pub(super) struct TappedApi<'a> {
    layer: LayerApi<'a, Identity, Never, Buffer, ReplayPlatform, Attachment, ()>,
    log: &'a mut CallLog,
}

impl DmaApi for TappedApi<'_> {
    type Handle = (Mapping<Buffer>, u32);
    type Memory = Arena;

    fn memory(&self) -> &Arena {
        self.layer.platform.memory()
    }

    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap> {
        let mapped = self.layer.map(ring, buffer, memory)?;
        let id = self.log.map(ring, memory);
        Ok(Mapped {
            iova: mapped.iova,
            handle: (mapped.handle, id),
        })
    }

    fn unmap(
        &mut self,
        ring: DeviceRing,
        (handle, id): Self::Handle,
    ) -> Result<Option<Buffer>, ApiError> {
        let back = self.layer.unmap(ring, handle)?;
        self.log.unmap(ring, id);
        Ok(back)
    }

    fn end_burst(&mut self, ring: DeviceRing, back: impl FnMut(Buffer)) -> Result<(), ApiError> {
        self.layer.end_burst(ring, back)?;
        self.log.end_burst(ring);
        Ok(())
    }

    fn sync_map(&mut self, ring: DeviceRing) {
        self.layer.sync_map(ring);
        self.log.doorbell(ring);
    }

    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        self.layer.alloc_coherent(ring, pages)
    }

    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        self.layer.free_coherent(ring, memory)
    }
}

/// A machine whose IOMMU is off, and the log of its driver's calls.
pub(super) struct UnprotectedPlatform {
    arena: Rc<Arena>,
    machine: ReplayPlatform,
    dma: Dma<Identity, Never, Buffer>,
    cpu: Cpu<Identity, Never, Buffer>,
    at: Attachment,
    log: CallLog,
}

impl UnprotectedPlatform {
    pub(super) fn new() -> Result<Self, LabError> {
        let machine = ReplayPlatform::<Vtd>::new(&Profile::r210_2015(), false)?;
        let mut dma = Dma::new(Never);
        let at = dma
            .attach(NIC, Iova::new(u64::MAX), |domain| {
                Ok::<_, LabError>(Identity::new(domain))
            })
            .map_err(|_| LabError::TooManyDevices)?;
        Ok(Self {
            arena: Rc::clone(machine.arena()),
            machine,
            cpu: dma.cpu(),
            dma,
            at,
            log: CallLog::default(),
        })
    }

    /// Takes the calls logged so far. The caller adds the frame counts.
    pub(super) fn take_run(&mut self) -> Run {
        let run = std::mem::take(&mut self.log.run);
        self.log.run.rings.clone_from(&run.rings);
        run
    }
}

impl Environment for UnprotectedPlatform {
    type Handle = (Mapping<Buffer>, u32);
    type Api<'a> = TappedApi<'a>;
    type Bus<'a> = Bus<'a, VtdUnit, Arena, ()>;

    fn api(&mut self) -> TappedApi<'_> {
        TappedApi {
            layer: LayerApi {
                dma: &self.dma,
                cpu: &mut self.cpu,
                platform: &mut self.machine,
                at: &self.at,
                hooks: (),
            },
            log: &mut self.log,
        }
    }

    fn bus(&mut self) -> Self::Bus<'_> {
        Bus::new(&mut self.machine.iommu.hardware.unit, &self.arena, ())
    }
}

/// A testbed that records its runs.
pub(super) struct Capture<W> {
    environment: UnprotectedPlatform,
    testbed: NicTestbed<(Mapping<Buffer>, u32)>,
    workload: W,
    packets: u64,
    before: CallTotals,
}

impl<W: Workload> Capture<W> {
    /// Opens a new port of `adapter` under `workload`, with the adapter's receptions for each
    /// interrupt and the run length of decision 0011.
    ///
    /// # Errors
    /// Memory is exhausted, or the port cannot be opened.
    pub(super) fn new(adapter: NicProfile, workload: W) -> Result<Self, LabError> {
        Self::with(adapter, workload, adapter.rx_frames, PACKETS_PER_RUN)
    }

    /// Like [`Self::new`], but with another burst limit and number of packets per run.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn with(
        adapter: NicProfile,
        workload: W,
        burst: u32,
        packets: u64,
    ) -> Result<Self, LabError> {
        let mut world = UnprotectedPlatform::new()?;
        let bytes = Nic::<()>::buffer_bytes(&adapter, burst);
        let memory = PhysRange::new(PhysAddr::new(1 << 20), bytes.next_multiple_of(4096));
        let memory = memory.ok_or(LabError::Internal("buffers"))?;
        let station = NicTestbed::open(&mut world, NIC, adapter, memory, burst, 1)
            .map_err(LabError::Testbed)?;
        Ok(Self {
            environment: world,
            testbed: station,
            workload,
            packets,
            before: CallTotals::default(),
        })
    }

    /// Returns the interrupts that the driver has handled so far.
    pub(super) fn interrupts(&self) -> u64 {
        self.testbed.device_stats().interrupts
    }

    /// Records the next run. The first run begins with the driver filling the port's rings.
    ///
    /// # Errors
    /// The workload cannot continue.
    pub(super) fn run(&mut self) -> Result<Run, LabError> {
        self.workload.begin_run();
        self.testbed
            .run(&mut self.environment, &mut self.workload, self.packets)
            .map_err(LabError::Testbed)?;
        let stats = self.testbed.stats();
        let now = CallTotals {
            packets: stats.received + stats.sent,
            received: stats.received,
            bytes: stats.bytes,
        };
        let mut run = self.environment.take_run();
        run.traffic = CallTotals {
            packets: now.packets - self.before.packets,
            received: now.received - self.before.received,
            bytes: now.bytes - self.before.bytes,
        };
        self.before = now;
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use ringfence_devices::workload::{BURST, NetperfStream};

    use super::*;

    #[test]
    fn closed_loop_resumes_in_the_next_run() {
        use ringfence_devices::workload::Apache;
        let clients = Apache::CLIENTS_EIOVAR;
        let apache = Apache::new(Apache::BIG, clients, 1);
        let mut capture = Capture::with(NicProfile::MLX, apache, BURST, 3000).unwrap();
        for _ in 0..3 {
            let traffic = capture.run().unwrap().traffic;
            assert!((3000..3500).contains(&traffic.packets), "{traffic:?}");
        }
    }

    #[test]
    fn a_run_has_every_buffer_mapped_before_it_is_unmapped() {
        let mut capture =
            Capture::with(NicProfile::MLX, NetperfStream::default(), BURST, 600).unwrap();
        let mut live = std::collections::BTreeSet::new();
        let mut most = 0;
        for _ in 0..3 {
            let run = capture.run().unwrap();
            assert_eq!(run.step_rings.len(), run.plan.steps.len());
            assert!(run.traffic.packets >= 600);
            for timed in &run.plan.steps {
                match timed.step {
                    Step::Map { id, .. } => assert!(live.insert(id.0)),
                    Step::Unmap { id, .. } => assert!(live.remove(&id.0)),
                    Step::EndBurst { .. }
                    | Step::Doorbell { .. }
                    | Step::EndDescriptor { .. }
                    | Step::Tick => {}
                }
                most = most.max(live.len());
            }
            assert!(run.plan.unmaps > 0);
            let received = run.receive_only();
            assert!(received.plan.steps.len() < run.plan.steps.len());
            assert_eq!(received.step_rings.len(), received.plan.steps.len());
            assert!(received.plan.maps >= received.plan.unmaps && received.plan.unmaps > 0);
            assert!(run.bursts() > 0);
        }
        // All receive rings are full.
        assert!(most >= 8192, "{most}");
    }
}
