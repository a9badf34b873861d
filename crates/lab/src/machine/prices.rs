//! Prices of a row: the costs of work that no user program executes, as far as a profile states
//! them.

use serde::Serialize;

use super::DeviceSide;
use crate::modes::Owner;
use crate::profile::Profile;

/// An operation that a driver performs with its mappings. Its cost without protection is the c of
/// `relative_throughput`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A packet of a network device.
    #[default]
    Packet,
    /// A request of a block device: one mapping, of any number of segments.
    BlockRequest,
    /// A page of a large transfer.
    Page,
}

impl Operation {
    /// All operations, the default first.
    pub const ALL: [Self; 3] = [Self::Packet, Self::BlockRequest, Self::Page];

    /// Returns the name, as given to `--operation`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Packet => "packet",
            Self::BlockRequest => "block-request",
            Self::Page => "page",
        }
    }
}

/// Cost without protection, in cycles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Baseline {
    /// Cycles for each mapping.
    PerMapping(f64),
    /// Cycles for each page of a mapping.
    PerPage(f64),
}

/// Prices of a row. `None`: the profile does not state the number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// Cycles of an invalidation.
    pub invalidation_cycles: Option<u64>,
    /// Cycles of a notification of the host.
    pub kick_cycles: Option<u64>,
    /// Cycles of a crossing into Xen.
    pub hypercall_cycles: Option<u64>,
    /// Cost without protection.
    pub baseline: Option<Baseline>,
    /// The device's side of the machine.
    pub device_side: Option<DeviceSide>,
    /// Clock of the machine, which turns cycles into time.
    pub clock_ghz: Option<f64>,
    /// Number of parallel page walkers of the second ceiling, in units of the machine's walkers.
    pub walkers: u32,
}

impl Prices {
    /// Returns the cycles of a crossing to the owner of the table.
    pub fn crossing_cycles(&self, owner: Owner) -> Option<u64> {
        if owner.is_xen() {
            self.hypercall_cycles
        } else {
            self.kick_cycles
        }
    }
}

impl From<&Profile> for Prices {
    fn from(profile: &Profile) -> Self {
        Self {
            invalidation_cycles: Some(profile.invalidation_cycles),
            kick_cycles: Some(profile.kick_cycles),
            hypercall_cycles: Some(profile.hypercall_cycles),
            baseline: Some(Baseline::PerMapping(profile.baseline_cycles)),
            device_side: None,
            clock_ghz: None,
            walkers: 1,
        }
    }
}
