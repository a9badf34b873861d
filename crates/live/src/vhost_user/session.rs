//! One front-end's connection, without a socket: takes requests and produces replies.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_softiommu::iotlb::{Header, Iotlb, IotlbError, IotlbLimits, Regions, reply};
use ringfence_types::{Iova, IovaRange, RequesterId};
use ringfence_vfio_user::Message;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::refusal::Refusal;
use super::request::{SharedRegion, VhostUserRequest, VringAddress, asks};
use super::ring::{Events, IdleDevice, RunningVring, Vring};
use super::translations::Translations;
use crate::counters::DeviceCounters;
use crate::event::is_eventfd;
use crate::memory::{GuestRam, RangeSource};
use crate::server::{EventHandler, StopSignal};
use crate::virtio::{Device, F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1};

/// `VHOST_USER_F_PROTOCOL_FEATURES`, one of the device's features.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VHOST_USER_PROTOCOL_F_REPLY_ACK`: the front-end can ask for a reply to any request.
const PROTOCOL_REPLY_ACK: u64 = 1 << 3;
/// `VHOST_USER_PROTOCOL_F_BACKEND_REQ`: the back-end can send requests on its own socket.
const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
/// `VHOST_USER_PROTOCOL_F_CONFIG`: the front-end can read the configuration space.
const PROTOCOL_CONFIG: u64 = 1 << 9;
const PROTOCOL: u64 = PROTOCOL_REPLY_ACK | PROTOCOL_BACKEND_REQ | PROTOCOL_CONFIG;

/// Size of the configuration space that a front-end can read, in bytes.
const CONFIG_BYTES: usize = 256;

/// Settings of the embedder.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Requester ID that identifies the device in faults.
    pub device: RequesterId,
    /// Limits of the IOTLB.
    pub iotlb: IotlbLimits,
}

/// Result of a message.
#[derive(Debug)]
pub struct Outcome {
    /// Reply to send, if any.
    pub reply: Option<Vec<u8>>,
    /// Reason if the request was refused.
    pub refusal: Option<Refusal>,
    /// True if the connection must close: the front-end waits for data that the back-end cannot
    /// provide, and would misread an error reply as data.
    pub close: bool,
}

/// The ring's settings, which arrive in separate requests.
#[derive(Debug, Default)]
struct VringConfig {
    size: Option<u16>,
    address: Option<VringAddress>,
    base: u16,
    kick: Option<Arc<OwnedFd>>,
    enabled: bool,
}

/// A front-end and a device.
pub struct Session<D> {
    /// The device while its ring is stopped.
    idle_device: Option<IdleDevice<D>>,
    running: Option<RunningVring<D>>,
    vring: VringConfig,
    events: Arc<Events>,
    translations: Arc<Translations>,
    channel: Option<Arc<OwnedFd>>,
    offered: u64,
    features: u64,
    protocol: u64,
    largest: u16,
    config: [u8; CONFIG_BYTES],
    counters: Arc<DeviceCounters>,
    report: EventHandler,
}

