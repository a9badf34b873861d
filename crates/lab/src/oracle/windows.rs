//! Stale windows: from the return of unmap to the end of the invalidation that covers the range.

use std::collections::HashMap;

use super::timeline::Timeline;
use ringfence_types::{CachedLevels, DomainId, Invalidation, Nanos, PfnRange};

/// Open windows, and sums over the closed ones.
#[derive(Debug, Clone, Default)]
pub struct Windows {
    /// Open windows by domain, because most invalidations affect one domain.
    open: HashMap<DomainId, Vec<OpenWindow>>,
    /// Windows of mappings that a cache keeps, by domain and first page. Reuse closes them as well.
    kept: HashMap<(DomainId, u64), OpenWindow>,
    /// Number of kept mappings whose windows were open at the end of the trace, and their share of
    /// `byte_ns`.
    pub kept_at_end: (u64, u128),
    /// Longest window, in nanoseconds of the trace's clock.
    pub longest_ns: u64,
    /// Sum of bytes times nanoseconds.
    pub byte_ns: u128,
    /// Number of windows, including those of length zero.
    pub count: u64,
    /// The bytes of open windows, over time.
    pub timeline: Timeline,
    /// Sums over the windows that no invalidation closes; `None` without any.
    for_good: Option<PermanentWindows>,
}

/// Windows that no invalidation closes. A list of them would grow with the trace.
#[derive(Debug, Clone)]
struct PermanentWindows {
    first: Nanos,
    bytes: u128,
    /// Sum of bytes times opening time.
    byte_moments: u128,
}

#[derive(Debug, Clone)]
struct OpenWindow {
    domain: DomainId,
    range: PfnRange,
    bytes: u64,
    since: Nanos,
}

impl Windows {
    /// Opens a window: unmap has returned a buffer of `bytes` bytes, but the hardware may still
    /// translate `range`.
    pub fn open(&mut self, domain: DomainId, range: PfnRange, bytes: u64, now: Nanos) {
        self.count += 1;
        self.timeline.open(bytes, now);
        self.open.entry(domain).or_default().push(OpenWindow {
            domain,
            range,
            bytes,
            since: now,
        });
    }

    /// Opens a window of a mapping that the space keeps for the next map of the same memory.
    pub fn keep(&mut self, domain: DomainId, range: PfnRange, bytes: u64, now: Nanos) {
        self.count += 1;
        self.timeline.open(bytes, now);
        let window = OpenWindow {
            domain,
            range,
            bytes,
            since: now,
        };
        if let Some(before) = self.kept.insert((domain, range.lo().get()), window) {
            self.closed(&before, now);
        }
    }

    /// Closes the window of the kept mapping at the first page of `range`: the driver uses it
    /// again, so the device may access it.
    pub fn reuse(&mut self, domain: DomainId, range: PfnRange, now: Nanos) {
        if let Some(window) = self.kept.remove(&(domain, range.lo().get())) {
            self.closed(&window, now);
        }
    }

    /// Returns true if a window of a kept mapping is open.
    pub fn any_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Returns the number of kept mappings with an open window.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    fn closed(&mut self, window: &OpenWindow, now: Nanos) -> u128 {
        self.timeline.close(window.bytes, now);
        let length = now.since(window.since);
        let byte_ns = u128::from(length) * u128::from(window.bytes);
        self.longest_ns = self.longest_ns.max(length);
        self.byte_ns += byte_ns;
        byte_ns
    }

    fn close_kept(&mut self, request: &Invalidation, now: Nanos) {
        let covered = |window: &OpenWindow| {
            request.covers(window.domain, &window.range, CachedLevels::Leaves)
        };
        let covered: Vec<_> = match request {
            // Most invalidations cover a run of pages: look up each page if there are fewer pages
            // than windows.
            Invalidation::Pages { domain, range, .. } if range.pages() < self.kept.len() as u64 => {
                (range.lo().get()..=range.hi().get())
                    .map(|page| (*domain, page))
                    .filter(|at| self.kept.get(at).is_some_and(covered))
                    .collect()
            }
            _ => {
                let windows = self.kept.iter().filter(|(_, window)| covered(window));
                windows.map(|(at, _)| *at).collect()
            }
        };
        for at in covered {
            if let Some(window) = self.kept.remove(&at) {
                self.closed(&window, now);
            }
        }
    }

    /// Opens a window that no invalidation closes: it stays open until [`finish`](Self::finish).
    pub fn open_for_good(&mut self, bytes: u64, now: Nanos) {
        self.count += 1;
        self.timeline.open(bytes, now);
        let all = self.for_good.get_or_insert(PermanentWindows {
            first: now,
            bytes: 0,
            byte_moments: 0,
        });
        all.bytes += u128::from(bytes);
        all.byte_moments += u128::from(bytes) * u128::from(now.0);
    }

    /// Closes the windows that a completed invalidation covers.
    pub fn close(&mut self, request: &Invalidation, now: Nanos) {
        if !self.kept.is_empty() {
            self.close_kept(request, now);
        }
        let (longest, byte_ns) = (&mut self.longest_ns, &mut self.byte_ns);
        let timeline = &mut self.timeline;
        let mut close = |window: &OpenWindow| {
            if !request.covers(window.domain, &window.range, CachedLevels::Leaves) {
                return true;
            }
            timeline.close(window.bytes, now);
            let length = now.since(window.since);
            *longest = (*longest).max(length);
            *byte_ns += u128::from(length) * u128::from(window.bytes);
            false
        };
        match request {
            Invalidation::Pages { domain, .. }
            | Invalidation::Domain(domain)
            | Invalidation::Ring { domain, .. } => {
                if let Some(windows) = self.open.get_mut(domain) {
                    windows.retain(&mut close);
                }
            }
            Invalidation::Global | Invalidation::Context(_) => {
                for windows in self.open.values_mut() {
                    windows.retain(&mut close);
                }
            }
        }
    }

    /// Ends the trace and closes all open windows at `now`.
    pub fn finish(&mut self, now: Nanos) {
        for (_, window) in std::mem::take(&mut self.kept) {
            let byte_ns = self.closed(&window, now);
            self.kept_at_end.0 += 1;
            self.kept_at_end.1 += byte_ns;
        }
        self.close(&Invalidation::Global, now);
        if let Some(all) = self.for_good.take() {
            self.longest_ns = self.longest_ns.max(now.since(all.first));
            self.byte_ns += (all.bytes * u128::from(now.0)).saturating_sub(all.byte_moments);
        }
    }

    /// Returns the sum of bytes times seconds.
    pub fn byte_seconds(&self) -> f64 {
        self.byte_ns as f64 / 1e9
    }
}
