//! What the oracle says of an access, and how it counts.

use serde::Serialize;

/// The judgement of one access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Inside a live grant of this device and direction.
    Granted,
    /// Let through although the mapping of the address was released, or to memory that its present
    /// owner was not given.
    Stale,
    /// Let through although there never was a mapping at this address.
    Never,
    /// Let through against the direction of the mapping.
    Direction,
    /// Let through by a mapping of another device.
    Foreign,
    /// The address belongs to a live mapping of this device, the byte lies outside its buffer: what
    /// page granularity leaks.
    Colocated,
    /// Stopped, and rightly.
    Stopped,
    /// Stopped inside a live grant.
    FalseFault,
}

impl Verdict {
    /// Whether this is a violation of safety.
    pub fn is_violation(self) -> bool {
        matches!(
            self,
            Self::Stale | Self::Never | Self::Direction | Self::Foreign
        )
    }

    /// Of two owners' verdicts on one address that lies in neither's grant, the one by the closer
    /// owner: the exact mapping before the page's.
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
pub struct Tally {
    /// Accesses judged.
    pub accesses: u64,
    /// Accesses stopped by the hardware.
    pub faults: u64,
    /// See [`Verdict::Stale`].
    pub stale: u64,
    /// See [`Verdict::Never`].
    pub never: u64,
    /// See [`Verdict::Direction`].
    pub direction: u64,
    /// See [`Verdict::Foreign`].
    pub foreign: u64,
    /// See [`Verdict::Colocated`].
    pub colocated: u64,
    /// See [`Verdict::FalseFault`].
    pub false_faults: u64,
}

impl Tally {
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
            Verdict::FalseFault => self.false_faults += 1,
        }
    }

    /// All violations: every class but colocated.
    pub fn violations(&self) -> u64 {
        self.stale + self.never + self.direction + self.foreign
    }

    /// Adds another count.
    pub fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        self.faults += other.faults;
        self.stale += other.stale;
        self.never += other.never;
        self.direction += other.direction;
        self.foreign += other.foreign;
        self.colocated += other.colocated;
        self.false_faults += other.false_faults;
    }
}
