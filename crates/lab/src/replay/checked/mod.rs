//! The oracle replay: a replay with devices, hardware and oracle, which translates and judges every
//! access.

mod access_and_unmap;
mod oracle_hooks;
mod search;

use ringfence_devices::DriverEvent;
use ringfence_trace::{DeviceIndex, Devices, MappingId};
use ringfence_types::Nanos;

use oracle_hooks::OracleHooks;

use super::{Attackers, BufferExposure, Outcomes, PlanResources, Replay};
use crate::error::LabError;
use crate::hardware::Hardware;
use crate::layer::{DmaOps, OpKey};
use crate::limits::ReplayLimits;
use crate::mapping_cache::CycleParams;
use crate::oracle::{Ownership, Windows};
use crate::plan::Plan;
use crate::replay_platform::SharedPlatform;

/// A DMA layer, a platform and an oracle, driven by plans.
pub struct CheckedReplay<H> {
    replay: Replay<dyn DmaOps>,
    hooks: OracleHooks<H>,
    /// T and C of a space that keeps unmapped mappings; `None` for other spaces.
    cache_cycles: Option<CycleParams>,
}

impl<H: Hardware> CheckedReplay<H> {
    /// Creates a replay that drives `layer` on `platform`.
    pub fn new(
        platform: SharedPlatform<H>,
        layer: Box<dyn DmaOps>,
        ownership: Ownership,
        attackers: Attackers,
    ) -> Self {
        let hooks = OracleHooks::new(platform, layer.space_traits(), ownership, attackers);
        Self {
            replay: Replay::new(layer),
            hooks,
            cache_cycles: None,
        }
    }

    /// If `early` is true, the device accesses each page of a buffer right after its map, as well
    /// as before its unmap. Not for walkers that see a map only after its doorbell.
    #[must_use]
    pub fn with_early_touches(mut self, early: bool) -> Self {
        self.hooks.early = early;
        self
    }

    /// Sets the limits of the replay.
    #[must_use]
    pub fn with_limits(mut self, limits: ReplayLimits) -> Self {
        self.hooks.set_limits(limits);
        self
    }

    /// Runs the replay on after its trace until a space with these cycles has dropped all mappings
    /// that it keeps.
    #[must_use]
    pub fn with_cache_cycles(mut self, cache_cycles: Option<CycleParams>) -> Self {
        self.cache_cycles = cache_cycles;
        self
    }

    /// Assumes, if `recycles` is true, that drivers take their buffers from pools that stay mapped
    /// ([`Oracle::set_recycles`](crate::oracle::Oracle::set_recycles)).
    pub fn with_recycling(mut self, recycles: bool) -> Self {
        if recycles {
            self.hooks.oracle.set_recycles();
        }
        self
    }

    /// Performs the steps of `plan`.
    ///
    /// # Errors
    /// The trace exceeds a limit, or a device cannot be attached.
    pub fn run(&mut self, plan: &Plan, devices: &Devices) -> Result<(), LabError> {
        let needs = PlanResources::of(plan);
        for &device in &needs.devices {
            self.hooks.announce(device, devices.get(device));
        }
        self.replay.prepare(&needs)?;
        self.replay.run(plan, &plan.steps, &mut self.hooks)
    }

    /// Ends the replay. Closes open windows at the current time, drains the space's cache, and
    /// unmaps the live mappings without counting them.
    pub fn finish(&mut self, alive: &[(MappingId, DeviceIndex)]) -> Outcomes {
        let open = self.hooks.windows.clone();
        self.hooks.end_trace(self.replay.clear_stalled());
        let layer = &self.replay.layer;
        let pools = self
            .hooks
            .copying
            .iter()
            .filter_map(|device| layer.copies(*device));
        self.hooks.outcomes.pool_bytes = pools.map(|pool| pool.mapped_bytes).sum();
        let attempts = self.hooks.outcomes.attempts;
        self.hooks.outcomes.exposure = self.drain(open);
        self.hooks.outcomes.attempts = attempts;
        self.hooks.counts = false;
        for &(id, device) in alive {
            if let Some(direction) = self.replay.token(id).direction() {
                let key = OpKey::new(device, 0, direction);
                // Only counted unmaps exceed a limit.
                let _ = self.replay.unmap(id, key, &mut self.hooks);
            }
        }
        self.hooks.outcomes.clone()
    }

    /// Runs from the end of the trace until the space keeps no mapping, at most until the mode's
    /// bound has passed. No driver maps or unmaps. Cycles end, and attackers access memory at each
    /// end. `windows` are those that were open at the end of the trace.
    ///
    /// The counts of the trace do not change, except for the number of attacker accesses; the
    /// caller restores it.
    fn drain(&mut self, windows: Windows) -> BufferExposure {
        let hooks = &mut self.hooks;
        hooks.windows = windows;
        let ended = hooks.now;
        let reached = hooks.oracle.tally.violations();
        if let Some(cycles) = self.cache_cycles {
            // The cache drops the last released mapping within the bound.
            let latest = ended.0.saturating_add(cycles.bound_ns());
            while hooks.windows.any_kept() {
                let cycle = cycles.cycle_ns.max(1);
                let next = (hooks.now.0 / cycle + 1).saturating_mul(cycle);
                // No cycle ends after the end of the clock.
                if next > latest || next <= hooks.now.0 {
                    break;
                }
                hooks.now = Nanos(next);
                self.replay.layer.set_time(hooks.now);
                // A failed flush shows as overdue windows.
                self.replay.layer.tick();
                hooks.attack(&DriverEvent::Other);
                hooks.close_windows();
            }
        }
        let now = hooks.now;
        hooks.windows.finish(now);
        BufferExposure {
            max_ns: hooks.windows.longest_ns,
            byte_seconds: hooks.windows.byte_seconds(),
            after_end_ns: now.since(ended),
            reached_after_end: hooks.oracle.tally.violations() - reached,
            overdue: hooks.windows.kept_at_end.0,
        }
    }
}
