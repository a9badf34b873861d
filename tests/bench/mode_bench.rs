//! The bench of one mode: its layer over its hardware, with attackers and the oracle.

use ringfence_devices::{
    Attacker, DeviceMapping as Target, DmaPort, DmaRequest, DriverEvent, Neighbour, Passive, Racer,
    Replayer,
};
use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::Space;
use ringfence_dma::{
    Coherent, Cpu, Dma, DmaSegment, MapMultiRequest as MapRequest, MapReason, Mapping, Outcome,
    SgLimits, SgMapping, SgRequest,
};
use ringfence_lab::hardware::Hardware;
use ringfence_lab::layer::Attachments;
use ringfence_lab::oracle::{GrantId, Oracle, Ownership, Verdict, VerdictCounts};
use ringfence_lab::reached::with_copies;
use ringfence_lab::replay_platform::ReplayPlatform;
use ringfence_types::{
    Access, Direction, Fault, Iova, IovaRange, Nanos, PageSize, PhysRange, RequesterId,
};

use super::build::attackers;
use super::observer::{Eye, row};
use super::{AccessResult, Bench, CPUS, DEVICES, Handle};

/// The racer comes last: the cache of a ring holds the entry used last, and the replayer tries that
/// entry.
pub(super) type Attackers = ((Replayer, Neighbour), Racer);

enum Held {
    Single(Mapping<u64>),
    List(SgMapping<u64>),
    Coherent(Coherent),
    Unmapped,
}

struct Slot {
    held: Held,
    device: usize,
    ranges: Vec<IovaRange>,
    direction: Direction,
    grant: GrantId,
    back: bool,
}

pub(super) struct World<H, S: Space, F: FlushPolicy<S, u64>> {
    machine: ReplayPlatform<H>,
    dma: Dma<S, F, u64>,
    cpus: Vec<Cpu<S, F, u64>>,
    at: Vec<Attachments>,
    oracle: Oracle,
    last: Verdict,
    reached: Vec<PhysRange>,
    slots: Vec<Slot>,
    attackers: Option<Attackers>,
    attempts: u64,
    unmaps: u64,
    translates: bool,
}

struct Accesses<'a, H> {
    machine: &'a mut ReplayPlatform<H>,
    eye: Eye<'a>,
    made: u64,
}

impl<H: Hardware> DmaPort for Accesses<'_, H> {
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
        self.made += 1;
        self.machine.probe(request, &mut self.eye)
    }
}

impl<H: Hardware, S: Space, F: FlushPolicy<S, u64>> World<H, S, F> {
    pub(super) fn new(
        machine: ReplayPlatform<H>,
        dma: Dma<S, F, u64>,
        at: Vec<Attachments>,
        ownership: Ownership,
    ) -> Self {
        let translates = ownership != Ownership::Byte;
        let mut oracle = Oracle::new(ownership);
        for at in at.iter().map(|at| at.for_direction(Direction::ToDevice)) {
            let pool = dma.space(at).and_then(|space| space.copies());
            if let Some(pool) = pool {
                oracle.set_pool(row(at.device()), pool.memory);
            }
        }
        Self {
            machine,
            cpus: (0..CPUS).map(|_| dma.cpu()).collect(),
            dma,
            at,
            oracle,
            last: Verdict::Stopped,
            reached: Vec::new(),
            slots: Vec::new(),
            attackers: Some(attackers(translates)),
            attempts: 0,
            unmaps: 0,
            translates,
        }
    }

