//! The bus as the devices of a replay use it: every access is translated, judged and counted.

use ringfence_devices::{Port, Request};
use ringfence_types::Fault;

use super::eye::{DeviceRows, Eye};
use crate::hardware::Hardware;
use crate::machine::Machine;
use crate::oracle::Oracle;

/// Accesses go through `machine` before the eyes of `oracle`.
pub(super) struct JudgedBus<'a, H> {
    pub(super) machine: &'a mut Machine<H>,
    pub(super) oracle: &'a mut Oracle,
    pub(super) rows: &'a DeviceRows,
    /// So far.
    pub(super) accesses: u64,
}

impl<H: Hardware> Port for JudgedBus<'_, H> {
    #[inline]
    fn access(&mut self, request: &Request) -> Result<(), Fault> {
        self.accesses += 1;
        let eye = Eye {
            oracle: self.oracle,
            rows: self.rows,
        };
        self.machine.probe(request, eye)
    }
}
