//! The role through which mappings leave the device: towards a software IOTLB, VFIO, iommufd.

use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, Mapping};

/// Takes what the driver's requests change, in their order, after the device has found the request
/// valid.
///
/// Requests are handled in batches: `begin`, any number of changes, `commit`. The replies of a
/// batch reach the driver after `commit` has returned, so a sink may let a change take effect at
/// any time from its call to the end of `commit`, and pays once per batch for waiting until readers
/// have let go of what was taken away.
///
/// **Errors.** An `Err` of `create`, `attach`, `bypass` or `map` promises that the sink is as it
/// was before the call. An `Err` of `unmap` promises nothing: the device then blocks every endpoint
/// of the domain. `block` and `destroy` cannot fail: a sink that has no other way ends what it can
/// no longer confine (it resets the device, closes its file, stops the guest). Decision 0014 says
/// why.
pub trait Sink {
    /// Before the first change of a batch. An `Err` refuses the batch before anything was changed:
    /// for instance because this thread holds a pin that `commit` would wait for.
    fn begin(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// `domain` comes into being, without mappings. It is not told for bypass domains.
    fn create(&mut self, domain: DomainId) -> Result<(), SinkError>;

    /// `domain` ceases to be, with all its mappings. No endpoint is attached to it any more.
    fn destroy(&mut self, domain: DomainId);

    /// From now on `endpoint` reaches what `domain` maps, and nothing else. `mappings` are the
    /// domain's, in order of address, for sinks that keep a table per endpoint.
    fn attach(
        &mut self,
        endpoint: EndpointId,
        domain: DomainId,
        mappings: &mut dyn Iterator<Item = Mapping>,
    ) -> Result<(), SinkError>;

    /// From now on `endpoint` reaches all guest-physical memory, untranslated.
    fn bypass(&mut self, endpoint: EndpointId) -> Result<(), SinkError>;

    /// From now on `endpoint` reaches nothing. Every endpoint begins like this.
    fn block(&mut self, endpoint: EndpointId);

    /// `domain` maps this too. It overlaps no other mapping of the domain.
    fn map(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError>;

    /// `domain` no longer maps this: a mapping as `map` was given it.
    fn unmap(&mut self, domain: DomainId, mapping: &Mapping) -> Result<(), SinkError>;

    /// Returns `Ok` when nothing reaches what was unmapped, destroyed, detached or blocked since
    /// `begin`: no translation in any cache, and no access or slice that began before.
    ///
    /// An `Err` leaves that open, and no answer reaches the driver: `commit` is called again before
    /// anything else is asked of the sink, until it succeeds. It is for embedders that break their
    /// own rules, such as a thread that became a reader since `begin`.
    fn commit(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A sink that its embedder changes while a [`Device`](crate::Device) has it.
///
/// A handle that gives out no `&mut` to the sink keeps the sink with its device: two sinks that
/// changed places would each keep what the other's driver unmaps.
pub trait SinkHandle: Sink {
    /// The right to change the sink.
    type Handle<'s>
    where
        Self: 's;

    /// That right, for as long as the device is borrowed.
    fn handle(&mut self) -> Self::Handle<'_>;
}

/// Why a sink did not do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SinkError {
    /// Memory or a limit ran out. The driver sees NOMEM.
    OutOfMemory,
    /// The guest-physical range is not memory that can be mapped. The driver sees FAULT.
    BadAddress(IovaRange),
    /// The combination is not supported: such as an endpoint in a domain with that other one. The
    /// driver sees UNSUPP.
    Unsupported,
    /// Not now, from here: the calling thread holds what it would have to wait for. The driver sees
    /// DEVERR.
    WouldBlock,
    /// [`Sink::commit`] could not wait. What was done is done, and what it took away may still be
    /// in reach: the driver must see nothing.
    CommitFailed,
    /// Anything else. The driver sees DEVERR.
    Failed,
}

impl fmt::Display for SinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::BadAddress(range) => write!(f, "what {range} maps to cannot be mapped"),
            Self::Unsupported => f.write_str("not supported"),
            Self::WouldBlock => f.write_str("would wait for the calling thread itself"),
            Self::CommitFailed => f.write_str("what was taken away may still be in reach"),
            Self::Failed => f.write_str("failed"),
        }
    }
}

impl core::error::Error for SinkError {}

/// Tells nobody: for monitors that ask the device for each translation.
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
