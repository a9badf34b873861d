//! The port to PCI configuration space, for paths that lead through bridges.

use core::ops::Deref;

use ringfence_types::RequesterId;

/// Bus numbers behind a PCI bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BridgeBuses {
    /// The bus directly behind the bridge (offset 19h of its configuration space).
    pub secondary: u8,
    /// The highest bus behind the bridge (offset 1Ah).
    pub subordinate: u8,
}

impl BridgeBuses {
    /// Returns true if `bus` is behind the bridge.
    pub const fn contain(&self, bus: u8) -> bool {
        self.secondary <= bus && bus <= self.subordinate
    }
}

/// Knows the bridges of the machine. A table names a device behind bridges by the path to it, and
/// the bus numbers on this path are in configuration space only.
pub trait PciTopology {
    /// Returns the buses behind `bridge`. `None` if this is no bridge, or has no bus numbers yet.
    fn buses_behind(&self, segment: u16, bridge: RequesterId) -> Option<BridgeBuses>;
}

/// A machine without bridges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoBridges;

impl PciTopology for NoBridges {
    fn buses_behind(&self, _segment: u16, _bridge: RequesterId) -> Option<BridgeBuses> {
        None
    }
}

/// Pointers to a topology implement the port too.
impl<P: Deref<Target: PciTopology>> PciTopology for P {
    fn buses_behind(&self, segment: u16, bridge: RequesterId) -> Option<BridgeBuses> {
        (**self).buses_behind(segment, bridge)
    }
}
