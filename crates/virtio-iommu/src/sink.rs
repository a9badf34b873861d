//! The interface through which mappings leave the device: to a software IOTLB, VFIO or iommufd.

use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, Mapping};

/// Receives the changes of valid requests, in order.
///
/// The device calls `begin`, any number of changes, then `commit`. The replies of a batch reach the
/// driver after `commit` has returned. A sink may therefore let a change take effect at any time
/// until the end of `commit`. It needs to wait for its readers only once per batch.
///
/// **Errors.** If `create`, `attach`, `bypass` or `map` fails, the sink must be unchanged. If
/// `unmap` fails, its state is unknown, and the device blocks every endpoint of the domain. `block`
/// and `destroy` cannot fail. A sink that can no longer confine an access must end it: it resets
/// the device, closes its file, or stops the guest. Decision 0014 explains why.
pub trait Sink {
    /// Called before the first change of a batch. An `Err` refuses the batch without any change,
    /// for instance because this thread holds a pin that `commit` would wait for.
    fn begin(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Creates `domain` without mappings. Not called for bypass domains.
    fn create(&mut self, domain: DomainId) -> Result<(), SinkError>;

    /// Creates `domain` in [lazy mode](crate::lazy), without mappings: cached translations of what
    /// is unmapped later may stay until a commit after [`iotlb_flush`](Self::iotlb_flush). A sink
    /// that invalidates at each commit anyway needs neither method.
    ///
    /// The memory of such a translation still belongs to the guest. A sink that takes memory from
    /// the guest must first invalidate it itself.
    fn create_lazy(&mut self, domain: DomainId) -> Result<(), SinkError> {
        self.create(domain)
    }

    /// Requires the next [`commit`](Self::commit) to invalidate all cached translations of
    /// `domain`, which is in lazy mode. If this fails, the device blocks every endpoint of the
    /// domain.
    fn iotlb_flush(&mut self, _domain: DomainId) -> Result<(), SinkError> {
        Ok(())
    }

    /// Destroys `domain` with all its mappings. No endpoint is attached to it.
    fn destroy(&mut self, domain: DomainId);

    /// Attaches `endpoint` to `domain`: from now on it can access what `domain` maps, and nothing
    /// else. `mappings` are the domain's mappings in order of address, for sinks with a table per
    /// endpoint.
    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError>;

    /// Gives `endpoint` access to all guest-physical memory, untranslated.
    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError>;

    /// Removes all access from `endpoint`. This is the initial state of every endpoint.
    fn block(&mut self, endpoint: EndpointId);

    /// Adds `mapping` to `domain`. It overlaps no other mapping of the domain.
    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError>;

    /// Removes `mapping` from `domain`. It equals the mapping passed to `map`.
    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError>;

    /// Returns `Ok` when no endpoint can access anything that was unmapped, destroyed, detached or
    /// blocked since `begin`. No cache holds such a translation, and no earlier access or slice is
    /// still in use. Of a domain in lazy mode, this includes unmapped addresses only after an
    /// [`iotlb_flush`](Self::iotlb_flush), and then also those of earlier batches. A destroyed
    /// domain, and a detached or blocked endpoint, leave nothing cached in any mode.
    ///
    /// After an `Err`, this is unknown and the driver gets no reply. The device calls `commit`
    /// again before any other method, until it succeeds. A reset alone begins a batch before that;
    /// its `commit` covers the changes of both. An `Err` is for embedders that violate their own
    /// rules, for instance with a thread that became a reader since `begin`.
    fn commit(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A sink that its embedder changes while a [`Device`](crate::Device) owns it.
///
/// The handle should not provide a `&mut` to the sink. Otherwise the embedder could swap two sinks,
/// and each would keep what the other's driver unmaps.
pub trait SinkHandle: Sink {
    /// Handle with which the embedder may change the sink.
    type Handle<'s>
    where
        Self: 's;

    /// Returns the handle, for as long as the device is borrowed.
    fn handle(&mut self) -> Self::Handle<'_>;
}

/// Reason why a sink operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SinkError {
    /// Out of memory, or a limit was reached. The driver sees NOMEM.
    OutOfMemory,
    /// The guest-physical range cannot be mapped. The driver sees FAULT.
    BadAddress(IovaRange),
    /// The combination is not supported, for instance two endpoints in one domain. The driver sees
    /// UNSUPP.
    Unsupported,
    /// The calling thread holds a resource for which the operation would wait. The driver sees
    /// DEVERR.
    WouldBlock,
    /// [`Sink::commit`] could not wait. The changes are made, but endpoints may still access
    /// unmapped addresses. The driver must not get a reply.
    CommitFailed,
    /// Any other failure. The driver sees DEVERR.
    Failed,
}

impl fmt::Display for SinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::BadAddress(range) => write!(f, "the memory of {range} cannot be mapped"),
            Self::Unsupported => f.write_str("not supported"),
            Self::WouldBlock => f.write_str("would wait for the calling thread itself"),
            Self::CommitFailed => {
                f.write_str("commit failed: endpoints may still reach unmapped memory")
            }
            Self::Failed => f.write_str("failed"),
        }
    }
}

impl core::error::Error for SinkError {}

/// Ignores all changes, for VMMs that query the device for each translation.
impl Sink for () {
    fn create(&mut self, _: DomainId) -> Result<(), SinkError> {
        Ok(())
    }

    fn destroy(&mut self, _: DomainId) {}

    fn attach(
        &mut self,
        _: EndpointId,
        _: DomainId,
        _: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError> {
        Ok(())
    }

    fn bypass(&mut self, _: EndpointId) -> Result<(), SinkError> {
        Ok(())
    }

    fn block(&mut self, _: EndpointId) {}

    fn map(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        Ok(())
    }

    fn unmap(&mut self, _: DomainId, _: &Mapping) -> Result<(), SinkError> {
        Ok(())
    }
}
