//! The bus of a replay: it translates, judges and counts every device access.

use ringfence_devices::{DmaPort, DmaRequest};
use ringfence_types::Fault;

use super::oracle_observer::{DeviceIndexTable, OracleObserver};
use crate::hardware::Hardware;
use crate::oracle::Oracle;
use crate::replay_platform::ReplayPlatform;

/// A DMA port that sends accesses through `machine` and reports them to `oracle`.
pub(super) struct CheckedBus<'a, H> {
    pub(super) machine: &'a mut ReplayPlatform<H>,
    pub(super) oracle: &'a mut Oracle,
    pub(super) device_indices: &'a DeviceIndexTable,
    /// Number of accesses so far.
    pub(super) accesses: u64,
}

impl<H: Hardware> DmaPort for CheckedBus<'_, H> {
    #[inline]
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
        self.accesses += 1;
        let eye = OracleObserver {
            oracle: self.oracle,
            device_indices: self.device_indices,
        };
        self.machine.probe(request, eye)
    }
}
