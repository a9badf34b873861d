//! Reports every device access on the bus to the oracle.

use ringfence_devices::{DmaRequest, Observer};
use ringfence_types::{Fault, PhysRange, RequesterId};

use crate::oracle::Oracle;

/// Device indices by requester ID.
#[derive(Debug)]
pub(super) struct DeviceIndexTable(Box<[u16]>);

impl Default for DeviceIndexTable {
    fn default() -> Self {
        Self(vec![u16::MAX; 1 << 16].into_boxed_slice())
    }
}

impl DeviceIndexTable {
    /// Records the index of a device.
    pub(super) fn set(&mut self, device: RequesterId, row: u16) {
        self.0[usize::from(device.get())] = row;
    }

    #[inline]
    fn get(&self, device: RequesterId) -> usize {
        usize::from(self.0[usize::from(device.get())])
    }
}

/// Reports accesses to the oracle.
#[derive(Debug)]
pub(super) struct OracleObserver<'a> {
    pub(super) oracle: &'a mut Oracle,
    /// Device indices by requester ID.
    pub(super) device_indices: &'a DeviceIndexTable,
}

impl Observer for OracleObserver<'_> {
    #[inline]
    fn allowed(&mut self, request: &DmaRequest, ranges: &[PhysRange]) {
        let row = self.device_indices.get(request.device);
        let mut iova = request.iova;
        for range in ranges {
            // Owners are per page, so report each page separately.
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
        let row = self.device_indices.get(request.device);
        // The hardware stopped the whole access. Judge only the bytes at which it stopped.
        let bytes = if fault.iova == request.iova {
            request.bytes.min(4096 - request.iova.offset_in(4096))
        } else {
            1
        };
        self.oracle.faulted(row, fault.iova, bytes, request.access);
    }
}
