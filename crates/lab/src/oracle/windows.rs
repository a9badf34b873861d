//! Stale windows: from unmap's return to the end of the invalidation that covers the range.

use ringfence_types::{DomainId, Invalidation, Nanos, PfnRange};

/// Windows that are open, and what the closed ones add up to.
#[derive(Debug, Default)]
pub struct Windows {
    open: Vec<Window>,
    /// Longest window, in nanoseconds of the trace's clock.
    pub longest_ns: u64,
    /// Sum of bytes times nanoseconds.
    pub byte_ns: u128,
    /// Windows of any length, zero included.
    pub count: u64,
    /// What is added up of windows that nothing closes; `None` without any.
    for_good: Option<ForGood>,
}

/// Windows that nothing closes. A list of them would grow with the trace.
#[derive(Debug)]
struct ForGood {
    first: Nanos,
    bytes: u128,
    /// Sum of bytes times the moment they were left open.
    byte_moments: u128,
}

#[derive(Debug)]
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
        self.open.push(Window {
            domain,
            range,
            bytes,
            since: now,
        });
    }

    /// The same where no invalidation will ever end it: the window stays open until [`finish`](Self::finish).
    pub fn open_for_good(&mut self, bytes: u64, now: Nanos) {
        self.count += 1;
        let all = self.for_good.get_or_insert(ForGood {
            first: now,
            bytes: 0,
            byte_moments: 0,
        });
        all.bytes += u128::from(bytes);
        all.byte_moments += u128::from(bytes) * u128::from(now.0);
    }

    /// The hardware has completed an invalidation.
    pub fn close(&mut self, request: &Invalidation, now: Nanos) {
        if self.open.is_empty() {
            return;
        }
        let (longest, byte_ns) = (&mut self.longest_ns, &mut self.byte_ns);
        self.open.retain(|window| {
            if !request.covers(window.domain, &window.range) {
                return true;
            }
            let length = now.since(window.since);
            *longest = (*longest).max(length);
            *byte_ns += u128::from(length) * u128::from(window.bytes);
            false
        });
    }

    /// The trace ends: what is still open counts until now.
    pub fn finish(&mut self, now: Nanos) {
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
