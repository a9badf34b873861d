//! The ten steps of a mapping in their order (PV09; section 4.3 of the PVIOMMU paper, Fig. 5), for
//! assigned and for simulated devices.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{Paged, Rounding};
use ringfence_dma::{Dma, Released};
use ringfence_hw::{UnitConfig, VtdUnit};
use ringfence_iova::{
    AllocError, AllocRequest, Allocation, CachedRbTree, CachedTree, IovaAllocator,
};
use ringfence_memory::Arena;
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, FixedLastTable, GrantError, Grants, GuestBacking,
    HardwareTables, Hva, IoError, IoTables, OnDemand, PinError, SimulatedTables,
};
use ringfence_pviommu::frontend::{
    Channel, ChannelOptions, Queue, QueueFull, RemoteTable, RequestId, SharedChannel,
    UnmapCompletions, Used,
};
use ringfence_pviommu::wire::{Gpa, Status};
use ringfence_types::{Direction, DomainId, Iova, Nanos, Pfn, PfnRange, PhysAddr};

use crate::guest::buffer;
use crate::machine::{ID, Machine, SPACE};
use crate::rig::{MEMORY, NIC, PAGE, Rig, Source, WINDOW, config, memory};
use Step::*;

/// An observed step, with its number in section 4.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// 2: the frontend allocates this many pages of I/O addresses.
    Allocate(u64),
    /// 3: a request is added to the available ring.
    Add,
    /// 3: the device is notified: the hypercall.
    Notify,
    /// 4: the backend takes the request from the ring.
    Take,
    /// 5: the backend locates the frame of a guest page, and allocates it first if `new`.
    Locate { gpa: u64, new: bool },
    /// 6: the simulator may access a frame.
    Grant(PhysAddr),
    /// 7: the entry of a GIOVA is written.
    Map { giova: u64, target: PhysAddr },
    /// 7: the device sees the entries.
    Commit,
    /// 8: the status byte and the used ring are written.
    Answer(Status),
    /// 9: the frontend takes the answer from the used ring.
    Receive,
}

type Log = Rc<RefCell<Vec<Step>>>;

/// A part of the path that logs its steps.
struct Logged<T> {
    part: T,
    log: Log,
}

impl<T> Logged<T> {
    fn note(&self, step: Step) {
        self.log.borrow_mut().push(step);
    }
}

impl<A: IovaAllocator> IovaAllocator for Logged<A> {
    type PerCpu = A::PerCpu;
    type FreeProof = A::FreeProof;

    fn per_cpu(&self) -> A::PerCpu {
        self.part.per_cpu()
    }

    fn alloc(&self, cpu: &mut A::PerCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.note(Allocate(request.pages));
        self.part.alloc(cpu, request)
    }

    fn find(&self, cpu: &mut A::PerCpu, page: Pfn) -> Option<PfnRange> {
        self.part.find(cpu, page)
    }

    fn free(&self, cpu: &mut A::PerCpu, range: A::FreeProof) -> bool {
        self.part.free(cpu, range)
    }

    fn footprint(&self) -> usize {
        self.part.footprint()
    }
}

type Memory = OnDemand<Arc<Arena>, Source, FixedLastTable>;

impl GuestBacking for Logged<Memory> {
    fn contains(&self, page: Gpa) -> bool {
        self.part.contains(page)
    }

    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        let before = self.part.stats().allocated;
        let pinned = self.part.pin(page);
        let new = self.part.stats().allocated > before;
        let gpa = page.get();
        self.note(Locate { gpa, new });
        pinned
    }

    fn unpin(&mut self, page: Gpa) {
        self.part.unpin(page);
    }
}

impl<T: IoTables> IoTables for Logged<T> {
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        let mapped = self.part.map(device, giova, frame, direction);
        let giova = giova.get();
        let target = frame;
        self.note(Map { giova, target });
        mapped
    }

    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        self.part.unmap(device, giova)
    }

    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        self.note(Commit);
        self.part.commit(device)
    }
}

/// A simulator's process, at consecutive addresses.
struct Simulator {
    log: Log,
    next: u64,
}

impl Grants for Simulator {
    fn grant(&mut self, _: DeviceSlot, frame: PhysAddr, _: Direction) -> Result<Hva, GrantError> {
        self.log.borrow_mut().push(Grant(frame));
        self.next += PAGE;
        Ok(Hva::new(self.next))
    }

    fn revoke(&mut self, _: DeviceSlot, _: Hva) -> Result<(), GrantError> {
        Ok(())
    }

    fn commit(&mut self, _: DeviceSlot) -> Result<(), GrantError> {
        Ok(())
    }
}

/// A virtqueue whose device executes the available requests on a notification.
struct Ring<B, T> {
    backend: Backend<B, T>,
    available: VecDeque<(RequestId, Vec<u8>)>,
    used: VecDeque<Used>,
    next: u32,
}

impl<B: GuestBacking, T: IoTables> Queue for Logged<Ring<B, T>> {
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull> {
        self.note(Add);
        let id = RequestId(self.part.next);
        self.part.next += 1;
        self.part.available.push_back((id, request.to_vec()));
        Ok(id)
    }

    fn kick(&mut self) {
        self.note(Notify);
        while let Some((id, request)) = self.part.available.pop_front() {
            self.note(Take);
            let status = self.part.backend.handle(&request);
            self.note(Answer(status));
            let status = status.raw();
            self.part.used.push_back(Used { id, status });
        }
    }

