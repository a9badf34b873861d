//! The oracle on the bus: it sees every access of every device.

use ringfence_devices::{DmaRequest, Observer};
use ringfence_types::{Fault, PhysRange, RequesterId};

use crate::oracle::Oracle;

/// Rows of the devices, by requester ID.
#[derive(Debug)]
pub(super) struct DeviceIndexTable(Box<[u16]>);

impl Default for DeviceIndexTable {
    fn default() -> Self {
        Self(vec![u16::MAX; 1 << 16].into_boxed_slice())
    }
}

impl DeviceIndexTable {
    /// Notes the row of a device.
    pub(super) fn set(&mut self, device: RequesterId, row: u16) {
        self.0[usize::from(device.get())] = row;
    }

    #[inline]
    fn get(&self, device: RequesterId) -> usize {
        usize::from(self.0[usize::from(device.get())])
    }
}

/// Tells the oracle.
#[derive(Debug)]
pub(super) struct OracleObserver<'a> {
    /// The judge.
    pub(super) oracle: &'a mut Oracle,
    /// Who is who.
    pub(super) rows: &'a DeviceIndexTable,
}

impl Observer for OracleObserver<'_> {
    #[inline]
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        let row = self.rows.get(request.device);
        let mut iova = request.iova;
        for range in ranges {
            // One verdict for each page: owners are by page.
            let mut at = range.start();
            let mut left = range.bytes();
            while left > 0 {
                let here = left.min(4096 - iova.offset_in(4096));
                self.oracle.allowed(row, iova, here, request.access, at);
                iova = iova.wrapping_add(here);
                at = at.wrapping_add(here);
                left -= here;
            }
        }
    }

    #[inline]
    fn faulted(&mut self, request: &DmaRequest, fault: &Fault) {
        let row = self.rows.get(request.device);
        // The whole access was stopped; what matters is whether the byte it was stopped at was
        // granted.
        let bytes = if fault.iova == request.iova {
            request.bytes.min(4096 - request.iova.offset_in(4096))
        } else {
            1
        };
        self.oracle.faulted(row, fault.iova, bytes, request.access);
    }
}