impl<D: Device + Send + 'static> Session<D> {
    /// Creates a session with a device that is reset first.
    ///
    /// # Errors
    /// [`IotlbError`] if the limits leave no room for an IOTLB; the device is dropped.
    pub fn new(
        mut device: D,
        settings: &Settings,
        counters: Arc<DeviceCounters>,
        report: EventHandler,
    ) -> Result<Self, IotlbError> {
        // No process works for this device, so nothing is pending.
        let _ = device.reset();
        let mut config = [0; CONFIG_BYTES];
        device.read_config(0, &mut config);
        let memory = GuestMemoryMmap::default();
        let regions = Regions::default();
        let iotlb = Iotlb::new(settings.iotlb, settings.device, memory, regions)?;
        let translations = Arc::new(Translations::new(iotlb, Arc::clone(&counters)));
        let dma = translations.reader()?;
        Ok(Self {
            offered: device.features()
                | F_VERSION_1
                | F_EVENT_IDX
                | F_INDIRECT_DESC
                | F_ACCESS_PLATFORM
                | F_PROTOCOL_FEATURES,
            largest: device.queue_sizes().first().copied().unwrap_or(0),
            idle_device: Some(IdleDevice { device, dma }),
            running: None,
            vring: VringConfig::default(),
            events: Arc::default(),
            translations,
            channel: None,
            features: 0,
            protocol: 0,
            config,
            counters,
            report,
        })
    }

    /// Stops the ring and returns the device. `None` if its thread panicked.
    pub fn end(mut self) -> Option<D> {
        self.stop();
        self.idle_device.map(|parked| parked.device)
    }

    /// Returns the channel on which the front-end replies to the back-end's requests.
    pub fn channel(&self) -> Option<&Arc<OwnedFd>> {
        self.channel.as_ref()
    }

    /// Returns true if the device waits for a kick or a translation, or is stopped. For callers
    /// that drive it step by step, such as tests.
    pub fn is_idle(&self) -> bool {
        self.running
            .as_ref()
            .is_none_or(|running| self.translations.waits() || running.is_idle())
    }

    /// Handles a reply of the front-end on the [`channel`](Self::channel).
    ///
    /// # Errors
    /// No request is outstanding.
    pub fn replied(&mut self, done: bool) -> Result<(), Refusal> {
        self.translations.replied(done)
    }

    /// Handles a message.
    pub fn handle(&mut self, message: Message<Header>) -> Outcome {
        let Header {
            request,
            need_reply,
            ..
        } = message.header;
        let asks = asks(&message.header);
        let result = VhostUserRequest::parse(message).map_err(Refusal::Request);
        match result.and_then(|request| self.follow(request)) {
            Ok(Some(payload)) => Outcome {
                reply: Some(answer(request, &payload)),
                refusal: None,
                close: false,
            },
            done => {
                let refusal = done.err();
                let ok = refusal.is_none();
                let wanted = need_reply && self.protocol & PROTOCOL_REPLY_ACK != 0;
                Outcome {
                    reply: (wanted && !asks).then(|| reply(request, ok).to_vec()),
                    refusal,
                    close: asks && !ok,
                }
            }
        }
    }

    /// Executes a request. Returns the payload of the reply if the request reads data.
    fn follow(&mut self, request: VhostUserRequest) -> Result<Option<Vec<u8>>, Refusal> {
        match request {
            VhostUserRequest::GetFeatures => return Ok(Some(self.offered.to_ne_bytes().to_vec())),
            VhostUserRequest::GetProtocolFeatures => {
                return Ok(Some(PROTOCOL.to_ne_bytes().to_vec()));
            }
            VhostUserRequest::GetQueueNum => return Ok(Some(1_u64.to_ne_bytes().to_vec())),
            VhostUserRequest::GetConfig {
                offset,
                bytes,
                flags,
            } => return Ok(Some(self.config(offset, bytes, flags))),
            VhostUserRequest::GetVringBase { index } => {
                ring(index)?;
                self.stop();
                self.vring.kick = None;
                let base = self.vring.base;
                return Ok(Some(halves([index, base.into()])));
            }
            VhostUserRequest::SetOwner => {}
            VhostUserRequest::ResetOwner => {
                self.stop();
                self.vring = VringConfig::default();
            }
            VhostUserRequest::SetFeatures(features) => {
                check(features, self.offered)?;
                if features != self.features {
                    self.idle()?;
                }
                self.features = features;
            }
            VhostUserRequest::SetProtocolFeatures(features) => {
                check(features, PROTOCOL)?;
                self.idle()?;
                self.protocol = features;
            }
            VhostUserRequest::SetBackendChannel(channel) => {
                if self.channel.is_some() {
                    return Err(Refusal::Channel);
                }
                stream_only(&channel)?;
                let channel = Arc::new(channel);
                self.translations.set_channel(Arc::clone(&channel));
                self.channel = Some(channel);
            }
            VhostUserRequest::SetMemTable(shared) => self.set_memory(shared)?,
            VhostUserRequest::Iotlb(bytes) => self.translations.receive(&bytes)?,
            VhostUserRequest::SetVringNum { index, size } => {
                ring(index)?;
                self.idle()?;
                let fits = u16::try_from(size).ok();
                let fits = fits.filter(|size| size.is_power_of_two() && *size <= self.largest);
                self.vring.size = Some(fits.ok_or(Refusal::Size { size })?);
            }
            VhostUserRequest::SetVringAddr { index, address } => {
                ring(index)?;
                self.idle()?;
                self.vring.address = Some(address);
            }
            VhostUserRequest::SetVringBase { index, base } => {
                ring(index)?;
                self.idle()?;
                self.vring.base = u16::try_from(base).map_err(|_| Refusal::Base { base })?;
            }
            VhostUserRequest::SetVringKick { index, event } => {
                ring(index)?;
                self.idle()?;
                event_only(&event)?;
                self.vring.kick = Some(Arc::new(event));
                self.start()?;
            }
            VhostUserRequest::SetVringCall { index, event } => {
                ring(index)?;
                self.events.set(&self.events.call, event)?;
            }
            VhostUserRequest::SetVringErr { index, event } => {
                ring(index)?;
                self.events.set(&self.events.error, event)?;
            }
            VhostUserRequest::SetVringEnable { index, on } => {
                ring(index)?;
                self.vring.enabled = on;
                if on {
                    self.start()?;
                } else {
                    self.stop();
                }
            }
        }
        Ok(None)
    }

    fn idle(&self) -> Result<(), Refusal> {
        match self.running {
            Some(_) => Err(Refusal::Running),
            None => Ok(()),
        }
    }

    fn config(&self, offset: u32, bytes: u32, flags: u32) -> Vec<u8> {
        let mut reply = halves([offset, bytes, flags]);
        let part = self.config.iter().skip(offset as usize).copied();
        let zeros = std::iter::repeat(0);
        reply.extend(part.chain(zeros).take(bytes as usize));
        reply
    }

    /// Replaces the guest's memory. When it returns `Ok`, no reader holds the old memory.
    fn set_memory(&mut self, shared: Vec<SharedRegion>) -> Result<(), Refusal> {
        let mut ram = GuestRam::default();
        let mut regions = Vec::new();
        for (region, offset, file) in shared {
            let user = region.user;
            let range = IovaRange::new(Iova::new(region.memory.get()), region.bytes);
            let source = RangeSource {
                file: Some(file),
                offset,
                accessible: true,
            };
            let range = range.ok_or(Refusal::Region { user })?;
            ram.map(range, source).map_err(Refusal::Memory)?;
            regions.push(region);
        }
        let regions = Regions::new(&regions).map_err(Refusal::Regions)?;
        let memory = ram.memory().clone();
        let set = self.translations.set_memory(memory, regions);
        set.map_err(Refusal::Iotlb)
    }

    /// Starts the ring if it is configured and enabled.
    fn start(&mut self) -> Result<(), Refusal> {
        let (Some(kick), true, None) = (&self.vring.kick, self.vring.enabled, &self.running) else {
            return Ok(());
        };
        let (features, protocol) = (self.features, self.protocol);
        let has = |all: u64, some: u64| all & some == some;
        if !has(features, F_ACCESS_PLATFORM | F_VERSION_1)
            || !has(protocol, PROTOCOL_REPLY_ACK | PROTOCOL_BACKEND_REQ)
        {
            return Err(Refusal::Untranslated { features, protocol });
        }
        let queue = self.queue()?;
        let stop = StopSignal::new().map_err(|_| Refusal::Host)?;
        let mut parked = self.idle_device.take().ok_or(Refusal::Host)?;
        self.translations.resume();
        parked.device.activate(features);
        let ring = Vring {
            idle_device: parked,
            queue,
            kick: Arc::clone(kick),
            events: Arc::clone(&self.events),
            counters: Arc::clone(&self.counters),
            report: Arc::clone(&self.report),
        };
        self.running = Some(RunningVring::start(ring, stop));
        Ok(())
    }

    fn queue(&self) -> Result<Queue, Refusal> {
        let (Some(size), Some(address)) = (self.vring.size, self.vring.address) else {
            return Err(Refusal::Incomplete);
        };
        let misaligned = |_| Refusal::Misaligned { address };
        let given = u32::from(size);
        let mut queue = Queue::new(self.largest).map_err(|_| Refusal::Size { size: given })?;
        queue.set_size(size);
        queue
            .try_set_desc_table_address(GuestAddress(address.descriptors))
            .map_err(misaligned)?;
        queue
            .try_set_avail_ring_address(GuestAddress(address.available))
            .map_err(misaligned)?;
        queue
            .try_set_used_ring_address(GuestAddress(address.used))
            .map_err(misaligned)?;
        queue.set_event_idx(self.features & F_EVENT_IDX != 0);
        queue.set_next_avail(self.vring.base);
        queue.set_ready(true);
        Ok(queue)
    }

    /// Stops the ring. An unfinished request stays in the ring until the next start. The front-end
    /// no longer needs to send invalidations, so all translations are discarded.
    fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            self.translations.interrupt();
            if let Some(stopped) = running.stop() {
                self.vring.base = stopped.base;
                self.idle_device = Some(stopped.idle_device);
            }
        }
        self.translations.clear();
    }
}

