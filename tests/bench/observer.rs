//! Observes every access for the oracle and the test.

use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::oracle::{Oracle, Verdict};
use ringfence_types::{Fault, PhysRange, RequesterId};

/// Passes every access to the oracle, and keeps the last verdict.
pub(super) struct Eye<'a> {
    pub(super) oracle: &'a mut Oracle,
    pub(super) last: &'a mut Verdict,
    pub(super) reached: &'a mut Vec<PhysRange>,
}

/// Returns the oracle's row of a device; an unknown device gets a separate row.
pub(super) fn row(device: RequesterId) -> usize {
    usize::from(device.get())
}

impl Observer for Eye<'_> {
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        self.reached.clear();
        self.reached.extend_from_slice(ranges);
        let mut iova = request.iova;
        let mut worst = Verdict::Granted;
        for range in ranges {
            let (mut at, mut left) = (range.start(), range.bytes());
            while left > 0 {
                let here = left.min(4096 - iova.offset_in(4096));
                let row = row(request.device);
                let verdict = self.oracle.allowed(row, iova, here, request.access, at);
                if verdict != Verdict::Granted && !worst.is_violation() {
                    worst = verdict;
                }
                iova = iova.wrapping_add(here);
                at = at.wrapping_add(here);
                left -= here;
            }
        }
        *self.last = worst;
    }

    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        let bytes = if fault.iova == request.iova {
            request.bytes.min(4096 - request.iova.offset_in(4096))
        } else {
            1
        };
        let row = row(request.device);
        *self.last = self.oracle.faulted(row, fault.iova, bytes, request.access);
    }
}
