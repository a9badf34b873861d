//! The devices of one guest, each behind its own session; a device is created at its first use.

use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::{Direct, Dma, MemoryInUse};
use ringfence_live::iommu::{EndpointMemory, GuestDma, VirtioIommu};
use ringfence_live::link::{
    Deframed, Deframer, MAX_FRAME_BYTES, MIN_FRAME_BYTES, NetLink, ReceiveOutcome, SendOutcome,
};
use ringfence_live::pviommu::{PvDma, PvIommu};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::iommu::IommuDevice;
use ringfence_live::virtio::net::Net;
use ringfence_live::virtio::pviommu::PvIommuDevice;
use ringfence_live::virtio::{self, DmaAddresses, PollSource, VirtioPci};
use ringfence_live::{CONFIG_REGION, Outcome, Session};
use ringfence_types::RequesterId;
use ringfence_vfio_user::Message;
use vm_memory::GuestMemoryMmap;

use crate::OutcomeHook;

/// The endpoint's number, as in VIOT.
const ENDPOINT: RequesterId = RequesterId::new(0x20);

/// A device's access to memory, which counts its uses.
struct Counted<A> {
    dma: A,
    taken: Arc<AtomicU64>,
}

impl<A: Dma + 'static> Dma for Counted<A> {
    type View<'a> = A::View<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&Self::View<'_>) -> R) -> R {
        self.taken.fetch_add(1, Ordering::Relaxed);
        self.dma.with(access)
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        self.dma.set_memory(memory)
    }
}

/// A device and its counters.
struct One<F> {
    session: Session<F>,
    counters: Arc<DeviceCounters>,
    /// Number of accesses to guest memory.
    taken: Arc<AtomicU64>,
    /// True if its driver has rung a doorbell while bus mastering was off.
    in_vain: bool,
}

impl<D: virtio::Device, A: Dma + 'static> One<VirtioPci<D, Counted<A>>> {
    fn new(device: D, dma: A, addresses: DmaAddresses, counters: Arc<DeviceCounters>) -> Self {
        let taken = Arc::new(AtomicU64::new(0));
        let dma = Counted {
            dma,
            taken: Arc::clone(&taken),
        };
        let function = VirtioPci::new(device, dma, addresses, Arc::clone(&counters));
        Self {
            session: Session::new(function),
            counters,
            taken,
            in_vain: false,
        }
    }
}

impl<F: PolledFunction> One<F> {
    /// Reads Bus Master Enable in the command register, as its driver does.
    fn is_master(&mut self) -> bool {
        let mut command = [0];
        let function = self.session.function();
        let read = function.read(CONFIG_REGION, 4, &mut command);
        read.expect("a register");
        command[0] & 4 != 0
    }

    /// Returns true if its driver has started the device.
    fn runs(&mut self) -> bool {
        let mut status = [0];
        let read = self.session.function().read(0, 0x14, &mut status);
        read.expect("a register");
        status[0] & 0xc4 == 4
    }

    /// Returns true if the device asks for a reset.
    fn broken(&mut self) -> bool {
        let mut status = [0];
        let read = self.session.function().read(0, 0x14, &mut status);
        read.expect("a register");
        status[0] & 64 != 0
    }

    /// Runs `work`. A device without bus mastering, before or after, must not access memory.
    fn watched<R>(&mut self, work: impl FnOnce(&mut Session<F>) -> R) -> R {
        let now = |one: &Self| {
            (
                one.taken.load(Ordering::Relaxed),
                one.counters.doorbells.get(),
            )
        };
        let (before, was) = (now(self), self.is_master());
        let result = work(&mut self.session);
        let (taken, doorbells) = now(self);
        let may = was && self.is_master();
        assert!(may || taken == before.0, "memory was touched");
        self.in_vain |= !may && doorbells != before.1 && self.runs();
        result
    }
}

/// A device that can receive messages.
trait Device {
    fn handle(&mut self, message: Message) -> Outcome;
    fn turn(&mut self, came: bool);
    /// Returns true if a request has succeeded.
    fn succeeded(&self) -> bool;
}

impl<F: PolledFunction> Device for One<F> {
    fn handle(&mut self, message: Message) -> Outcome {
        self.watched(|session| session.handle(message))
    }

