//! The attached devices and the domains that they use.

use alloc::collections::BTreeMap;

use ringfence_types::{DomainId, PhysAddr, RequesterId};

use crate::error::UnitError;
use crate::translation::{PageTable, Translation};

/// The stage whose entries a domain-id tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Stage 1, whose entries have an ASID.
    One,
    /// Stage 2, whose entries have a VMID.
    Two,
}

/// A domain with at least one device.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) stage: Stage,
    pub(crate) table: PageTable,
    devices: u32,
    /// Devices whose guest has a stage 1.
    pub(crate) nested: u32,
    /// The context descriptor of stage 1.
    pub(crate) context: PhysAddr,
}

/// An attached device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) stream: u32,
    /// Address of the stream table entry.
    pub(crate) entry: PhysAddr,
    pub(crate) domain: DomainId,
    pub(crate) translation: Translation,
}

impl Device {
    pub(crate) const fn is_nested(&self) -> bool {
        matches!(self.translation, Translation::Nested { .. })
    }

    /// Returns true if the device has a domain.
    pub(crate) const fn has_table(&self) -> bool {
        table_of(&self.translation).is_some()
    }
}

/// Returns the stage and the table that `translation` uses.
const fn table_of(translation: &Translation) -> Option<(Stage, PageTable)> {
    match translation {
        Translation::Abort | Translation::PassThrough => None,
        Translation::Stage1(table) => Some((Stage::One, *table)),
        Translation::Stage2(table) | Translation::Nested { table, .. } => {
            Some((Stage::Two, *table))
        }
    }
}

/// The attached devices and their domains.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    pub(crate) devices: BTreeMap<RequesterId, Device>,
    domains: BTreeMap<DomainId, Domain>,
}

impl Attachments {
    pub(crate) fn domain(&self, domain: DomainId) -> Option<&Domain> {
        self.domains.get(&domain)
    }

    /// Returns the attached device.
    pub(crate) fn device(&self, device: RequesterId) -> Result<&Device, UnitError> {
        let found = self.devices.get(&device);
        found.ok_or(UnitError::NotAttached { device })
    }

    /// Returns true if no other device uses the domain of `device`.
    pub(crate) fn is_last_user(&self, device: &Device) -> bool {
        let domain = self.domains.get(&device.domain);
        device.has_table() && domain.is_some_and(|found| found.devices <= 1)
    }

    /// Checks that a device may use `domain` with `translation`: all users of a domain-id have the
    /// same table, because cached entries bear only the id. `replaced` will be detached.
    pub(crate) fn check(
        &self,
        domain: DomainId,
        translation: &Translation,
        replaced: RequesterId,
    ) -> Result<(), UnitError> {
        let (Some((stage, table)), Some(found)) = (table_of(translation), self.domain(domain))
        else {
            return Ok(());
        };
        let old = self.devices.get(&replaced);
        let own = old.is_some_and(|old| old.domain == domain && self.is_last_user(old));
        match own || (found.stage == stage && found.table == table) {
            true => Ok(()),
            false => Err(UnitError::DomainMismatch { domain }),
        }
    }

    /// Registers a device. `context` is the descriptor of its domain of stage 1.
    pub(crate) fn insert(&mut self, requester: RequesterId, device: Device, context: PhysAddr) {
        if let Some((stage, table)) = table_of(&device.translation) {
            let domain = self.domains.entry(device.domain).or_insert(Domain {
                stage,
                table,
                devices: 0,
                nested: 0,
                context,
            });
            domain.devices = domain.devices.saturating_add(1);
            let nested = u32::from(device.is_nested());
            domain.nested = domain.nested.saturating_add(nested);
        }
        self.devices.insert(requester, device);
    }

    /// Forgets a device. Returns its domain if it was the last user.
    pub(crate) fn remove(&mut self, requester: RequesterId) -> Option<Domain> {
        let device = self.devices.remove(&requester)?;
        table_of(&device.translation)?;
        let domain = self.domains.get_mut(&device.domain)?;
        domain.devices = domain.devices.saturating_sub(1);
        let nested = u32::from(device.is_nested());
        domain.nested = domain.nested.saturating_sub(nested);
        match domain.devices {
            0 => self.domains.remove(&device.domain),
            _ => None,
        }
    }
}