    fn port(&mut self) -> Accesses<'_, H> {
        Accesses {
            machine: &mut self.machine,
            eye: Eye {
                oracle: &mut self.oracle,
                last: &mut self.last,
                reached: &mut self.reached,
            },
            made: 0,
        }
    }

    fn attack(&mut self, event: &DriverEvent) {
        let Some(mut attackers) = self.attackers.take() else {
            return;
        };
        let mut port = self.port();
        attackers.on(event, &mut port);
        let made = port.made;
        self.attempts += made;
        self.attackers = Some(attackers);
    }

    fn keep(
        &mut self,
        device: usize,
        held: Held,
        ranges: Vec<IovaRange>,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Handle {
        let at = self.at[device].for_direction(direction);
        let row = row(at.device());
        let grant = if self.translates && !S::CONTIGUOUS_SG && ranges.len() == pieces.len() {
            self.oracle
                .grant_per_segment(row, &ranges, pieces, direction)
        } else {
            // The device reaches copies of the pieces in spaces that make them.
            let space = self.dma.space(at).unwrap();
            let reached = match (space.shadow(ranges[0]), space.copies()) {
                (Some(shadow), _) => copies_of(pieces, shadow),
                (None, Some(pool)) => {
                    let mut parts = Vec::new();
                    space.each_copied_part(ranges[0], &mut |at, copy| parts.push((at, copy)));
                    with_copies(pieces, ranges[0], &parts, pool.memory).unwrap()
                }
                (None, None) => pieces.to_vec(),
            };
            self.oracle.grant(row, ranges[0], &reached, direction)
        };
        self.slots.push(Slot {
            held,
            device,
            ranges,
            direction,
            grant,
            back: false,
        });
        let handle = self.slots.len() - 1;
        self.tell(DriverEvent::Mapped, handle);
        handle
    }

    /// Reports a driver event for each range of a mapping to the attackers.
    fn tell(&mut self, event: fn(Target) -> DriverEvent, handle: Handle) {
        let slot = &self.slots[handle];
        let (direction, at) = (slot.direction, &self.at[slot.device]);
        let device = at.for_direction(direction).device();
        for range in slot.ranges.clone() {
            self.attack(&event(Target {
                device,
                range,
                direction,
            }));
        }
    }

    /// The device uses the buffer, then the attackers act.
    fn before_unmap(&mut self, handle: Handle) {
        let slot = &self.slots[handle];
        let grant = self.oracle.get(slot.grant).expect("a live grant");
        let pieces: Vec<_> = grant.pieces().collect();
        let (direction, at) = (slot.direction, &self.at[slot.device]);
        let device = at.for_direction(direction).device();
        let mut port = self.port();
        for range in pieces {
            let target = Target {
                device,
                range,
                direction,
            };
            Passive.on(&DriverEvent::Unmapping(target), &mut port);
        }
        self.tell(DriverEvent::Unmapping, handle);
    }

    fn back(&mut self, handle: u64) {
        let slot = &mut self.slots[handle as usize];
        assert!(!slot.back, "buffer {handle} came back twice");
        slot.back = true;
        self.oracle.release(slot.grant);
    }

    fn after_unmap(&mut self, handle: Handle) {
        self.unmaps += 1;
        self.tell(DriverEvent::Unmapped, handle);
    }
}

/// Returns the memory that a device reaches in place of `pieces`, at consecutive pages of `shadow`.
fn copies_of(pieces: &[PhysRange], shadow: PhysRange) -> Vec<PhysRange> {
    let mut page = shadow.start().align_down(4096);
    let copy = |piece: &PhysRange| {
        let start = page.wrapping_add(piece.start().offset_in(4096));
        page = page.wrapping_add(piece.pages(PageSize::Size4K) << 12);
        PhysRange::new(start, piece.bytes()).unwrap()
    };
    pieces.iter().map(copy).collect()
}

