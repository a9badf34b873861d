//! Ports and what is attached below them.

use ringfence_types::{PhysAddr, PhysRange, RequesterId};

use super::Acs;

/// A downstream port: a root port, or a port of a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// First bus below the port (secondary bus number).
    pub first_bus: u8,
    /// Last bus below the port (subordinate bus number), inclusive.
    pub last_bus: u8,
    /// Enabled access controls.
    pub acs: Acs,
    /// Kind of the link below the port.
    pub below: AttachedBelow,
    /// Registers (BARs) of the devices below the port.
    pub windows: Vec<PhysRange>,
}

/// Kind of the link below a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttachedBelow {
    /// PCI Express devices, which send their own requester IDs.
    Express,
    /// A bridge to conventional PCI. It takes ownership of requests: all have the requester ID of
    /// the bridge's secondary bus, device 0, function 0. The IOMMU cannot tell its devices apart.
    ConventionalBridge {
        /// Secondary bus number of the bridge. A bridge below a root port lies itself on the port's
        /// first bus, so its devices lie on a later one.
        secondary_bus: u8,
    },
}

/// Error: a port cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// The range of buses is empty.
    #[error("last bus {last} is below first bus {first}")]
    NoBus {
        /// Secondary bus number of the port.
        first: u8,
        /// Subordinate bus number of the port.
        last: u8,
    },
    /// The secondary bus of the bridge is not below the port.
    #[error("secondary bus {0} of the bridge is not below the port")]
    BridgeBus(u8),
    /// Another port has one of the buses.
    #[error("bus {0} belongs to another port")]
    BusTaken(u8),
    /// Another port has one of the addresses.
    #[error("window {0} overlaps the window of another port")]
    WindowTaken(PhysRange),
}

/// The ports of a machine.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    ports: Vec<Port>,
}

impl Topology {
    /// Creates a machine without ports.
    pub const fn new() -> Self {
        Self { ports: Vec::new() }
    }

    /// Adds a port.
    ///
    /// # Errors
    /// [`PortError`] if its range of buses is empty or omits the bridge's secondary bus, or if its
    /// buses or windows overlap those of another port. Nothing changes.
    pub fn add(&mut self, port: Port) -> Result<(), PortError> {
        let (first, last) = (port.first_bus, port.last_bus);
        if last < first {
            return Err(PortError::NoBus { first, last });
        }
        if let AttachedBelow::ConventionalBridge { secondary_bus } = port.below
            && !port.has_bus(secondary_bus)
        {
            return Err(PortError::BridgeBus(secondary_bus));
        }
        for other in &self.ports {
            if first <= other.last_bus && other.first_bus <= last {
                return Err(PortError::BusTaken(first.max(other.first_bus)));
            }
            let taken = port
                .windows
                .iter()
                .find(|window| other.windows.iter().any(|used| used.overlaps(window)));
            if let Some(window) = taken {
                return Err(PortError::WindowTaken(*window));
            }
        }
        self.ports.push(port);
        Ok(())
    }

    /// Returns the port above `device`.
    pub fn port_of(&self, device: RequesterId) -> Option<&Port> {
        self.ports.iter().find(|port| port.has_bus(device.bus()))
    }

    /// Returns the port above the registers at `at`.
    pub fn port_decoding(&self, at: PhysAddr) -> Option<&Port> {
        self.ports.iter().find(|port| port.decodes(at))
    }
}

impl Port {
    /// Returns true if `bus` is below the port.
    pub const fn has_bus(&self, bus: u8) -> bool {
        self.first_bus <= bus && bus <= self.last_bus
    }

    /// Returns true if a device below the port has registers at `at`.
    pub fn decodes(&self, at: PhysAddr) -> bool {
        self.windows
            .iter()
            .any(|window| window.contains_address(at))
    }

    /// Returns the requester ID that the port receives from a device below it that sends `claimed`.
    pub(super) const fn received(&self, claimed: RequesterId) -> RequesterId {
        match self.below {
            AttachedBelow::Express => claimed,
            AttachedBelow::ConventionalBridge { secondary_bus } => {
                RequesterId::new((secondary_bus as u16) << 8)
            }
        }
    }
}