    /// Does the server's work between two messages.
    fn turn(&mut self, came: bool) {
        self.watched(|session| {
            let function = session.function();
            if came {
                function.on_ready();
            }
            if function.unfinished() {
                function.continue_work();
            }
        });
    }

    fn succeeded(&self) -> bool {
        let counters = &self.counters;
        counters.requests.get() > counters.failed.get() + counters.malformed.get()
    }
}

/// The other end of the network: a stream of bytes from the input in QEMU's framing, and as much
/// room as the input states.
#[derive(Default)]
struct Peer {
    stream: VecDeque<u8>,
    deframer: Deframer,
    lost: bool,
    room: u8,
}

impl NetLink for Peer {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        assert!((MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&frame.len()));
        match self.room.checked_sub(1) {
            Some(room) => self.room = room,
            None => return SendOutcome::Full,
        }
        SendOutcome::Taken
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        if self.lost {
            return ReceiveOutcome::Nothing;
        }
        let bytes = self.stream.make_contiguous();
        let mut piece = &*bytes;
        let deframed = self.deframer.feed(&mut piece, buffer);
        let taken = bytes.len() - piece.len();
        self.stream.drain(..taken);
        match deframed {
            Ok(Deframed::Frame(bytes)) => ReceiveOutcome::Frame(bytes),
            Ok(Deframed::Dropped) => ReceiveOutcome::Dropped,
            Ok(Deframed::Part) => ReceiveOutcome::Nothing,
            Err(_) => {
                self.lost = true;
                ReceiveOutcome::Nothing
            }
        }
    }

    fn waits_for(&self, _input: bool, _output: bool) -> Option<PollSource<'_>> {
        None
    }
}

type Disk<A> = One<VirtioPci<Blk, Counted<A>>>;

type Card = One<VirtioPci<Net<Peer>, Counted<Direct>>>;
type Unit = One<VirtioPci<IommuDevice, Counted<GuestDma>>>;
type Para = One<VirtioPci<PvIommuDevice, Counted<PvDma>>>;

/// The devices of one input: a disk, and others created on demand.
pub(super) struct Devices<'f> {
    file: &'f File,
    talking_to: u8,
    disk: Disk<Direct>,
    net: Option<Card>,
    iommu: Option<(Unit, Disk<EndpointMemory>)>,
    para: Option<(Para, Disk<EndpointMemory>)>,
}

fn disk<A: Dma + 'static>(file: &File, dma: A, addresses: DmaAddresses) -> Disk<A> {
    let counters = Arc::new(DeviceCounters::default());
    let file = file.try_clone().expect("a copy");
    let disk = Blk::new(file, false, Arc::clone(&counters)).expect("a disk");
    One::new(disk, dma, addresses, counters)
}

impl<'f> Devices<'f> {
    /// Creates a disk over `file`; other devices follow when the input needs them.
    pub(super) fn new(file: &'f File) -> Self {
        Self {
            file,
            talking_to: 0,
            disk: disk(file, Direct::default(), DmaAddresses::GuestPhysical),
            net: None,
            iommu: None,
            para: None,
        }
    }

    /// Selects the device for the next messages: the disk (0), a network device (1), an IOMMU (2),
    /// a disk behind it (3), the para-virtual IOMMU (4), a disk behind it (5).
    pub(super) fn talk_to(&mut self, device: u8) {
        self.talking_to = device % 6;
        match self.talking_to {
            1 if self.net.is_none() => self.net = Some(net()),
            2 | 3 if self.iommu.is_none() => self.iommu = Some(iommu(self.file)),
            4 | 5 if self.para.is_none() => self.para = Some(para(self.file)),
            _ => {}
        }
    }

    /// The other end of the network sends `bytes` and has room for `room` frames.
    pub(super) fn peer(&mut self, room: u8, bytes: &[u8]) {
        if let Some(net) = &mut self.net {
            let link = net.session.function().device().link();
            link.stream.extend(bytes);
            link.room = room;
            net.turn(true);
        }
    }

