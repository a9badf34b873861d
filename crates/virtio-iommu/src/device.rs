//! The device: its state and the dispatch of requests.

mod attach;
mod config;
mod map;
mod probe;
mod restore;
mod translate;

use alloc::vec::Vec;

use crate::domain::Domain;
use crate::endpoint::Endpoint;
use crate::fault::Events;
use crate::lazy::{VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH, VIRTIO_IOMMU_T_IOTLB_FLUSH};
use crate::request::Request;
use crate::spec::TAIL_BYTES;
use crate::{
    DomainId, EndpointId, Options, OptionsError, RequestError, Sink, SinkError, SinkHandle, Status,
};

/// A virtio-iommu device that forwards its mappings to `S`.
#[derive(Debug)]
pub struct Device<S> {
    options: Options,
    sink: S,
    /// Features that the driver accepted.
    accepted: u64,
    /// Field `bypass` of the configuration.
    bypass: bool,
    /// Sorted by id.
    endpoints: Vec<Endpoint>,
    /// Sorted by id; each has an endpoint.
    domains: Vec<Domain>,
    /// Index of the last request's domain, as a hint for the next lookup.
    hot: usize,
    /// Number of mappings in all domains.
    mappings: usize,
    /// True if the sink's last `commit` failed. The device must retry it before any other
    /// operation.
    commit_pending: bool,
    events: Events,
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestOutcome {
    /// Used length: bytes written at the start of the reply. 0 if none were.
    pub used: usize,
    /// Success, or the reason why the request failed.
    pub result: Result<(), RequestError>,
}

/// A batch of requests. The sink waits for its readers once, at the end of the batch.
///
/// No reply of a batch may reach the driver before [`RequestBatch::commit`] has returned `Ok`.
/// Dropping a batch also commits it, but loses the result.
#[derive(Debug)]
pub struct RequestBatch<'a, S: Sink> {
    device: &'a mut Device<S>,
    ended: bool,
}

impl<S: Sink> Device<S> {
    /// Creates a device without endpoints.
    pub fn new(options: Options, sink: S) -> Result<Self, OptionsError> {
        options.check()?;
        Ok(Self {
            options,
            sink,
            accepted: 0,
            bypass: options.bypass_at_first(),
            endpoints: Vec::new(),
            domains: Vec::new(),
            hot: 0,
            mappings: 0,
            commit_pending: false,
            events: Events::new(options.limits.events),
        })
    }

    /// The device's options.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// The sink that receives the mappings.
    pub const fn sink(&self) -> &S {
        &self.sink
    }

    /// Returns the embedder's handle to the sink. The device keeps the sink itself.
    pub fn sink_mut(&mut self) -> S::Handle<'_>
    where
        S: SinkHandle,
    {
        self.sink.handle()
    }

    /// Returns the number of mappings in all domains.
    pub const fn mappings(&self) -> usize {
        self.mappings
    }

    /// Returns the number of domains.
    pub const fn domains(&self) -> usize {
        self.domains.len()
    }

    /// Returns the length of the longest reply in bytes. Any further device-writable bytes are not
    /// needed.
    pub const fn max_reply_bytes(&self) -> usize {
        self.options.probe_bytes as usize + TAIL_BYTES
    }

    /// Handles one request. `request` is the device-readable part of its chain; the first
    /// [`MAX_REQUEST_BYTES`](crate::spec::MAX_REQUEST_BYTES) are enough. `reply` is the
    /// device-writable part; the first [`max_reply_bytes`](Self::max_reply_bytes) are enough.
    ///
    /// When this returns, the request is complete: no endpoint can access anything that it
    /// unmapped. Publish the used index then, not earlier.
    ///
    /// Time is linear in the number of removed mappings and of endpoints, and otherwise
    /// logarithmic.
    ///
    /// # Errors
    /// If the sink cannot begin, the device has ignored the request. Pass it again; the driver must
    /// not get a reply in the meantime. With [`SinkError::CommitFailed`], the device executed the
    /// request, but endpoints may still access unmapped addresses. Then the driver must not get a
    /// reply, and the device needs a reset.
    pub fn handle(
        &mut self,
        request: &[u8],
        reply: &mut [u8],
    ) -> Result<RequestOutcome, SinkError> {
        let mut batch = self.batch()?;
        let handled = batch.handle(request, reply);
        batch.commit()?;
        Ok(handled)
    }

