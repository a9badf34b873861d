//! The device: its state, and the way of a request through it.

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
use crate::request::Request;
use crate::spec::TAIL_BYTES;
use crate::{
    DomainId, EndpointId, Options, OptionsError, RequestError, Sink, SinkError, SinkHandle, Status,
};

/// A virtio-iommu device that tells `S` what is mapped.
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
    /// Where the last request's domain was: a guess for the next.
    hot: usize,
    /// Mappings of all domains.
    mappings: usize,
    /// The sink's last `commit` failed: the next one comes before everything else.
    commit_pending: bool,
    events: Events,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestOutcome {
    /// Bytes at the beginning of the reply that were written: the used length. 0: nothing was.
    pub used: usize,
    /// Whether it was done, and if not, why.
    pub result: Result<(), RequestError>,
}

/// Requests that are handled together: the sink's readers are waited for once, when the batch ends.
///
/// No reply of a batch may reach the driver before [`RequestBatch::commit`] has returned `Ok`. A
/// batch that is dropped ends, too, and nobody learns whether its requests are complete.
#[derive(Debug)]
pub struct RequestBatch<'a, S: Sink> {
    device: &'a mut Device<S>,
    ended: bool,
}

impl<S: Sink> Device<S> {
    /// A device without endpoints.
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

    /// What the device was made of.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Where mappings go.
    pub const fn sink(&self) -> &S {
        &self.sink
    }

    /// The embedder's handle to the sink. The sink itself stays with the device.
    pub fn sink_mut(&mut self) -> S::Handle<'_>
    where
        S: SinkHandle,
    {
        self.sink.handle()
    }

    /// Mappings of all domains together.
    pub const fn mappings(&self) -> usize {
        self.mappings
    }

    /// Domains that exist.
    pub const fn domains(&self) -> usize {
        self.domains.len()
    }

    /// The longest reply, in bytes. What a driver gives beyond that need not be handed in.
    pub const fn max_reply_bytes(&self) -> usize {
        self.options.probe_bytes as usize + TAIL_BYTES
    }

    /// Handles one request: `request` is the device-readable part of its chain (the first
    /// [`MAX_REQUEST_BYTES`](crate::spec::MAX_REQUEST_BYTES) are enough), `reply` the
    /// device-writable one (the first [`max_reply_bytes`](Self::max_reply_bytes) are enough).
    ///
    /// When it returns, the request is complete: what it took away is out of every endpoint's
    /// reach. Publish the used index then, not earlier.
    ///
    /// Time is linear in the mappings that the request removes and in the endpoints; all else is
    /// logarithmic.
    ///
    /// # Errors
    /// The sink cannot begin: the request was not looked at. Hand it in again; the driver must get
    /// no answer meanwhile. Or, with
    /// [`SinkError::CommitFailed`]: it was done, and what it took away may still be in reach. Then the driver gets no answer, and the device needs a reset.
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

    /// Begins a batch of requests.
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

    /// Whatever the sink still owes, then the next batch.
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

    /// Where a domain is, or would be.
    fn find_domain(&self, id: DomainId) -> Result<usize, usize> {
        self.domains.binary_search_by_key(&id, |domain| domain.id)
    }

    /// Where an endpoint is, or would be.
    fn find_endpoint(&self, id: EndpointId) -> Result<usize, usize> {
        self.endpoints
            .binary_search_by_key(&id, |endpoint| endpoint.id)
    }

    /// Whether the driver accepted feature `bit`.
    #[inline]
    const fn has(&self, bit: u32) -> bool {
        self.accepted >> bit & 1 != 0
    }
}

/// The tail of a reply; reserved bytes are zero.
#[inline]
const fn encode_tail(result: Result<(), RequestError>) -> [u8; TAIL_BYTES] {
    let status = match &result {
        Ok(()) => Status::Ok,
        // Errors without a status are not written; should one come here, the driver is told of an
        // internal error.
        Err(error) => match error.status() {
            Some(status) => status,
            None => Status::DevErr,
        },
    };
    [status.code(), 0, 0, 0]
}

impl<S: Sink> RequestBatch<'_, S> {
    /// Handles one request as [`Device::handle`] does, but for waiting for the sink's readers.
    #[inline]
    pub fn handle(&mut self, request: &[u8], reply: &mut [u8]) -> RequestOutcome {
        self.device.respond(request, reply)
    }

    /// As [`Device::max_reply_bytes`].
    pub const fn max_reply_bytes(&self) -> usize {
        self.device.max_reply_bytes()
    }

    /// Ends the batch: when it returns `Ok`, all its requests are complete.
    ///
    /// # Errors
    /// What the requests took away may still be in reach: no reply may reach the driver, and the
    /// device needs a reset.
    pub fn commit(mut self) -> Result<(), SinkError> {
        self.ended = true;
        self.device.commit()
    }
}

impl<S: Sink> Drop for RequestBatch<'_, S> {
    fn drop(&mut self) {
        if !self.ended {
            // The next batch begins with what this one owes.
            let _ = self.device.commit();
        }
    }
}