    fn present(&mut self) -> &mut dyn Device {
        let of_iommu = self.iommu.as_mut();
        let of_para = self.para.as_mut();
        match (self.talking_to, &mut self.net, of_iommu, of_para) {
            (1, Some(net), ..) => net,
            (2, _, Some((iommu, _)), _) => iommu,
            (3, _, Some((_, disk)), _) => disk,
            (4, .., Some((para, _))) => para,
            (5, .., Some((_, disk))) => disk,
            _ => &mut self.disk,
        }
    }

    /// Passes a message to the selected device, and lets all devices work as the server does.
    pub(super) fn handle(&mut self, message: Message) -> Outcome {
        let outcome = self.present().handle(message);
        self.disk.turn(false);
        if let Some(net) = &mut self.net {
            net.turn(false);
        }
        if let Some((iommu, disk)) = &mut self.iommu {
            disk.turn(false);
            iommu.turn(true);
        }
        if let Some((para, disk)) = &mut self.para {
            disk.turn(false);
            para.turn(true);
        }
        outcome
    }

    /// Reports the outcomes so far.
    pub(super) fn tell(&mut self, reached: OutcomeHook<'_>) {
        let mut tell = |name, holds| {
            if holds {
                reached(name);
            }
        };
        tell("served", self.disk.succeeded());
        tell("rung in vain", self.disk.in_vain);
        tell("made up for", self.disk.in_vain && self.disk.succeeded());
        if let Some(One { counters, .. }) = &self.net {
            tell("net: sent", counters.frames_sent.get() > 0);
            tell("net: received", counters.frames_received.get() > 0);
            tell("net: dropped", counters.frames_dropped.get() > 0);
            tell("net: no such command", counters.failed.get() > 0);
        }
        let net = self.net.as_ref().is_some_and(|net| net.in_vain);
        tell("net: rung in vain", net);
        if let Some((iommu, disk)) = &self.iommu {
            tell("iommu: served", iommu.succeeded());
            tell("iommu: rung in vain", iommu.in_vain);
            tell("iommu: refused", iommu.counters.failed.get() > 0);
            tell("iommu: fault", iommu.counters.faults.get() > 0);
            tell("iommu: stale", iommu.counters.stale.get() > 0);
            tell("translated: served", disk.succeeded());
        }
        if let Some((para, disk)) = &mut self.para {
            tell("para: mapped", para.counters.maps.get() > 0);
            tell("para: unmapped", para.counters.unmaps.get() > 0);
            tell("para: refused", para.counters.failed.get() > 0);
            tell("para: fault", para.counters.faults.get() > 0);
            tell("para: broken", para.broken());
            tell("para: served", disk.succeeded());
        }
    }
}

fn net() -> Card {
    let counters = Arc::new(DeviceCounters::default());
    let pairs = NonZeroU16::new(2).unwrap_or(NonZeroU16::MIN);
    let net = Net::new(Peer::default(), [2; 6], pairs, Arc::clone(&counters));
    One::new(
        net,
        Direct::default(),
        DmaAddresses::GuestPhysical,
        counters,
    )
}

fn para(file: &File) -> (Para, Disk<EndpointMemory>) {
    let counters = Arc::new(DeviceCounters::default());
    let iommu = PvIommu::new(&[ENDPOINT], Arc::clone(&counters)).expect("an event");
    let reader = iommu.reader(ENDPOINT).expect("the first");
    let device = PvIommuDevice::new(iommu.clone(), Arc::clone(&counters));
    let unit = One::new(
        device,
        iommu.memory(),
        DmaAddresses::GuestPhysical,
        counters,
    );
    (unit, disk(file, reader, DmaAddresses::Translated))
}

fn iommu(file: &File) -> (Unit, Disk<EndpointMemory>) {
    let counters = Arc::new(DeviceCounters::default());
    let iommu = VirtioIommu::new(Arc::clone(&counters)).expect("an event");
    let endpoint = iommu.add_endpoint(ENDPOINT).expect("the first");
    let device = IommuDevice::new(iommu.clone(), Arc::clone(&counters));
    let unit = One::new(
        device,
        iommu.memory(),
        DmaAddresses::GuestPhysical,
        counters,
    );
    (unit, disk(file, endpoint, DmaAddresses::Translated))
}
