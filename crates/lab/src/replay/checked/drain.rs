//! The drain phase after a trace: a cache drops the mappings that it keeps.

use ringfence_devices::{Attacker, DriverEvent};
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_types::Nanos;

use super::CheckedReplay;
use crate::hardware::Hardware;
use crate::oracle::Windows;
use crate::replay::Exposure;

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> CheckedReplay<H, S, F, X> {
    /// Runs from the end of the trace until the space keeps no mapping, at most until the mode's
    /// bound has passed. No driver maps or unmaps. Cycles end, and attackers access memory at each
    /// end. `windows` are those that were open at the end of the trace.
    ///
    /// The counts of the trace do not change, except for the number of attacker accesses; the
    /// caller restores it.
    pub(super) fn drain(&mut self, windows: Windows) -> Exposure {
        self.windows = windows;
        let ended = self.machine.now;
        let reached = self.oracle.tally.violations();
        if let Some(cycling) = self.cycling {
            // The cache drops the last released mapping within the bound.
            let latest = ended.0.saturating_add(cycling.bound_ns());
            while self.windows.any_kept() {
                let cycle = cycling.cycle_ns.max(1);
                let next = (self.machine.now.0 / cycle + 1).saturating_mul(cycle);
                // No cycle ends after the end of the clock.
                if next > latest || next <= self.machine.now.0 {
                    break;
                }
                self.machine.now = Nanos(next);
                if let Some(own) = self.cpus.first_mut() {
                    // A failed flush shows as overdue windows.
                    let _ = self.dma.tick(own, &mut self.machine);
                }
                self.attack(&DriverEvent::Other);
                self.close_windows();
            }
        }
        let now = self.machine.now;
        self.windows.finish(now);
        Exposure {
            max_ns: self.windows.longest_ns,
            byte_seconds: self.windows.byte_seconds(),
            after_end_ns: now.since(ended),
            reached_after_end: self.oracle.tally.violations() - reached,
            overdue: self.windows.kept_at_end.0,
        }
    }
}
