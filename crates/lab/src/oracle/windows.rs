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
    pub fn finish(&mut self, now: Nanos) -> u64 {
        let left = self.open.len() as u64;
        self.close(&Invalidation::Global, now);
        left
    }

    /// Sum of bytes times seconds.
    pub fn byte_seconds(&self) -> f64 {
        self.byte_ns as f64 / 1e9
    }
}
