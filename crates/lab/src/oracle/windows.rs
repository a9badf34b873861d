//! Stale windows: from unmap's return to the end of the invalidation that covers the range.

use std::collections::HashMap;

use ringfence_types::{CachedLevels, DomainId, Invalidation, Nanos, PfnRange};

/// Windows that are open, and what the closed ones add up to.
#[derive(Debug, Clone, Default)]
pub struct Windows {
    /// By domain: an invalidation looks through those of its own.
    open: HashMap<DomainId, Vec<Window>>,
    /// Those of mappings that the space has kept, by domain and first page: reuse closes them, too.
    kept: HashMap<(DomainId, u64), Window>,
    /// Windows of kept mappings that were open when the trace ended, and their part of `byte_ns`.
    pub kept_at_end: (u64, u128),
    /// Longest window, in nanoseconds of the trace's clock.
    pub longest_ns: u64,
    /// Sum of bytes times nanoseconds.
    pub byte_ns: u128,
    /// Windows of any length, zero included.
    pub count: u64,
    /// What is added up of windows that nothing closes; `None` without any.
    for_good: Option<PermanentWindows>,
}

/// Windows that nothing closes. A list of them would grow with the trace.
#[derive(Debug, Clone)]
struct PermanentWindows {
    first: Nanos,
    bytes: u128,
    /// Sum of bytes times the moment they were left open.
    byte_moments: u128,
}

#[derive(Debug, Clone)]
struct Window {
    domain: DomainId,
    range: PfnRange,
    bytes: u64,
    since: Nanos,
}

impl Windows {
    /// Unmap has returned a buffer of `bytes` bytes while the hardware may still translate `range`.
    pub fn open(&mut self, domain: DomainId, range: PfnRange, bytes: u64, now: Nanos) {
        self.count += 1;
        self.open.entry(domain).or_default().push(Window {
            domain,
            range,
            bytes,
            since: now,
        });
    }

    /// The same where the space keeps the mapping for the next map of the same memory.
    pub fn keep(&mut self, domain: DomainId, range: PfnRange, bytes: u64, now: Nanos) {
        self.count += 1;
        let window = Window {
            domain,
            range,
            bytes,
            since: now,
        };
        if let Some(before) = self.kept.insert((domain, range.lo().get()), window) {
            self.closed(&before, now);
        }
    }

    /// A mapping that begins at the first page of `range` is in use again: the device may reach
    /// what it reaches.
    pub fn reuse(&mut self, domain: DomainId, range: PfnRange, now: Nanos) {
        if let Some(window) = self.kept.remove(&(domain, range.lo().get())) {
            self.closed(&window, now);
        }
    }

    /// Whether a window of a kept mapping is open.
    pub fn any_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Kept mappings with a window that is open.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    fn closed(&mut self, window: &Window, now: Nanos) -> u128 {
        let length = now.since(window.since);
        let byte_ns = u128::from(length) * u128::from(window.bytes);
        self.longest_ns = self.longest_ns.max(length);
        self.byte_ns += byte_ns;
        byte_ns
    }

    fn close_kept(&mut self, request: &Invalidation, now: Nanos) {
        let covered =
            |window: &Window| request.covers(window.domain, &window.range, CachedLevels::Leaves);
        let gone: Vec<_> = match request {
            // Most are of a run of pages: as many look-ups as it has, if that is less than all.
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
        for at in gone {
            if let Some(window) = self.kept.remove(&at) {
                self.closed(&window, now);
            }
        }
    }

    /// The same where no invalidation will ever end it: the window stays open until
    /// [`finish`](Self::finish).
    pub fn open_for_good(&mut self, bytes: u64, now: Nanos) {
        self.count += 1;
        let all = self.for_good.get_or_insert(PermanentWindows {
            first: now,
            bytes: 0,
            byte_moments: 0,
        });
        all.bytes += u128::from(bytes);
        all.byte_moments += u128::from(bytes) * u128::from(now.0);
    }

    /// The hardware has completed an invalidation.
    pub fn close(&mut self, request: &Invalidation, now: Nanos) {
        if !self.kept.is_empty() {
            self.close_kept(request, now);
        }
        let (longest, byte_ns) = (&mut self.longest_ns, &mut self.byte_ns);
        let mut close = |window: &Window| {
            if !request.covers(window.domain, &window.range, CachedLevels::Leaves) {
                return true;
            }
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

    /// The trace ends: what is still open counts until now.
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

    /// Sum of bytes times seconds.
    pub fn byte_seconds(&self) -> f64 {
        self.byte_ns as f64 / 1e9
    }
}
