//! The result of a run.

use std::fmt;
use std::time::Duration;

use ringfence_types::{Iova, RequesterId};

/// The reason why the driver chose an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Inside a mapping of the device's domain.
    Inside,
    /// Over the first or the last byte of a mapping.
    OverEnds,
    /// Inside a mapping that was removed.
    AfterUnmap,
    /// Inside a mapping that does not allow the kind of access.
    WrongDirection,
    /// Inside a mapping of a domain that the device does not belong to.
    OtherDevice,
    /// Anywhere, also beyond the width of the table.
    Anywhere,
}

impl Kind {
    /// All kinds, in order of declaration.
    pub const ALL: [Self; 6] = [
        Self::Inside,
        Self::OverEnds,
        Self::AfterUnmap,
        Self::WrongDirection,
        Self::OtherDevice,
        Self::Anywhere,
    ];
}

/// Numbers of a run without disagreement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of judged accesses.
    pub accesses: u64,
    /// Judged accesses that were reads.
    pub reads: u64,
    /// Judged accesses by [`Kind`], in order of declaration.
    pub kinds: [u64; 6],
    /// Accesses that landed.
    pub landed: u64,
    /// Fault records that were compared.
    pub faults: u64,
    /// Stopped accesses whose further fault records the unit had no room for.
    pub lost: u64,
    /// Number of maps.
    pub maps: u64,
    /// Maps that contain leaves of 2 MiB.
    pub large_maps: u64,
    /// Number of unmaps.
    pub unmaps: u64,
    /// Devices attached to a domain or detached.
    pub moves: u64,
    /// Accesses that were not made because of a recorded finding.
    pub skipped: u64,
    /// Messages that were answered.
    pub round_trips: u64,
    /// Duration of the run.
    pub elapsed: Duration,
}

impl Report {
    /// Returns the number of judged accesses of `kind`.
    pub fn of(&self, kind: Kind) -> u64 {
        self.kinds.get(kind as usize).copied().unwrap_or(0)
    }

    pub(crate) fn count(&mut self, kind: Kind) {
        if let Some(count) = self.kinds.get_mut(kind as usize) {
            *count += 1;
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.elapsed.as_secs_f64();
        write!(
            f,
            "{} accesses in {seconds:.2} s ({:.0} per second, {} round trips): {} landed, \
             {} reads, {} faults compared, {} lost; {} maps ({} large), {} unmaps, {} moves;",
            self.accesses,
            self.accesses as f64 / seconds,
            self.round_trips,
            self.landed,
            self.reads,
            self.faults,
            self.lost,
            self.maps,
            self.large_maps,
            self.unmaps,
            self.moves,
        )?;
        for kind in Kind::ALL {
            write!(f, " {kind:?} {}", self.of(kind))?;
        }
        if self.skipped != 0 {
            write!(f, "; {} skipped for a finding", self.skipped)?;
        }
        Ok(())
    }
}

/// QEMU and the oracle disagree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disagreement {
    /// Seed of the run.
    pub seed: u64,
    /// Number of judged accesses before this one.
    pub step: u64,
    /// Requester id of the device.
    pub device: RequesterId,
    /// Reason of the access.
    pub kind: Kind,
    /// First address of the access.
    pub iova: Iova,
    /// Number of bytes.
    pub bytes: u64,
    /// Description of the difference.
    pub problem: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}, access {}: {} bytes at {} by {} ({:?}): {}",
            self.seed, self.step, self.bytes, self.iova, self.device, self.kind, self.problem
        )
    }
}

impl std::error::Error for Disagreement {}