    fn poll(&mut self) -> Option<Used> {
        let used = self.part.used.pop_front()?;
        self.note(Receive);
        Some(used)
    }
}

/// Maps two pages (steps 1 to 10), unmaps them, and maps them again. Returns the steps of each map,
/// the frames of the pages, and the GIOVAs.
fn steps_of_two_maps<T: IoTables>(
    tables: impl FnOnce(&Rig, &Log) -> T,
) -> ([Vec<Step>; 2], [PhysAddr; 2], [u64; 2]) {
    let rig = Rig::new();
    let log = Log::default();
    let logged = |log: &Log| Rc::clone(log);
    let backing = OnDemand::new(
        Arc::clone(&rig.arena),
        rig.tables.clone(),
        rig.frames.clone(),
        SecondStage::new(Levels::Four),
        DomainId::new(9),
        &memory(),
        FixedLastTable::default(),
        (),
    )
    .unwrap();
    let backing = Logged {
        part: backing,
        log: logged(&log),
    };
    let tables = Logged {
        part: tables(&rig, &log),
        log: logged(&log),
    };
    let ring = Logged {
        part: Ring {
            backend: Backend::new(config(), BackendLimits::default(), backing, tables),
            available: VecDeque::new(),
            used: VecDeque::new(),
            next: 0,
        },
        log: logged(&log),
    };
    let options = ChannelOptions {
        pages_max: 16,
        max_empty_polls: 10,
    };
    let link = Rc::new(SharedChannel::new(
        Channel::new(ring, options),
        RefCell::new,
    ));
    let mut machine = Machine {
        memory: rig.arena,
        frames: rig.tables,
        answers: UnmapCompletions::new(Rc::clone(&link)),
        now: Nanos(0),
    };
    let mut dma = Dma::new(Strict);
    let window = PfnRange::new(Pfn::containing(Iova::new(WINDOW)), SPACE).unwrap();
    let at = dma
        .attach(ID, Iova::new(u64::from(u32::MAX)), |domain| {
            let allocator = Logged {
                part: CachedRbTree::new(CachedTree::new(window), RefCell::new),
                log: logged(&log),
            };
            let table = RemoteTable::new(Rc::clone(&link), NIC, domain);
            Ok::<_, ()>(Paged::new(allocator, table, Rounding::Exact))
        })
        .unwrap();
    let mut cpu = dma.cpu();
    // Step 1: the driver prepares the buffer.
    let memory = buffer(MEMORY + PAGE + 100, PAGE);
    let mut giovas = [0; 2];
    let steps = [(); 2].map(|()| {
        log.borrow_mut().clear();
        let direction = Direction::FromDevice;
        let (mapping, _) = dma
            .map_single(&mut cpu, &mut machine, &at, 7, memory, direction)
            .unwrap();
        // Step 10: map has returned. The driver may start its DMA.
        let steps = log.borrow().clone();
        let first = mapping.iova().align_down(PAGE).get();
        giovas = [first, first + PAGE];
        let Released(back) = dma
            .unmap_single(&mut cpu, &mut machine, &at, mapping)
            .unwrap();
        assert_eq!(back, 7);
        steps
    });
    let frames = link.with(|channel| {
        let backend = &mut channel.queue().part.backend;
        [1, 2].map(|page| {
            let gpa = Gpa::new(MEMORY + page * PAGE);
            backend.backing().part.resolve(gpa).unwrap()
        })
    });
    (steps, frames, giovas)
}

/// Returns steps 2 to 9, with step 6 for a simulated device.
fn expected(frames: [PhysAddr; 2], giovas: [u64; 2], new: bool, simulated: bool) -> Vec<Step> {
    let mut steps = vec![Allocate(2), Add, Notify, Take];
    for (page, (target, giova)) in (1..).zip(frames.into_iter().zip(giovas)) {
        let gpa = MEMORY + page * PAGE;
        steps.push(Locate { gpa, new });
        steps.extend(simulated.then_some(Grant(target)));
        steps.push(Map { giova, target });
    }
    steps.extend([Commit, Answer(Status::Ok), Receive]);
    steps
}

#[test]
fn an_assigned_device_is_mapped_in_ten_steps() {
    let (steps, frames, giovas) = steps_of_two_maps(|rig, _| {
        HardwareTables::new(
            Arc::clone(&rig.arena),
            rig.tables.clone(),
            VtdUnit::vtd(&UnitConfig::UNCACHED),
            SecondStage::new(Levels::Four),
            Coherency::Coherent,
            &[1, 2].map(DomainId::new),
        )
        .unwrap()
    });
    // The first map allocates the frames; the second finds them.
    for (steps, new) in steps.iter().zip([true, false]) {
        assert_eq!(*steps, expected(frames, giovas, new, false));
    }
}

#[test]
fn a_simulated_device_is_granted_a_page_before_its_entry() {
    let (steps, frames, giovas) = steps_of_two_maps(|rig, log| {
        let simulator = Simulator {
            log: Rc::clone(log),
            next: 0,
        };
        let format = SecondStage::new(Levels::Four);
        let (arena, frames) = (Arc::clone(&rig.arena), rig.tables.clone());
        SimulatedTables::new(arena, frames, simulator, format, 2).unwrap()
    });
    for (steps, new) in steps.iter().zip([true, false]) {
        assert_eq!(*steps, expected(frames, giovas, new, true));
    }
}