impl<H: Hardware, S: Space, F: FlushPolicy<S, u64>> Bench for World<H, S, F> {
    fn try_map(
        &mut self,
        device: usize,
        cpu: usize,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Option<Handle> {
        let name = self.slots.len() as u64;
        let (own, at) = (
            &mut self.cpus[cpu],
            self.at[device].for_direction(direction),
        );
        let machine = &mut self.machine;
        let made = if let [piece] = pieces {
            self.dma
                .map_single(own, machine, at, name, *piece, direction)
                .map(|(mapping, _)| {
                    let ranges = vec![mapping.range()];
                    (Held::Single(mapping), ranges)
                })
        } else {
            let nothing = IovaRange::new(Iova::ZERO, 1).unwrap();
            let mut out = vec![DmaSegment { range: nothing }; pieces.len()];
            let limits = SgLimits {
                max_bytes: u64::MAX,
                boundary: None,
            };
            let request = SgRequest {
                buffer: name,
                pieces,
                direction,
                limits,
                out: &mut out,
            };
            let made = self.dma.map_sg(own, machine, at, request);
            made.map(|(mapping, count)| {
                let ranges = match mapping.range() {
                    Some(range) => vec![range],
                    None if S::CACHES_UNMAPPED => mapping.piece_ranges().to_vec(),
                    None => out[..count].iter().map(|out| out.range).collect(),
                };
                (Held::List(mapping), ranges)
            })
        };
        let (held, ranges) = match made {
            Ok(made) => made,
            Err((back, error)) => {
                assert_eq!(back, name);
                assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                return None;
            }
        };
        self.dma.sync_map(own, machine, at);
        Some(self.keep(device, held, ranges, pieces, direction))
    }

    fn map_multi(
        &mut self,
        device: usize,
        cpu: usize,
        buffers: &[(PhysRange, Direction)],
    ) -> Vec<Handle> {
        let first = self.slots.len() as u64;
        let requests = (first..)
            .zip(buffers)
            .map(|(buffer, &(memory, direction))| MapRequest {
                buffer,
                memory,
                direction,
            })
            .collect();
        let ring = buffers
            .first()
            .map_or(Direction::ToDevice, |(_, ring)| *ring);
        let (own, at) = (&mut self.cpus[cpu], self.at[device].for_direction(ring));
        let made = match self.dma.map_multi(own, &mut self.machine, at, requests) {
            Ok(made) => made,
            Err((back, error)) => {
                assert_eq!(back.len(), buffers.len());
                assert!(matches!(error.reason, MapReason::RingFull(_)), "{error}");
                return Vec::new();
            }
        };
        self.dma.sync_map(own, &mut self.machine, at);
        made.into_iter()
            .zip(buffers)
            .map(|(mapping, (memory, direction))| {
                let ranges = vec![mapping.range()];
                self.keep(
                    device,
                    Held::Single(mapping),
                    ranges,
                    &[*memory],
                    *direction,
                )
            })
            .collect()
    }

    fn map_coherent(&mut self, device: usize, cpu: usize, pages: usize) -> Option<Handle> {
        let both = Direction::Bidirectional;
        let (own, at) = (&mut self.cpus[cpu], self.at[device].for_direction(both));
        let memory = self
            .dma
            .alloc_coherent(own, &mut self.machine, at, pages)
            .ok()?;
        let frames = memory.frames().iter();
        let pieces: Vec<_> = frames.map(|f| PhysRange::new(*f, 4096).unwrap()).collect();
        let ranges = vec![memory.range()];
        self.dma.sync_map(own, &mut self.machine, at);
        Some(self.keep(device, Held::Coherent(memory), ranges, &pieces, both))
    }

    fn unmap(&mut self, handle: Handle, cpu: usize) {
        self.before_unmap(handle);
        let slot = &mut self.slots[handle];
        let held = std::mem::replace(&mut slot.held, Held::Unmapped);
        let (own, at) = (
            &mut self.cpus[cpu],
            self.at[slot.device].for_direction(slot.direction),
        );
        let machine = &mut self.machine;
        let outcome = match held {
            Held::Single(mapping) => self.dma.unmap_single(own, machine, at, mapping),
            Held::List(mapping) => self.dma.unmap_sg(own, machine, at, mapping),
            Held::Coherent(memory) => {
                self.dma.free_coherent(own, machine, at, memory).unwrap();
                self.back(handle as u64);
                return self.after_unmap(handle);
            }
            Held::Unmapped => panic!("{handle} is gone"),
        };
        match outcome.expect("mapped").into_buffer() {
            Some(name) => {
                assert_eq!(name, handle as u64, "another's buffer");
                self.back(name);
            }
            None => self.oracle.withhold(self.slots[handle].grant),
        }
        self.after_unmap(handle);
    }

    fn unmap_multi(&mut self, handles: &[Handle], cpu: usize) {
        let of = handles.first().map(|h| &self.slots[*h]);
        let Some((device, ring)) = of.map(|slot| (slot.device, slot.direction)) else {
            return;
        };
        let mut mappings = Vec::new();
        for handle in handles {
            self.before_unmap(*handle);
            let held = std::mem::replace(&mut self.slots[*handle].held, Held::Unmapped);
            let Held::Single(mapping) = held else {
                panic!("{handle} is no single mapping");
            };
            mappings.push(mapping);
        }
        let (own, at) = (&mut self.cpus[cpu], self.at[device].for_direction(ring));
        let mut back = Vec::new();
        self.dma
            .unmap_multi(own, &mut self.machine, at, mappings, |name| back.push(name))
            .expect("mapped");
        for handle in handles {
            if !back.contains(&(*handle as u64)) {
                self.oracle.withhold(self.slots[*handle].grant);
            }
        }
        for name in back {
            assert!(handles.contains(&(name as usize)), "another's buffer");
            self.back(name);
        }
        for handle in handles {
            self.after_unmap(*handle);
        }
    }

    fn end_burst(&mut self, device: usize, cpu: usize, direction: Direction) {
        let (own, at) = (
            &mut self.cpus[cpu],
            self.at[device].for_direction(direction),
        );
        let mut back = Vec::new();
        self.dma
            .end_burst(own, &mut self.machine, at, direction, |name| {
                back.push(name)
            })
            .expect("an invalidation that works");
        for name in back {
            let slot = &self.slots[name as usize];
            assert_eq!((slot.device, slot.direction), (device, direction));
            self.back(name);
        }
        self.attack(&DriverEvent::Other);
    }

    fn tick(&mut self, cpu: usize, nanos: u64) {
        self.machine.now = Nanos(self.machine.now.0 + nanos);
        let own = &mut self.cpus[cpu];
        self.dma
            .tick(own, &mut self.machine)
            .expect("an invalidation that works");
        self.attack(&DriverEvent::Other);
    }

    fn flush(&mut self) {
        for device in 0..DEVICES {
            for cpu in 0..CPUS {
                for direction in Direction::ALL {
                    self.end_burst(device, cpu, direction);
                }
            }
            let at = self.at[device].for_direction(Direction::ToDevice);
            let own = &mut self.cpus[0];
            self.dma.flush(own, &mut self.machine, at).unwrap();
        }
    }

    fn access(
        &mut self,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> AccessResult {
        let request = DmaRequest {
            device,
            iova,
            bytes,
            access,
        };
        self.port().access(&request)?;
        Ok(self.reached.clone())
    }

    fn ranges(&self, handle: Handle) -> &[IovaRange] {
        &self.slots[handle].ranges
    }

    fn is_back(&self, handle: Handle) -> bool {
        self.slots[handle].back
    }

    fn verdict(&self) -> Verdict {
        self.last
    }

    fn tally(&self) -> VerdictCounts {
        self.oracle.tally
    }

    fn attackers(&mut self, on: bool) {
        self.attackers = on.then(|| attackers(self.translates));
    }

    fn invalidate_all(&mut self) {
        let invalidated = self.machine.iommu.hardware.invalidate_all();
        invalidated.expect("an invalidation of everything");
    }

    fn lies_at(&self, handle: Handle) -> Vec<PhysRange> {
        match &self.slots[handle].held {
            Held::Coherent(memory) => {
                let frames = memory.frames().iter();
                frames.map(|f| PhysRange::new(*f, 4096).unwrap()).collect()
            }
            _ => Vec::new(),
        }
    }

    fn attempts(&self) -> u64 {
        self.attempts
    }

    fn counts(&self) -> (u64, u64) {
        (self.unmaps, self.machine.invalidations())
    }
}
