//! The devices of one guest, each behind a session of its own; made when they are first talked to.

use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZeroU16;
use std::sync::Arc;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Direct;
use ringfence_live::iommu::{GuestDma, Iommu, Translated};
use ringfence_live::link::{
    Deframed, Deframer, Link, MAX_FRAME_BYTES, MIN_FRAME_BYTES, Receiving, Sending,
};
use ringfence_live::server::Served;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::iommu::IommuDevice;
use ringfence_live::virtio::net::Net;
use ringfence_live::virtio::{Awaited, VirtioPci};
use ringfence_live::wire::Message;
use ringfence_live::{Outcome, Session};
use ringfence_types::DeviceId;

use crate::Reached;

/// The endpoint's number, as VIOT would say it.
const ENDPOINT: DeviceId = DeviceId::new(0x20);

/// A device and what it counts.
struct One<F> {
    session: Session<F>,
    counters: Arc<DeviceCounters>,
}

/// Whoever a message can be for.
trait Device {
    fn handle(&mut self, message: Message) -> Outcome;
    fn turn(&mut self, came: bool);
    /// Whether a request has succeeded.
    fn succeeded(&self) -> bool;
}

impl<F: Served> Device for One<F> {
    fn handle(&mut self, message: Message) -> Outcome {
        self.session.handle(message)
    }

    /// What the server does between two messages.
    fn turn(&mut self, came: bool) {
        let function = self.session.function();
        if came {
            function.came();
        }
        if function.unfinished() {
            function.go_on();
        }
    }

    fn succeeded(&self) -> bool {
        let counters = &self.counters;
        counters.requests.get() > counters.failed.get() + counters.malformed.get()
    }
}

/// The far side of the network: a stream of bytes that the input gives, in QEMU's framing, and as much room as it says.
#[derive(Default)]
struct Peer {
    stream: VecDeque<u8>,
    deframer: Deframer,
    lost: bool,
    room: u8,
}

impl Link for Peer {
    fn send(&mut self, frame: &[u8]) -> Sending {
        assert!((MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&frame.len()));
        match self.room.checked_sub(1) {
            Some(room) => self.room = room,
            None => return Sending::Full,
        }
        Sending::Taken
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Receiving {
        if self.lost {
            return Receiving::Nothing;
        }
        let bytes = self.stream.make_contiguous();
        let mut piece = &*bytes;
        let deframed = self.deframer.take(&mut piece, buffer);
        let taken = bytes.len() - piece.len();
        self.stream.drain(..taken);
        match deframed {
            Ok(Deframed::Frame(bytes)) => Receiving::Frame(bytes),
            Ok(Deframed::Dropped) => Receiving::Dropped,
            Ok(Deframed::Part) => Receiving::Nothing,
            Err(_) => {
                self.lost = true;
                Receiving::Nothing
            }
        }
    }

    fn waits_for(&self, _input: bool, _output: bool) -> Option<Awaited<'_>> {
        None
    }
}

type Disk<A> = One<VirtioPci<Blk, A>>;

/// The devices.
pub(super) struct Devices<'f> {
    file: &'f File,
    talking_to: u8,
    disk: Disk<Direct>,
    net: Option<One<VirtioPci<Net<Peer>, Direct>>>,
    iommu: Option<(One<VirtioPci<IommuDevice, GuestDma>>, Disk<Translated>)>,
}

fn disk<A: ringfence_live::dma::Dma>(file: &File, dma: A, translated: bool) -> Disk<A> {
    let counters = Arc::new(DeviceCounters::default());
    let file = file.try_clone().expect("a copy");
    let disk = Blk::new(file, false, Arc::clone(&counters)).expect("a disk");
    One {
        session: Session::new(VirtioPci::new(disk, dma, translated, Arc::clone(&counters))),
        counters,
    }
}

impl<'f> Devices<'f> {
    /// A disk over `file`, and what the input asks for.
    pub(super) fn new(file: &'f File) -> Self {
        Self {
            file,
            talking_to: 0,
            disk: disk(file, Direct::default(), false),
            net: None,
            iommu: None,
        }
    }

    /// The next messages are for the disk (0), a network device (1), an IOMMU (2), a disk behind that (3).
    pub(super) fn talk_to(&mut self, device: u8) {
        self.talking_to = device % 4;
        match self.talking_to {
            1 if self.net.is_none() => self.net = Some(net()),
            2 | 3 if self.iommu.is_none() => self.iommu = Some(iommu(self.file)),
            _ => {}
        }
    }

    /// The network's far side sends these bytes and has room for so many frames.
    pub(super) fn peer(&mut self, room: u8, bytes: &[u8]) {
        if let Some(net) = &mut self.net {
            let link = net.session.function().device().link();
            link.stream.extend(bytes);
            link.room = room;
            net.turn(true);
        }
    }

    fn present(&mut self) -> &mut dyn Device {
        match (self.talking_to, &mut self.net, &mut self.iommu) {
            (1, Some(net), _) => net,
            (2, _, Some((iommu, _))) => iommu,
            (3, _, Some((_, disk))) => disk,
            _ => &mut self.disk,
        }
    }

    /// Hands a message to the present device, and lets all work as the server would.
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
        outcome
    }

    /// Says what has happened so far.
    pub(super) fn tell(&self, reached: Reached<'_>) {
        let mut tell = |name, holds| {
            if holds {
                reached(name);
            }
        };
        tell("served", self.disk.succeeded());
        if let Some(One { counters, .. }) = &self.net {
            tell("net: sent", counters.frames_sent.get() > 0);
            tell("net: received", counters.frames_received.get() > 0);
            tell("net: dropped", counters.frames_dropped.get() > 0);
            tell("net: no such command", counters.failed.get() > 0);
        }
        if let Some((iommu, disk)) = &self.iommu {
            tell("iommu: served", iommu.succeeded());
            tell("iommu: refused", iommu.counters.failed.get() > 0);
            tell("iommu: fault", iommu.counters.faults.get() > 0);
            tell("iommu: stale", iommu.counters.stale.get() > 0);
            tell("translated: served", disk.succeeded());
        }
    }
}

fn net() -> One<VirtioPci<Net<Peer>, Direct>> {
    let counters = Arc::new(DeviceCounters::default());
    let pairs = NonZeroU16::new(2).unwrap_or(NonZeroU16::MIN);
    let net = Net::new(Peer::default(), [2; 6], pairs, Arc::clone(&counters));
    let function = VirtioPci::new(net, Direct::default(), false, Arc::clone(&counters));
    One {
        session: Session::new(function),
        counters,
    }
}

fn iommu(file: &File) -> (One<VirtioPci<IommuDevice, GuestDma>>, Disk<Translated>) {
    let counters = Arc::new(DeviceCounters::default());
    let iommu = Iommu::new(Arc::clone(&counters)).expect("an event");
    let endpoint = iommu.add_endpoint(ENDPOINT).expect("the first");
    let device = IommuDevice::new(iommu.clone(), Arc::clone(&counters));
    let function = VirtioPci::new(device, iommu.memory(), false, Arc::clone(&counters));
    let session = Session::new(function);
    (One { session, counters }, disk(file, endpoint, true))
}
