//! A virtio-iommu device over the software unit as a subject of the conformance statements.
//! Accesses go through readers: the statements see what an emulated device sees, not what the
//! virtio-iommu device's model says. A long access is a read section of another thread, for which
//! the unit has to wait before it replies.
//!
//! The tests of `softiommu` and of `live` share this file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ringfence_softiommu::{IommuSink, Reader, SoftIommuLimits, Width};
use ringfence_types::{Access as DeviceAccess, Iova, IovaRange, RequesterId};
use ringfence_virtio_iommu::{AccessTarget, Device, EndpointId, SinkHandle};
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};

#[path = "../../../virtio-iommu-conformance/src/bin/virtio-iommu-conformance/options.rs"]
mod options;

use options::{ENDPOINTS, options, regions};

/// Time for which a long access continues after a request has begun. A device that does not wait
/// for it replies long before.
const ACCESS: Duration = Duration::from_millis(30);

/// A long access in a separate thread.
struct LongAccess {
    /// True while the thread can reach the byte.
    active: Arc<AtomicBool>,
    /// Tells the thread that a request begins.
    begins: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl LongAccess {
    /// Starts an access of `reader`; `None` if the unit blocks it.
    fn start(mut reader: Reader<()>, range: IovaRange, access: DeviceAccess) -> Option<Self> {
        let active = Arc::new(AtomicBool::new(false));
        let (begins, request) = channel();
        let (started, result): (Sender<bool>, Receiver<bool>) = channel();
        let flag = Arc::clone(&active);
        let thread = thread::spawn(move || {
            let mut section = reader.online();
            let guard = section.guard();
            let allowed = guard.translate(range, access).is_ok();
            flag.store(allowed, Ordering::SeqCst);
            let _ = started.send(allowed);
            if allowed && request.recv().is_ok() {
                thread::sleep(ACCESS);
            }
            // The access ends before its section does.
            flag.store(false, Ordering::SeqCst);
        });
        let this = Self {
            active,
            begins,
            thread: Some(thread),
        };
        result.recv().ok()?.then_some(this)
    }
}

impl Drop for LongAccess {
    fn drop(&mut self) {
        // Without a sender, the thread's wait ends.
        self.begins = channel().0;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the access ends");
        }
    }
}

/// A virtio-iommu device with its unit.
pub(crate) struct Unit<S> {
    device: Device<S>,
    unit: fn(&S) -> &IommuSink<()>,
    long: Option<LongAccess>,
}

impl<S: SinkHandle> Unit<S> {
    /// Creates the device of `setup`. `sink` wraps the unit, and `unit` returns it from its sink.
    pub(crate) fn new(
        setup: &Setup,
        sink: impl FnOnce(IommuSink<()>) -> S,
        unit: fn(&S) -> &IommuSink<()>,
    ) -> Self {
        let limits = SoftIommuLimits {
            width: Width::new(64).expect("a width"),
            tables: 64,
            domains: 64,
            ..SoftIommuLimits::default()
        };
        let mut inner = IommuSink::new(limits, ());
        for (device, id) in (0..).zip(ENDPOINTS) {
            inner
                .add_endpoint(EndpointId::new(id), RequesterId::new(device))
                .expect("an endpoint");
        }
        let mut device = Device::new(options(setup), sink(inner)).expect("sound options");
        for id in ENDPOINTS {
            device
                .add_endpoint(EndpointId::new(id), &regions(setup, id))
                .expect("an endpoint");
        }
        Self {
            device,
            unit,
            long: None,
        }
    }

    /// Returns a reader of the endpoint; `None` if it does not exist.
    fn reader(&self, endpoint: u32) -> Option<Reader<()>> {
        // The requester ID of an endpoint is its index.
        let index = ENDPOINTS.iter().position(|id| *id == endpoint)?;
        let device = RequesterId::new(index as u16);
        let unit = (self.unit)(self.device.sink());
        Some(unit.reader(device).expect("a reader"))
    }

    /// Lets the long access end while the following request is served.
    fn begin_request(&mut self) {
        if let Some(long) = &self.long {
            let _ = long.begins.send(());
        }
    }
}

fn byte(iova: u64) -> Option<IovaRange> {
    IovaRange::new(Iova::new(iova), 1)
}

const fn kind(access: Access) -> DeviceAccess {
    match access {
        Access::Read => DeviceAccess::Read,
        Access::Write => DeviceAccess::Write,
    }
}

impl<S: SinkHandle> Unit<S> {
    /// Returns the address that an access reaches.
    fn reach(&mut self, endpoint: u32, iova: u64, access: DeviceAccess) -> Option<u64> {
        let range = byte(iova)?;
        match self
            .device
            .translate(EndpointId::new(endpoint), range, access)
        {
            // The monitor sends an interrupt; no reader is involved.
            Ok(AccessTarget::Doorbell { .. }) => return None,
            Ok(AccessTarget::Memory { .. }) => {}
            Err(denied) => {
                self.device.report(denied);
            }
        }
        let mut reader = self.reader(endpoint)?;
        let mut section = reader.online();
        let found = section.guard().translate(range, access);
        let found = found.ok()?.only();
        found.map(|physical| physical.start().get())
    }
}

impl<S: SinkHandle> Subject for Unit<S> {
    fn endpoints(&self) -> [u32; 3] {
        ENDPOINTS
    }

    fn offered(&self) -> u64 {
        self.device.features()
    }

    fn accept(&mut self, features: u64) {
        self.device.accept_features(features);
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        self.device.read_config(offset, bytes);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        self.begin_request();
        self.device
            .write_config(offset, bytes)
            .expect("the sink begins");
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        self.begin_request();
        let handled = self.device.handle(readable, writable);
        Ok(handled.expect("the sink begins").used)
    }

    fn reset(&mut self) {
        self.begin_request();
        self.device.reset().expect("the sink begins");
    }

    fn reset_system(&mut self) -> bool {
        self.begin_request();
        self.device.reset_system().expect("the sink begins");
        true
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        let reached = self.reach(endpoint, iova, kind(access));
        reached.map_or(Outcome::Blocked, Outcome::Reached)
    }

    fn begin_access(&mut self, endpoint: u32, iova: u64, access: Access) -> Option<bool> {
        // The previous access has ended.
        self.long = None;
        self.long = byte(iova)
            .zip(self.reader(endpoint))
            .and_then(|(range, reader)| LongAccess::start(reader, range, kind(access)));
        Some(self.long.is_some())
    }

    fn access_is_outstanding(&self) -> bool {
        let long = self.long.as_ref();
        long.is_some_and(|long| long.active.load(Ordering::SeqCst))
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.device.next_event(buffer).unwrap_or(Some(0))
    }

    fn dropped_events(&self) -> Option<u64> {
        Some(self.device.events_dropped())
    }
}
