//! The adapter of the naive device: everything that a monitor writes to test its own.

use ringfence_virtio_iommu_conformance::spec::CONFIG_BYPASS;
use ringfence_virtio_iommu_conformance::{Access, NotReturned, Outcome, Setup, Subject};

use crate::device::{FEATURES, Naive, Reserved};

const ENDPOINTS: [u32; 3] = [1, 2, 3];

/// Creates the device of a setup. It has no ranges, no MMIO and no limits of the guest.
pub(crate) fn make(setup: &Setup) -> Result<Box<dyn Subject>, String> {
    if setup.limits.is_some() {
        return Err("the naive device has no caps".into());
    }
    let regions = setup.regions.iter().map(|region| Reserved {
        endpoint: ENDPOINTS[1],
        first: region.first,
        last: region.last,
        msi: region.msi,
    });
    let device = Naive::new(&ENDPOINTS, regions.collect(), setup.bypass == Some(true));
    Ok(Box::new(Adapter(device)))
}

struct Adapter(Naive);

impl Subject for Adapter {
    fn endpoints(&self) -> [u32; 3] {
        ENDPOINTS
    }

    fn offered(&self) -> u64 {
        FEATURES
    }

    fn accept(&mut self, features: u64) {
        self.0.negotiated = features;
    }

    fn read_config(&self, offset: usize, bytes: &mut [u8]) {
        let config = self.0.config();
        bytes.copy_from_slice(&config[offset..offset + bytes.len()]);
    }

    fn write_config(&mut self, offset: usize, bytes: &[u8]) {
        if let (CONFIG_BYPASS, [value @ (0 | 1)]) = (offset, bytes)
            && self.0.negotiated >> 6 & 1 == 1
        {
            self.0.bypass = *value;
        }
    }

    fn request(&mut self, readable: &[u8], writable: &mut [u8]) -> Result<usize, NotReturned> {
        Ok(self.0.request(readable, writable))
    }

    fn access(&mut self, endpoint: u32, iova: u64, access: Access) -> Outcome {
        let reached = self.0.access(endpoint, iova, access == Access::Write);
        reached.map_or(Outcome::Blocked, Outcome::Reached)
    }

    fn next_event(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let report = self.0.faults.first()?.bytes();
        let Some(destination) = buffer.get_mut(..report.len()) else {
            return Some(0);
        };
        destination.copy_from_slice(&report);
        self.0.faults.remove(0);
        Some(report.len())
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn reset_system(&mut self) -> bool {
        self.0.reset_system();
        true
    }
}