    /// Starts a batch of requests.
    ///
    /// # Errors
    /// The sink cannot begin.
    pub fn batch(&mut self) -> Result<RequestBatch<'_, S>, SinkError> {
        self.begin()?;
        Ok(RequestBatch {
            device: self,
            ended: false,
        })
    }

    /// Retries a failed commit, then starts the sink's next batch.
    #[inline]
    fn begin(&mut self) -> Result<(), SinkError> {
        if self.commit_pending {
            self.commit()?;
        }
        self.sink.begin()
    }

    #[inline]
    fn commit(&mut self) -> Result<(), SinkError> {
        let done = self.sink.commit();
        self.commit_pending = done.is_err();
        done
    }

    #[inline]
    fn respond(&mut self, request: &[u8], reply: &mut [u8]) -> RequestOutcome {
        let unwritten = |error| RequestOutcome {
            used: 0,
            result: Err(error),
        };
        let bytes = reply.len();
        let Some((tail, _)) = reply.split_first_chunk_mut::<TAIL_BYTES>() else {
            return unwritten(RequestError::NoTail { bytes });
        };
        let result = match Request::parse(request) {
            Ok(Request::Map {
                domain,
                start,
                last,
                physical,
                flags,
            }) => self.map(domain, start, last, physical, flags),
            Ok(Request::Unmap {
                domain,
                start,
                last,
            }) => self.unmap(domain, start, last),
            Ok(Request::Attach {
                domain,
                endpoint,
                flags,
                reserved,
            }) => self.attach(domain, endpoint, flags, reserved),
            Ok(Request::Detach { domain, endpoint }) => self.detach(domain, endpoint),
            Ok(Request::IotlbFlush { .. }) if !self.has(VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH) => {
                return unwritten(RequestError::UnknownType(VIRTIO_IOMMU_T_IOTLB_FLUSH));
            }
            Ok(Request::IotlbFlush { domain }) => self.iotlb_flush(domain),
            Ok(Request::Probe { endpoint }) => return self.probe(endpoint, reply),
            Err(error) => return unwritten(error),
        };
        *tail = encode_tail(result);
        RequestOutcome {
            used: TAIL_BYTES,
            result,
        }
    }

    #[inline]
    fn domain_index(&mut self, id: DomainId) -> Result<usize, RequestError> {
        if self
            .domains
            .get(self.hot)
            .is_some_and(|domain| domain.id == id)
        {
            return Ok(self.hot);
        }
        let at = self
            .find_domain(id)
            .map_err(|_| RequestError::NoDomain(id))?;
        self.hot = at;
        Ok(at)
    }

    /// Returns the index of a domain, or `Err` with the index at which to insert it.
    fn find_domain(&self, id: DomainId) -> Result<usize, usize> {
        self.domains.binary_search_by_key(&id, |domain| domain.id)
    }

    /// Returns the index of an endpoint, or `Err` with the index at which to insert it.
    fn find_endpoint(&self, id: EndpointId) -> Result<usize, usize> {
        self.endpoints
            .binary_search_by_key(&id, |endpoint| endpoint.id)
    }

    /// Returns true if the driver accepted feature `bit`.
    #[inline]
    const fn has(&self, bit: u32) -> bool {
        self.accepted >> bit & 1 != 0
    }
}

/// Encodes the tail of a reply; reserved bytes are zero.
#[inline]
const fn encode_tail(result: Result<(), RequestError>) -> [u8; TAIL_BYTES] {
    let status = match &result {
        Ok(()) => Status::Ok,
        // Replies to errors without a status are not written. If one reaches this point, report an
        // internal error.
        Err(error) => match error.status() {
            Some(status) => status,
            None => Status::DevErr,
        },
    };
    [status.code(), 0, 0, 0]
}

impl<S: Sink> RequestBatch<'_, S> {
    /// Handles one request like [`Device::handle`], but does not wait for the sink's readers.
    #[inline]
    pub fn handle(&mut self, request: &[u8], reply: &mut [u8]) -> RequestOutcome {
        self.device.respond(request, reply)
    }

    /// Returns the length of the longest reply in bytes, like [`Device::max_reply_bytes`].
    pub const fn max_reply_bytes(&self) -> usize {
        self.device.max_reply_bytes()
    }

    /// Ends the batch. When this returns `Ok`, all its requests are complete.
    ///
    /// # Errors
    /// Endpoints may still access unmapped addresses: no reply may reach the driver, and the device
    /// needs a reset.
    pub fn commit(mut self) -> Result<(), SinkError> {
        self.ended = true;
        self.device.commit()
    }
}

impl<S: Sink> Drop for RequestBatch<'_, S> {
    fn drop(&mut self) {
        if !self.ended {
            // The next batch retries a failed commit.
            let _ = self.device.commit();
        }
    }
}
