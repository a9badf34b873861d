//! Who is told what came of each access.

use ringfence_types::{Fault, PhysRange};

use crate::DmaRequest;

/// Sees every access of every device: the oracle judges through it. It is told before the bytes
/// move.
pub trait Observer {
    /// The access was let through to `ranges`, in the order of its addresses; never none.
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]);

    /// The access was stopped: no byte of it was read or written.
    fn faulted(&mut self, request: &DmaRequest, fault: &Fault);
}

/// Nobody watches.
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
