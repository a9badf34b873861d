//! What comes after a trace: a cache lets go of what it has kept.

use ringfence_devices::{Attacker, DriverEvent};
use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_types::Nanos;

use super::CheckedReplay;
use crate::hardware::Hardware;
use crate::oracle::Windows;
use crate::replay::Exposure;

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> CheckedReplay<H, S, F, X> {
    /// Runs on from the end of the trace until every mapping that the space keeps is gone, at the
    /// latest until the mode's bound is over. No driver maps or unmaps; cycles end, and attackers
    /// go on at each end. `windows` are those that were open at the trace's end.
    ///
    /// What is counted of the trace is not changed, but for the attackers' accesses, which the
    /// caller counts apart.
    pub(super) fn drain(&mut self, windows: Windows) -> Exposure {
        self.windows = windows;
        let ended = self.machine.now;
        let reached = self.oracle.tally.violations();
        if let Some(cycling) = self.cycling {
            // What was released last leaves within the bound.
            let latest = ended.0.saturating_add(cycling.bound_ns());
            while self.windows.any_kept() {
                let cycle = cycling.cycle_ns.max(1);
                let next = (self.machine.now.0 / cycle + 1).saturating_mul(cycle);
                // At the end of the clock no cycle ends any more.
                if next > latest || next <= self.machine.now.0 {
                    break;
                }
                self.machine.now = Nanos(next);
                if let Some(own) = self.cpus.first_mut() {
                    // A failed flush shows as windows that are overdue.
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