impl Events {
    fn set(&self, which: &Mutex<Option<OwnedFd>>, event: Option<OwnedFd>) -> Result<(), Refusal> {
        if let Some(event) = &event {
            event_only(event)?;
        }
        *which.lock().unwrap_or_else(PoisonError::into_inner) = event;
        Ok(())
    }
}

fn event_only(event: &OwnedFd) -> Result<(), Refusal> {
    if is_eventfd(event) {
        Ok(())
    } else {
        Err(Refusal::NotAnEvent)
    }
}

/// Checks that the channel is a connected stream socket. Other files cannot be read, or do not
/// preserve the reply stream.
fn stream_only(channel: &OwnedFd) -> Result<(), Refusal> {
    let is_stream = socket_domain(channel) == Ok(AddressFamily::UNIX)
        && socket_type(channel) == Ok(SocketType::STREAM)
        && getpeername(channel).is_ok();
    if is_stream {
        Ok(())
    } else {
        Err(Refusal::NotAStream)
    }
}

fn ring(index: u32) -> Result<(), Refusal> {
    match index {
        0 => Ok(()),
        _ => Err(Refusal::NoRing { index }),
    }
}

fn check(features: u64, offered: u64) -> Result<(), Refusal> {
    match features & !offered {
        0 => Ok(()),
        features => Err(Refusal::Features { features }),
    }
}

fn halves<const N: usize>(halves: [u32; N]) -> Vec<u8> {
    halves.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Builds the reply to a request that reads data.
fn answer(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        request,
        reply: true,
        need_reply: false,
        bytes: u32::try_from(payload.len()).unwrap_or(u32::MAX),
    };
    [&header.encode()[..], payload].concat()
}
