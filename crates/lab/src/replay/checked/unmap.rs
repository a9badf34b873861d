//! Unmaps, and the return of buffers.

use std::collections::HashMap;

use ringfence_devices::{Attacker, DeviceMapping as Target, DriverEvent};
use ringfence_dma::flush::{Flush, Released};
use ringfence_dma::space::Space;
use ringfence_dma::{Outcome, UnmapError, UnmapReason};
use ringfence_trace::{DeviceIndex, MappingId};
use ringfence_types::{Direction, DomainId, Nanos, PfnRange};

use super::CheckedReplay;
use crate::hardware::Hardware;
use crate::oracle::{GrantId, Oracle};
use crate::replay::{MappingToken, Outcomes};

impl<H: Hardware, S: Space, F: Flush<S, u64>, X: Attacker> CheckedReplay<H, S, F, X> {
    pub(super) fn unmap(&mut self, id: MappingId, device: DeviceIndex, cpu: u16, used: bool) {
        let Some(slot) = self.tokens.get_mut(id.index()) else {
            return;
        };
        let held = core::mem::take(slot);
        let Some(Some(attached)) = self.attached.get(device.index()).copied() else {
            return;
        };
        while self.cpus.len() <= usize::from(cpu) {
            self.cpus.push(self.dma.cpu());
        }
        let (direction, raw) = match &held {
            MappingToken::Single(mapping) => (mapping.direction(), *mapping.buffer()),
            MappingToken::List(mapping) => (mapping.direction(), *mapping.buffer()),
            MappingToken::None => return,
        };
        let at = attached.for_direction(direction);
        let grant = GrantId::from_raw(raw);
        self.device_ranges.clear();
        match (held.range(), self.oracle.get(grant)) {
            (Some(range), _) => self.device_ranges.push(range),
            (None, Some(grant)) if self.is_apart() => self.device_ranges.extend(grant.pieces()),
            (None, Some(grant)) => self.device_ranges.extend(grant.pieces().next()),
            (None, None) => {}
        }
        let Some(range) = self.device_ranges.first().copied() else {
            return;
        };
        let target = Target {
            device: at.device(),
            range,
            direction,
        };
        let mut bytes = range.bytes();
        if used {
            self.use_buffer(grant, &target, &mut bytes);
            self.attack_event(DriverEvent::Unmapping, at.device(), direction);
        }
        let Some(own) = self.cpus.get_mut(usize::from(cpu)) else {
            return;
        };
        let outcome = match held {
            MappingToken::Single(mapping) => {
                self.dma.unmap_single(own, &mut self.machine, at, mapping)
            }
            MappingToken::List(mapping) => self.dma.unmap_sg(own, &mut self.machine, at, mapping),
            MappingToken::None => return,
        };
        let refused = outcome.as_ref().is_err_and(|error| {
            !matches!(
                error.reason,
                UnmapReason::NotFlushed(..) | UnmapReason::PartlyUnmapped(..)
            )
        });
        if refused {
            // Nothing changed: the mapping is live.
            self.outcomes.refused_unmaps += 1;
        } else {
            self.live -= 1;
            self.search.unmapped(self.device_ranges.len());
            self.outcomes.unmaps += u64::from(used);
        }
        match outcome {
            Ok(outcome) => {
                let stale = outcome.is_stale();
                if outcome.into_buffer().is_some() {
                    self.oracle.release(grant);
                    if stale && S::CACHES_UNMAPPED {
                        self.keep_windows(device.index(), at.domain());
                    } else if stale {
                        let pages = PfnRange::covering(&range);
                        let now = self.machine.now;
                        if self.installs {
                            // If this unmap triggered a flush, the flush followed the clearing of
                            // its entries, so it closes this window too.
                            self.windows.open(at.domain(), pages, bytes, now);
                            self.close_windows();
                        } else {
                            self.windows.open_for_good(bytes, now);
                        }
                    }
                } else {
                    self.withhold(grant);
                }
            }
            Err(UnmapError {
                reason: UnmapReason::NotFlushed(_, owed),
                ..
            }) => {
                self.withhold(grant);
                self.not_invalidated.push(owed);
            }
            // The driver keeps the buffer for good, since the device may reach it.
            Err(UnmapError {
                reason: UnmapReason::PartlyUnmapped(..),
                ..
            }) => self.withhold(grant),
            Err(_) => {}
        }
        if used {
            self.attack_event(DriverEvent::Unmapped, at.device(), direction);
        }
    }

    /// Opens windows for the current mapping, which the space keeps. A range has no window while
    /// its pages hold another live buffer: accesses then count as beside that buffer.
    fn keep_windows(&mut self, device: usize, domain: DomainId) {
        let now = self.machine.now;
        for range in &self.device_ranges {
            if !self.oracle.is_live(device, range) {
                let pages = PfnRange::covering(range);
                self.windows.keep(domain, pages, range.bytes(), now);
            }
        }
    }

    /// Records that the layer withholds the buffer.
    fn withhold(&mut self, grant: GrantId) {
        self.oracle.withhold(grant);
        self.withheld.insert(grant.to_raw(), self.machine.now);
    }

    /// Retries the failed invalidations.
    #[cold]
    pub(super) fn retry_invalidations(&mut self) {
        let Some(own) = self.cpus.first_mut() else {
            return;
        };
        for owed in core::mem::take(&mut self.not_invalidated) {
            match self.dma.retry_invalidation(own, &mut self.machine, owed) {
                Ok(Released(raw)) => {
                    let (oracle, withheld) = (&mut self.oracle, &mut self.withheld);
                    return_buffer(oracle, withheld, &mut self.outcomes, raw, self.machine.now);
                }
                Err((_, owed)) => self.not_invalidated.push(owed),
            }
        }
    }

    pub(super) fn end_burst(&mut self, device: DeviceIndex, cpu: u16, direction: Direction) {
        let (Some(Some(attached)), Some(own)) = (
            self.attached.get(device.index()),
            self.cpus.get_mut(usize::from(cpu)),
        ) else {
            return;
        };
        let at = attached.for_direction(direction);
        let now = self.machine.now;
        let (oracle, withheld, outcomes) =
            (&mut self.oracle, &mut self.withheld, &mut self.outcomes);
        // A failed invalidation leaves the buffers withheld, which is safe.
        let _ = self
            .dma
            .end_burst(own, &mut self.machine, at, direction, |raw| {
                return_buffer(oracle, withheld, outcomes, raw, now);
            });
    }
}

/// Records the return of a withheld buffer to its driver.
fn return_buffer(
    oracle: &mut Oracle,
    withheld: &mut HashMap<u64, Nanos>,
    outcomes: &mut Outcomes,
    raw: u64,
    now: Nanos,
) {
    oracle.release(GrantId::from_raw(raw));
    if let Some(since) = withheld.remove(&raw) {
        let delay = now.since(since);
        outcomes.release_delay_max_ns = outcomes.release_delay_max_ns.max(delay);
    }
}
