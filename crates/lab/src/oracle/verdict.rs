//! The oracle's verdicts and their counts.

use serde::Serialize;

/// The verdict on one access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Let through inside a grant of this device and direction that is live or withheld.
    Granted,
    /// Let through after the release of the address's mapping, or to memory that the present owner
    /// was not granted.
    Stale,
    /// Let through at an address that never had a mapping.
    Never,
    /// Let through against the direction of the mapping.
    Direction,
    /// Let through on a page that only another device has mapped.
    Foreign,
    /// Let through on a page of a live mapping of this device, outside the buffer: the leak of page
    /// granularity.
    Colocated,
    /// Let through to memory of the device's own pool, outside live grants. Of a pool of copies, it
    /// holds zeroes, bytes that the device was given before, and bytes that it wrote; what it
    /// writes reaches no driver. Of a driver's pool, it holds only this device's buffers, and the
    /// access is a read.
    Shadow,
    /// Let through to write a released buffer in the device's own pool, whose bytes the driver may
    /// still use.
    Mutable,
    /// Stopped by the hardware, and no live grant permits the access.
    Stopped,
    /// Stopped inside a live grant.
    FalseFault,
}

impl Verdict {
    /// Returns true if the verdict is a violation.
    pub fn is_violation(self) -> bool {
        matches!(
            self,
            Self::Stale | Self::Never | Self::Direction | Self::Foreign
        )
    }

    /// Returns the verdict of the closer of two owners of an address: an owner whose mapping
    /// contains the address precedes one that only shares its page.
    pub(super) fn closer(self, other: Self) -> Self {
        let rank = |verdict| match verdict {
            Self::Direction => 0,
            Self::Stale => 1,
            Self::Colocated => 2,
            _ => 3,
        };
        if rank(self) <= rank(other) {
            self
        } else {
            other
        }
    }
}

/// Counts of verdicts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct VerdictCounts {
    /// Number of judged accesses.
    pub accesses: u64,
    /// Accesses that the hardware stopped.
    pub faults: u64,
    /// Accesses with [`Verdict::Stale`].
    pub stale: u64,
    /// Accesses with [`Verdict::Never`].
    pub never: u64,
    /// Accesses with [`Verdict::Direction`].
    pub direction: u64,
    /// Those of `direction` that read a buffer which the device may only write.
    pub direction_reads: u64,
    /// Accesses with [`Verdict::Foreign`].
    pub foreign: u64,
    /// Accesses with [`Verdict::Colocated`].
    pub colocated: u64,
    /// Accesses with [`Verdict::Shadow`].
    pub shadow: u64,
    /// Accesses with [`Verdict::Mutable`].
    pub mutable: u64,
    /// Accesses with [`Verdict::FalseFault`].
    pub false_faults: u64,
}

impl VerdictCounts {
    /// Counts one verdict.
    #[inline]
    pub fn count(&mut self, verdict: Verdict) {
        self.accesses += 1;
        match verdict {
            Verdict::Granted | Verdict::Stopped => {}
            Verdict::Stale => self.stale += 1,
            Verdict::Never => self.never += 1,
            Verdict::Direction => self.direction += 1,
            Verdict::Foreign => self.foreign += 1,
            Verdict::Colocated => self.colocated += 1,
            Verdict::Shadow => self.shadow += 1,
            Verdict::Mutable => self.mutable += 1,
            Verdict::FalseFault => self.false_faults += 1,
        }
    }

    /// Returns the number of violations: colocated accesses and faults do not count.
    pub fn violations(&self) -> u64 {
        self.stale + self.never + self.direction + self.foreign
    }

    /// Returns the counts of a table format without write-only pages, which permits reads wherever
    /// it permits writes: these reads are no violations.
    #[must_use]
    pub fn without_direction_reads(self) -> Self {
        Self {
            direction: self.direction - self.direction_reads,
            ..self
        }
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        self.faults += other.faults;
        self.stale += other.stale;
        self.never += other.never;
        self.direction += other.direction;
        self.direction_reads += other.direction_reads;
        self.foreign += other.foreign;
        self.colocated += other.colocated;
        self.shadow += other.shadow;
        self.mutable += other.mutable;
        self.false_faults += other.false_faults;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_against_the_direction_stay_violations() {
        let counts = VerdictCounts {
            accesses: 20,
            stale: 2,
            direction: 7,
            direction_reads: 4,
            ..VerdictCounts::default()
        };
        assert_eq!(counts.violations(), 9);
        let without = counts.without_direction_reads();
        assert_eq!((without.direction, without.violations()), (3, 5));
        assert_eq!(without.accesses, 20);
    }
}
