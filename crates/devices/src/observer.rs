//! Observation of device accesses.

use ringfence_types::{Fault, PhysRange};

use crate::DmaRequest;

/// Observes every access of every device; the oracle judges accesses with it. Called before the
/// bytes move.
pub trait Observer {
    /// The access was allowed and goes to `ranges`, in the order of its addresses; never empty.
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]);

    /// The access was blocked: no byte was read or written.
    fn faulted(&mut self, request: &DmaRequest, fault: &Fault);
}

/// Ignores all accesses.
impl Observer for () {
    #[inline]
    fn allowed(&mut self, _request: &DmaRequest, _ranges: &[PhysRange]) {}

    #[inline]
    fn faulted(&mut self, _request: &DmaRequest, _fault: &Fault) {}
}

impl<O: Observer + ?Sized> Observer for &mut O {
    #[inline]
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        (**self).allowed(request, ranges);
    }

    #[inline]
    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        (**self).faulted(request, fault);
    }
}
