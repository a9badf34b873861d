//! Device scopes of DMAR (VT-d specification, section 8.3.1).

use ringfence_types::RequesterId;

use crate::bytes::{Bytes, Records};
use crate::error::{FirmwareError, FirmwareErrorKind};
use crate::topology::PciTopology;

/// Bytes before the path.
const HEADER_BYTES: usize = 6;

/// Kinds of devices that a scope names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScopeKind {
    /// One function of a PCI device.
    PciEndpoint,
    /// A PCI bridge and all devices behind it.
    PciSubHierarchy,
    /// An I/O APIC; [`DeviceScope::enumeration_id`] is its ID in MADT.
    IoApic,
    /// A timer block with interrupts as messages; the enumeration ID is its HPET number.
    Hpet,
    /// A device of the ACPI namespace; the enumeration ID is the number in its ANDD structure.
    Namespace,
    /// A type that the specification reserves. It covers no device.
    Other(u8),
}

/// One step of a path: device and function number on a bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PathHop {
    pub device: u8,
    pub function: u8,
}

/// A device, or a bridge with the devices behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceScope<'a> {
    /// Kind of the device.
    pub kind: ScopeKind,
    /// Flags, which only SIDP uses.
    pub flags: u8,
    /// Number of the device in another table, by [`ScopeKind`].
    pub enumeration_id: u8,
    /// Bus where the path begins.
    pub start_bus: u8,
    path: Bytes<'a>,
}

impl<'a> DeviceScope<'a> {
    fn parse(bytes: &Bytes<'a>) -> Result<Self, FirmwareError> {
        let path = bytes.from(HEADER_BYTES)?;
        if path.is_empty() || path.len() % 2 != 0 {
            return Err(bytes.error(0, FirmwareErrorKind::StructureLength));
        }
        let scope = Self {
            kind: match bytes.u8(0)? {
                1 => ScopeKind::PciEndpoint,
                2 => ScopeKind::PciSubHierarchy,
                3 => ScopeKind::IoApic,
                4 => ScopeKind::Hpet,
                5 => ScopeKind::Namespace,
                other => ScopeKind::Other(other),
            },
            flags: bytes.u8(2)?,
            enumeration_id: bytes.u8(4)?,
            start_bus: bytes.u8(5)?,
            path,
        };
        let known = !matches!(scope.kind, ScopeKind::Other(_));
        let too_large = |hop: &PathHop| hop.device > 31 || hop.function > 7;
        if known && let Some(index) = scope.path().position(|hop| too_large(&hop)) {
            return Err(path.error(index.saturating_mul(2), FirmwareErrorKind::DevicePath));
        }
        Ok(scope)
    }

    /// Returns the path from the start bus to the device.
    pub fn path(&self) -> impl Iterator<Item = PathHop> + use<'a> {
        self.path
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|[device, function]| PathHop {
                device: *device,
                function: *function,
            })
    }

    /// Returns the requester ID of the device at the end of the path. `None` if a step before the
    /// last one is no bridge that `topology` knows.
    pub fn resolve(&self, segment: u16, topology: &impl PciTopology) -> Option<RequesterId> {
        let mut bus = self.start_bus;
        let mut device = None;
        for hop in self.path() {
            if let Some(bridge) = device {
                bus = topology.buses_behind(segment, bridge)?.secondary;
            }
            device = Some(RequesterId::from_parts(bus, hop.device, hop.function)?);
        }
        device
    }

    /// Returns true if the scope contains the PCI device `requester` of `segment`, the segment of
    /// the structure that has the scope.
    pub fn covers(
        &self,
        segment: u16,
        requester: RequesterId,
        topology: &impl PciTopology,
    ) -> bool {
        if !matches!(
            self.kind,
            ScopeKind::PciEndpoint | ScopeKind::PciSubHierarchy
        ) {
            return false;
        }
        let Some(device) = self.resolve(segment, topology) else {
            return false;
        };
        let behind = || {
            let buses = topology.buses_behind(segment, device);
            buses.is_some_and(|buses| buses.contain(requester.bus()))
        };
        device == requester || self.kind == ScopeKind::PciSubHierarchy && behind()
    }
}

/// Iterates over the scopes in `bytes`, the end of a structure.
pub(crate) fn scopes(
    bytes: Bytes<'_>,
) -> impl Iterator<Item = Result<DeviceScope<'_>, FirmwareError>> {
    Records::new(bytes, HEADER_BYTES, |rest| rest.u8(1).map(usize::from))
        .map(|record| record.and_then(|record| DeviceScope::parse(&record)))
}

/// The scopes of a structure that has been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scopes<'a>(Bytes<'a>);

impl<'a> Scopes<'a> {
    /// Checks all scopes in `bytes`.
    pub(crate) fn parse(bytes: Bytes<'a>) -> Result<Self, FirmwareError> {
        scopes(bytes).try_for_each(|scope| scope.map(|_| ()))?;
        Ok(Self(bytes))
    }

    /// Returns the scopes, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = DeviceScope<'a>> + use<'a> {
        scopes(self.0).flatten()
    }

    /// Returns true if one of the scopes covers the device ([`DeviceScope::covers`]).
    pub fn cover(&self, segment: u16, requester: RequesterId, topology: &impl PciTopology) -> bool {
        self.iter()
            .any(|scope| scope.covers(segment, requester, topology))
    }
}
