//! Global errors (IHI 0070, section 7.5): an error is active while its bits in `GERROR` and
//! `GERRORN` differ.

use ringfence_types::Registers;

use crate::registers::{ABSENT, GERROR, GERROR_CMDQ, GERROR_EVENTQ_ABT, GERROR_SFM, GERRORN};

/// The acknowledged errors, a copy of `GERRORN`.
#[derive(Debug)]
pub(crate) struct GlobalErrors {
    acknowledged: u32,
}

impl GlobalErrors {
    /// Acknowledges all errors that are active.
    pub(crate) fn new<R: Registers>(unit: &R) -> Self {
        let acknowledged = unit.read32(GERROR);
        unit.write32(GERRORN, acknowledged);
        Self { acknowledged }
    }

    fn active<R: Registers>(&self, unit: &R) -> u32 {
        match unit.read32(GERROR) {
            ABSENT => ABSENT,
            raw => raw ^ self.acknowledged,
        }
    }

    /// Returns true if the unit does not consume commands.
    pub(crate) fn has_stopped<R: Registers>(&self, unit: &R) -> bool {
        self.active(unit) & (GERROR_CMDQ | GERROR_SFM) != 0
    }

    /// Acknowledges an error of the command queue. The unit then consumes commands again.
    pub(crate) fn acknowledge_commands<R: Registers>(&mut self, unit: &R) {
        self.acknowledge(unit, GERROR_CMDQ);
    }

    /// Acknowledges that the unit could not write a record. Returns true if it was so.
    pub(crate) fn take_event_abort<R: Registers>(&mut self, unit: &R) -> bool {
        self.acknowledge(unit, GERROR_EVENTQ_ABT)
    }

    fn acknowledge<R: Registers>(&mut self, unit: &R, error: u32) -> bool {
        let active = self.active(unit);
        if active == ABSENT || active & error == 0 {
            return false;
        }
        // Only bits of active errors may change.
        self.acknowledged ^= error;
        unit.write32(GERRORN, self.acknowledged);
        true
    }
}
