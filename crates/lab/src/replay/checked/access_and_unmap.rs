//! The oracle's part of an unmap: the device's own access just before it (`use_buffer` in
//! `oracle_hooks.rs`), the end of the grant, and the return of the buffer.

use ringfence_devices::{DeviceMapping, DriverEvent};
use ringfence_types::{Direction, DomainId, PfnRange};

use super::oracle_hooks::OracleHooks;
use crate::error::LabError;
use crate::hardware::Hardware;
use crate::layer::{DmaOps, MappingToken, OpKey, UnmapOutcome};
use crate::oracle::GrantId;

/// The mapping that an unmap ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unmapping {
    grant: GrantId,
    target: DeviceMapping,
    domain: DomainId,
    bytes: u64,
    /// Bytes of the buffer, and those in place of which the device used memory of its pool.
    used: Option<(u64, u64)>,
}

impl<H: Hardware> OracleHooks<H> {
    /// Lets the device and the attackers access the buffer before its unmap.
    pub(super) fn begin_unmapping(&mut self, key: OpKey, token: &MappingToken) {
        self.unmapping = None;
        let (Some((device, domain)), Some(buffer)) = (self.identity(key.device), token.buffer())
        else {
            return;
        };
        let grant = GrantId::from_raw(buffer);
        self.device_ranges.clear();
        match (token.range(), self.oracle.get(grant)) {
            (Some(range), _) => self.device_ranges.push(range),
            (None, Some(grant)) if self.is_per_segment() => {
                self.device_ranges.extend(grant.pieces());
            }
            (None, Some(grant)) => self.device_ranges.extend(grant.pieces().next()),
            (None, None) => {}
        }
        let Some(range) = self.device_ranges.first().copied() else {
            return;
        };
        let target = DeviceMapping {
            device,
            range,
            direction: key.direction,
        };
        let mut bytes = range.bytes();
        if self.counts {
            bytes = self.use_buffer(grant, &target);
            self.attack_event(DriverEvent::Unmapping, device, key.direction);
        }
        self.unmapping = Some(Unmapping {
            grant,
            target,
            domain,
            bytes,
            used: None,
        });
    }

    /// Tells the oracle who holds the buffer after its unmap.
    pub(super) fn end_unmapping(
        &mut self,
        key: OpKey,
        outcome: UnmapOutcome,
    ) -> Result<(), LabError> {
        let Some(unmapping) = self.unmapping.take() else {
            return Ok(());
        };
        let Unmapping {
            grant,
            target,
            used,
            ..
        } = unmapping;
        if let Some((bytes, pooled)) = used {
            let ways = &mut self.outcomes.ways;
            match outcome {
                UnmapOutcome::Refused(_) => {}
                UnmapOutcome::Returned { .. } => ways.count(bytes, pooled, false),
                _ => ways.count(bytes, pooled, true),
            }
        }
        if let UnmapOutcome::Refused(_) = outcome {
            // Nothing changed: the mapping is live.
            self.outcomes.refused_unmaps += 1;
        } else {
            self.live -= 1;
            self.search.unmapped(self.device_ranges.len());
            self.outcomes.unmaps += u64::from(self.counts);
        }
        match outcome {
            UnmapOutcome::Returned { stale, .. } => {
                self.oracle.release(grant);
                self.count_delay(key.direction, 0);
                if stale {
                    self.open_windows(key, &unmapping);
                }
            }
            // The driver keeps the buffer of a list that is partly unmapped for good, since the
            // device may reach it.
            UnmapOutcome::Withheld | UnmapOutcome::PartlyUnmapped => {
                self.withhold(grant, key.direction);
            }
            UnmapOutcome::NotInvalidated(token) => {
                self.withhold(grant, key.direction);
                self.not_invalidated.push(token);
            }
            UnmapOutcome::Refused(_) => {}
        }
        if !self.counts {
            return Ok(());
        }
        self.attack_event(DriverEvent::Unmapped, target.device, key.direction);
        self.check_kept()
    }

    /// Opens the windows of a mapping whose buffer was returned while the device may reach it.
    fn open_windows(&mut self, key: OpKey, unmapping: &Unmapping) {
        let Unmapping {
            target,
            domain,
            bytes,
            ..
        } = *unmapping;
        let now = self.now;
        if self.traits.caches_unmapped {
            // The space keeps the mapping. A range has no window while its pages hold another live
            // buffer: accesses then count as beside that buffer.
            self.oracle.keep(key.device.index(), unmapping.grant);
            for range in &self.device_ranges {
                if !self.oracle.is_live(key.device.index(), range) {
                    let pages = PfnRange::covering(range);
                    self.windows.keep(domain, pages, range.bytes(), now);
                }
            }
        } else if self.installs {
            // If this unmap triggered a flush, the flush followed the clearing of its entries, so
            // it closes this window too.
            let pages = PfnRange::covering(&target.range);
            self.windows.open(domain, pages, bytes, now);
            self.close_windows();
        } else {
            self.windows.open_for_good(bytes, now);
        }
    }

    /// Fails if the cache keeps more mappings than the limit allows.
    #[inline]
    fn check_kept(&self) -> Result<(), LabError> {
        let limit = self.limits.kept;
        match self.windows.kept() > limit {
            true => Err(LabError::Kept { limit }),
            false => Ok(()),
        }
    }

    /// Records that the layer withholds the buffer.
    fn withhold(&mut self, grant: GrantId, direction: Direction) {
        self.oracle.withhold(grant);
        let since = (self.now, direction);
        self.withheld.insert(grant.to_raw(), since);
    }

    /// Notes which bytes of the current mapping are in a pool, and counts their copy back into the
    /// buffer.
    pub(super) fn note_pooled_bytes<D: DmaOps + ?Sized>(&mut self, layer: &D, key: OpKey) {
        let Some(unmapping) = &self.unmapping else {
            return;
        };
        let grant = self.oracle.get(unmapping.grant);
        let bytes: u64 = grant.map_or(0, |grant| {
            let pieces = grant.pieces();
            pieces.map(|piece| piece.bytes()).sum()
        });
        let pooled = self.pooled_bytes(layer, key, bytes);
        if let Some(unmapping) = &mut self.unmapping {
            unmapping.used = Some((bytes, pooled));
        }
        if key.direction != Direction::ToDevice {
            let copied = &mut self.outcomes.copied_bytes;
            *copied = copied.saturating_add(pooled);
        }
    }

    /// Counts the delay of a buffer that the layer returned. Unmaps after the trace do not count.
    #[inline]
    fn count_delay(&mut self, direction: Direction, ns: u64) {
        if self.counts {
            self.outcomes.release_delays.record(direction, ns);
        }
    }

    /// Retries the failed invalidations.
    #[cold]
    pub(super) fn retry_invalidations<D: DmaOps + ?Sized>(&mut self, layer: &mut D) {
        for token in core::mem::take(&mut self.not_invalidated) {
            match layer.retry_invalidation(token) {
                Ok(buffer) => self.return_buffer(buffer),
                Err(token) => self.not_invalidated.push(token),
            }
        }
    }

    /// Records the return of a withheld buffer to its driver.
    pub(super) fn return_buffer(&mut self, buffer: u64) {
        self.oracle.release(GrantId::from_raw(buffer));
        if let Some((since, direction)) = self.withheld.remove(&buffer) {
            let delay = self.now.since(since);
            self.count_delay(direction, delay);
            let longest = &mut self.outcomes.release_delay_max_ns;
            *longest = delay.max(*longest);
        }
    }
}
